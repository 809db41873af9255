-- A living incarnation says something else of itself. ARGV: kind, incarnation, member, event. Answer: 1, or 0 if its
-- lease has lapsed.
run_when_full()
local kind, id, member, event = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('EXISTS', P .. 'lease:' .. kind .. ':' .. id) == 0 then return 0 end
redis.call('HSET', P .. 'members', id, member)
announce(event)
return 1
