-- Forgets a dead worker whose sequences have all been re-queued. ARGV: worker. Answer: 1, or 0 while some are left
-- or its lease is held.
run_when_full()
local worker = ARGV[1]
if redis.call('EXISTS', P .. 'lease:worker:' .. worker) == 1 then return 0 end
if redis.call('SCARD', P .. 'on:' .. worker) > 0 then return 0 end
redis.call('HDEL', P .. 'members', worker)
redis.call('DEL', P .. 'plan:' .. worker, P .. 'planned:' .. worker)
return 1
