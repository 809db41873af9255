-- A gateway becomes the reader of a request. ARGV: rid, gateway, number: '' = a client's attach, which always wins;
-- else that of a gateway that comes back as a new incarnation, which loses if it is not current. Either way the number
-- goes up, so that a cancel decided while the old incarnation was the reader does nothing. Repeated by the gateway
-- that has it by now: the same answer. The old gateway is told the new number, by which it knows whether it has
-- attached again since. Answer: {status, n, then state, attach number, log length a choice}.
run_when_full()
local rid, gateway, number = ARGV[1], ARGV[2], ARGV[3]
local n = tonumber(redis.call('HGET', P .. 'r:' .. rid, 'n') or '0')
if n == 0 then return {'gone', 0} end
local function reader(i)
  local f = redis.call('HMGET', sequence_key(rid .. '.' .. i), 'attach', 'gateway')
  return f[1], f[2]
end

if number ~= '' then
  for i = 0, n - 1 do
    local current, owner = reader(i)
    local repeated = owner == gateway and current == tostring(number + 1)
    if current ~= number and not repeated then return {'lost', n} end
  end
end
local reply = {'ok', n}
for i = 0, n - 1 do
  local sid = rid .. '.' .. i
  local s = sequence_key(sid)
  local _, owner = reader(i)
  if number == '' or owner ~= gateway then redis.call('HINCRBY', s, 'attach', 1) end
  if owner ~= gateway then
    redis.call('HSET', s, 'gateway', gateway)
    redis.call('XADD', P .. 'out:' .. owner, 'NOMKSTREAM', '*', '>' .. sid, redis.call('HGET', s, 'attach'))
  end
  local f = redis.call('HMGET', s, 'state', 'attach', 'num_tokens')
  for _, v in ipairs({f[1], tonumber(f[2]), tonumber(f[3])}) do reply[#reply + 1] = v end
end
return reply
