-- A gateway becomes the reader of a request. ARGV: rid, gateway, number: '' = a client's attach, which always wins;
-- else that of a gateway that comes back as a new incarnation, which loses if it is not current. Either way the number
-- goes up, so that a cancel decided while the old incarnation was the reader does nothing. Repeated by the gateway
-- that has it by now: the same answer. Answer: {status, n, then state, attach number, log length a choice}.
run_when_full()
local rid, gateway, number = ARGV[1], ARGV[2], ARGV[3]
local n = tonumber(redis.call('HGET', P .. 'r:' .. rid, 'n') or '0')
if n == 0 then return {'gone', 0} end
if number ~= '' then
  for i = 0, n - 1 do
    if redis.call('HGET', sequence_key(rid .. '.' .. i), 'attach') ~= number then return {'lost', n} end
  end
end
local reply = {'ok', n}
for i = 0, n - 1 do
  local sid = rid .. '.' .. i
  local s = sequence_key(sid)
  local f = redis.call('HMGET', s, 'state', 'attach', 'gateway', 'num_tokens')
  if number == '' then f[2] = redis.call('HINCRBY', s, 'attach', 1) end
  if f[3] ~= gateway then
    redis.call('HSET', s, 'gateway', gateway)
    redis.call('XADD', P .. 'out:' .. f[3], 'NOMKSTREAM', '*', '>' .. sid, gateway)
  end
  for _, v in ipairs({f[1], tonumber(f[2]), tonumber(f[4])}) do reply[#reply + 1] = v end
end
return reply
