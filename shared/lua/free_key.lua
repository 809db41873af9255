-- A call that failed gives up the key by which others repeat it: the next one with that key is another try
-- Nothing if the key is another call's by now. ARGV: repeat key, rid. Answer: 1, or 0.
run_when_full()
local key, rid = ARGV[1], ARGV[2]
local named = P .. 'repeat:' .. key
if redis.call('GET', named) ~= rid then return 0 end
redis.call('DEL', named)
redis.call('HDEL', P .. 'r:' .. rid, 'repeat_key')
return 1
