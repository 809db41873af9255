-- Ends a sequence that workers die of, at exactly that epoch, and keeps it for people in `dead`: what it was and why, no
-- text of it. ARGV: sid, epoch, outcome, reason, deaths. Answer: 1, or 0 if it was not there.
run_when_full()
local sid, epoch, outcome, reason, deaths = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local s = sequence_key(sid)
local f = redis.call('HMGET', s, 'state', 'epoch')
if not f[1] or f[1] == 'done' or f[2] ~= epoch then return 0 end
terminate(sid, s, outcome)
keep_dead(sid, s, reason, deaths)
return 1
