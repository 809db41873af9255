-- Ends a sequence with an outcome, once: a gateway's stop string, or a scheduler's error. Epoch '' = any.
run_when_full()
local sid, epoch, outcome = ARGV[1], ARGV[2], ARGV[3]
local s = sequence_key(sid)
local f = redis.call('HMGET', s, 'state', 'epoch')
if not f[1] or f[1] == 'done' then return 0 end
if epoch ~= '' and f[2] ~= epoch then return 0 end
terminate(sid, s, outcome)
return 1
