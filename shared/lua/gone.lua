-- An incarnation has ended (its supervisor or itself says so). ARGV: kind, incarnation, event.
-- A worker and a scheduler leave work behind: they stay in `members` until a scheduler has cleaned up after them.
run_when_full()
local kind, id = ARGV[1], ARGV[2]
redis.call('DEL', P .. 'lease:' .. kind .. ':' .. id)
if kind == 'gateway' or kind == 'store' then redis.call('HDEL', P .. 'members', id) end
announce(ARGV[3])
return 1
