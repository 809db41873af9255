-- Hands a queued sequence to the scheduler that leases its best worker, once an epoch. ARGV: sid, epoch, scheduler.
-- ok, stale (not queued at that epoch), offered (it was already), or gone (that scheduler reads no more).
run_when_full()
local sid, epoch, scheduler = ARGV[1], ARGV[2], ARGV[3]
local s = sequence_key(sid)
local f = redis.call('HMGET', s, 'state', 'epoch', 'qid', 'offered')
if f[1] ~= 'queued' or f[2] ~= epoch then return 'stale' end
if f[4] == epoch then return 'offered' end
if redis.call('EXISTS', P .. 'lease:scheduler:' .. scheduler) == 0 then return 'gone' end
local header = redis.call('XRANGE', P .. 'requests', f[3], f[3])[1]
if not header then return 'stale' end
if not redis.call('XADD', P .. 'inbox:' .. scheduler, 'NOMKSTREAM', '*', unpack(header[2])) then return 'gone' end
redis.call('XCLAIM', P .. 'requests', 'schedulers', scheduler, 0, f[3], 'JUSTID')
redis.call('HSET', s, 'offered', epoch)
return 'ok'
