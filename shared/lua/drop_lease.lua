-- Gives a lease back so that another can take it at once. ARGV: kind, id, owner.
run_when_full()
local lease = P .. 'lease:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('GET', lease) ~= ARGV[3] then return 0 end
return redis.call('DEL', lease)
