-- Forgets a dead scheduler once the living have claimed its queue entries: those of a deleted consumer would be
-- delivered to nobody. ARGV: scheduler. Answer: 1, or 0 while it holds entries or its lease is held.
run_when_full()
local scheduler, stream = ARGV[1], P .. 'requests'
if redis.call('EXISTS', P .. 'lease:scheduler:' .. scheduler) == 1 then return 0 end
if redis.call('XPENDING', stream, 'schedulers', '-', '+', 1, scheduler)[1] then return 0 end
redis.call('XGROUP', 'DELCONSUMER', stream, 'schedulers', scheduler)
redis.call('HDEL', P .. 'members', scheduler)
return 1
