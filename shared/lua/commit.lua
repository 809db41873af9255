-- Appends token chunks to the durable logs, tells each gateway once, and forwards the worker's report.
-- ARGV: worker, lease_ms, inbox, report, then 6 a sequence: sid, epoch, first, count, chunk, outcome ('' = goes on).
-- Answer a sequence: {code, log length}; 0 appended, 1 have, 2 from, 3 stale, 4 done.
run_when_full()
local worker, lease_ms, inbox, report = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('PEXPIRE', P .. 'lease:worker:' .. worker, lease_ms) == 0 then return {'lapsed'} end
local answers, entries, order = {'ok'}, {}, {}

local function tell(gateway, field, value)
  local entry = entries[gateway]
  if not entry then
    entry = {}
    entries[gateway] = entry
    order[#order + 1] = gateway
  end
  entry[#entry + 1] = field
  entry[#entry + 1] = value
end

local function commit_one(sid, epoch, first, count, chunk, outcome)
  local s = sequence_key(sid)
  local f = redis.call('HMGET', s, 'state', 'epoch', 'num_tokens', 'gateway')
  if not f[1] then return {4, 0} end
  local length = tonumber(f[3])
  if f[1] == 'done' then return {4, length} end
  if f[1] ~= 'placed' or f[2] ~= epoch then return {3, length} end
  local code, last = 0, first + count
  if count > 0 and first == length then
    redis.call('RPUSH', s .. ':log', chunk)
    length = last
    redis.call('HSET', s, 'num_tokens', length)
    tell(f[4], sid, chunk)
  elseif last > length then
    return {2, length} -- also of no tokens: the log has lost its end, so it must not be closed there
  elseif count > 0 or last < length then
    code = 1
  end
  if outcome ~= '' and last == length then
    settle(sid, s, outcome)
    tell(f[4], '!' .. sid, outcome)
  end
  return {code, length}
end

for i = 5, #ARGV, 6 do
  answers[#answers + 1] =
    commit_one(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5])
end
for _, gateway in ipairs(order) do
  redis.call('XADD', P .. 'out:' .. gateway, 'NOMKSTREAM', '*', unpack(entries[gateway]))
end
if report ~= '' then redis.call('XADD', P .. 'inbox:' .. inbox, 'NOMKSTREAM', '*', 'm', report) end
return answers
