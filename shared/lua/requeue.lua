-- placed -> queued, of exactly that epoch; commits of the old place are stale from here on. The place in the queue
-- (arrival, priority) is kept. ARGV: sid, epoch, strikes to add.
run_when_full()
local sid, epoch, strikes = ARGV[1], ARGV[2], ARGV[3]
local s = sequence_key(sid)
local f = redis.call('HMGET', s, 'state', 'epoch', 'worker')
if f[1] ~= 'placed' or f[2] ~= epoch then return 0 end
redis.call('SREM', P .. 'on:' .. f[3], sid)
if strikes ~= '0' then redis.call('HINCRBY', s, 'strikes', strikes) end
enqueue(sid, s, epoch)
return 1
