-- An incarnation has ended (its supervisor or itself says so). ARGV: kind, incarnation, event.
run_when_full()
redis.call('DEL', P .. 'lease:' .. ARGV[1] .. ':' .. ARGV[2])
if ARGV[1] ~= 'worker' then redis.call('HDEL', P .. 'members', ARGV[2]) end
redis.call('XADD', P .. 'events', 'MAXLEN', '~', 1000, '*', 'm', ARGV[3])
return 1
