-- Keeps in `dead`, for people, a sequence that has ended by an error of its own, once. ARGV: sid, reason.
-- Answer: 1, or 0 if that is there already, or the record is not.
run_when_full()
local sid, reason = ARGV[1], ARGV[2]
local s = sequence_key(sid)
local f = redis.call('HMGET', s, 'state', 'is_dead')
if f[1] ~= 'done' or f[2] then return 0 end
redis.call('HSET', s, 'is_dead', 1)
keep_dead(sid, s, reason, 0)
return 1
