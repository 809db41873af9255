-- A new incarnation announces itself and makes the streams that only it reads; a scheduler also the queue's group.
-- ARGV: kind, incarnation, lease_ms, stream_ms, member, event, stream... Answer: the id after which to read each.
run_when_full()
local kind, id, lease_ms, stream_ms, member, event = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
redis.call('SET', P .. 'lease:' .. kind .. ':' .. id, id, 'PX', lease_ms)
redis.call('HSET', P .. 'members', id, member)
if kind == 'scheduler' then open_queue() end
local ids = {}
for i = 7, #ARGV do
  ids[#ids + 1] = redis.call('XADD', P .. ARGV[i], '*', 'born', id)
  redis.call('PEXPIRE', P .. ARGV[i], stream_ms)
end
announce(event)
return ids
