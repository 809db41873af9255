-- Bounds, records and queue entries of a call: of all its prompts, or of none. Idempotent by its first rid and, where it
-- has one, by its repeat key. The first write is refused on a full server: nothing is half done. ARGV: max_requests,
-- max_tokens, gateway, priority, resume_ms, owner, what the owner (an API key) may have: open prompts, calls a minute,
-- tokens a minute (0 = any), time limits (ms, 0 = none) of which deadlines are made here: to start, for the first token,
-- for all; repeat key or '', how many fields, name and value of each, as they go into every request's record, then 6 a
-- prompt: rid, n, tokens, prompt, spec, where its logs begin.
-- Answer: {status, the number that it is about, ms to wait, sequences that have ever left the queue, then of requests
-- and of tokens: what is left of the owner's minute, ms until all of it is; the rid of the call that is meant}.
local max_requests, max_tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local gateway, priority, resume_ms, owner = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local max_open, per_minute = tonumber(ARGV[7]), {requests = tonumber(ARGV[8]), tokens = tonumber(ARGV[9])}
local start_ms, first_ms, end_ms = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local repeat_key, first = ARGV[13], 15 + 2 * ARGV[14]
local rid = repeat_key ~= '' and redis.call('GET', P .. 'repeat:' .. repeat_key) or ARGV[first]
local r, opened, now, num_prompts = P .. 'r:' .. rid, P .. 'open:' .. owner, now_ms(), (#ARGV - first + 1) / 6
local MINUTE_MS, ROUNDING = 60000, 1e-6

local function left_of(what)
  return per_minute[what] - (bucket_full_at(owner, what, now) - now) * per_minute[what] / MINUTE_MS
end
local function answer(status, number, wait_ms)
  local reply = {status, number, math.ceil(wait_ms or 0), tonumber(redis.call('HGET', P .. 'queue', 'left') or 0)}
  for _, what in ipairs({'requests', 'tokens'}) do
    reply[#reply + 1] = math.max(0, math.floor(left_of(what) + ROUNDING))
    reply[#reply + 1] = math.ceil(bucket_full_at(owner, what, now) - now)
  end
  reply[#reply + 1] = rid
  return reply
end
local function wait_ms_for(what, wanted)
  if per_minute[what] == 0 then return 0 end
  return (wanted - ROUNDING - left_of(what)) * MINUTE_MS / per_minute[what]
end

if redis.call('EXISTS', r) == 1 then return answer('exists', 0) end
rid = ARGV[first]
local n, num_tokens, prompt_tokens = 0, 0, 0
for i = first, #ARGV, 6 do
  -- Everybody counts with this: a wrong number would hold up others, and a huge one could never be taken back.
  local num, too_odd = tonumber(ARGV[i + 2]), 'ERR a prompt is not as long as is said'
  if num < 1 or #ARGV[i + 3] ~= 4 * num then return redis.error_reply(too_odd) end
  n = n + ARGV[i + 1]
  num_tokens = num_tokens + ARGV[i + 1] * ARGV[i + 2]
  prompt_tokens = prompt_tokens + ARGV[i + 2]
end
-- One call alone may have more than the owner may: else it could never run.
local open = redis.call('SCARD', opened)
if max_open > 0 and open > 0 and open + num_prompts > max_open then return answer('key_open', max_open) end
local wait_ms = wait_ms_for('requests', 1)
if wait_ms > 0 then return answer('key_requests', per_minute.requests, wait_ms) end
wait_ms = wait_ms_for('tokens', math.min(prompt_tokens, per_minute.tokens))
if wait_ms > 0 then return answer('key_tokens', per_minute.tokens, wait_ms) end
local queued = redis.call('XLEN', P .. 'requests')
if queued + n > max_requests then return answer('full_requests', queued) end
local tokens = tonumber(redis.call('HGET', P .. 'queue', 'tokens') or '0')
if queued > 0 and tokens + num_tokens > max_tokens then return answer('full_tokens', tokens) end

local function deadline(ms) return ms > 0 and now + ms or 0 end
local function admit(rid, choices, prompt_tokens, prompt, spec, log_start)
  redis.call('HSET', P .. 'r:' .. rid, 'prompt', prompt, 'spec', spec, 'n', choices, 'open', choices,
    'arrival_ms', now, 'resume_ms', resume_ms, 'owner', owner, 'start_by', deadline(start_ms),
    'first_by', deadline(first_ms), 'end_by', deadline(end_ms), unpack(ARGV, 15, first - 1))
  redis.call('SADD', opened, rid)
  if per_minute.tokens > 0 then redis.call('HSET', P .. 'r:' .. rid, 'token_ms', MINUTE_MS / per_minute.tokens) end
  for i = 0, choices - 1 do
    local sid = rid .. '.' .. i
    enqueue(sid, new_sequence(sid, 'gateway', gateway, 'prompt_tokens', prompt_tokens, 'priority', priority,
      'arrival_ms', now, 'resume_ms', resume_ms, 'num_tokens', log_start), 0)
  end
end

for i = first, #ARGV, 6 do
  admit(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5])
end
if num_prompts > 1 then -- they expire together
  local rids = {}
  for i = first, #ARGV, 6 do
    redis.call('HSET', P .. 'r:' .. ARGV[i], 'call', rid)
    rids[#rids + 1] = ARGV[i]
  end
  redis.call('HSET', P .. 'r:' .. rid, 'requests', table.concat(rids, ' '), 'open_requests', num_prompts)
end
name_for_repeats(rid, repeat_key)
if per_minute.requests > 0 then take_from_bucket(owner, 'requests', now, MINUTE_MS / per_minute.requests) end
if per_minute.tokens > 0 then
  take_from_bucket(owner, 'tokens', now, prompt_tokens * MINUTE_MS / per_minute.tokens)
end
return answer('ok', queued + n)
