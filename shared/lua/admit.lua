-- Bounds, records and queue entries of a call: of all its prompts, or of none. Idempotent by its first rid. The first
-- write is refused on a full server: nothing is half done. ARGV: max_requests, max_tokens, gateway, priority,
-- resume_ms, how many fields, then name and value of each, as they go into every request's record, then 5 a prompt:
-- rid, n, tokens, prompt, spec.
local max_requests, max_tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local gateway, priority, resume_ms = ARGV[3], ARGV[4], ARGV[5]
local first = 7 + 2 * ARGV[6]
local r = P .. 'r:' .. ARGV[first]
if redis.call('EXISTS', r) == 1 then return {'exists', 0} end
local n, num_tokens = 0, 0
for i = first, #ARGV, 5 do
  n = n + ARGV[i + 1]
  num_tokens = num_tokens + ARGV[i + 1] * ARGV[i + 2]
end
local queued = redis.call('XLEN', P .. 'requests')
if queued + n > max_requests then return {'full_requests', queued} end
local tokens = tonumber(redis.call('HGET', P .. 'queue', 'tokens') or '0')
if queued > 0 and tokens + num_tokens > max_tokens then return {'full_tokens', tokens} end
local now = now_ms()

local function admit(rid, choices, prompt_tokens, prompt, spec)
  redis.call('HSET', P .. 'r:' .. rid, 'prompt', prompt, 'spec', spec, 'n', choices, 'open', choices,
    'arrival_ms', now, 'resume_ms', resume_ms, unpack(ARGV, 7, first - 1))
  for i = 0, choices - 1 do
    local sid = rid .. '.' .. i
    local s = sequence_key(sid)
    redis.call('HSET', s, 'epoch', 0, 'gateway', gateway, 'attach', 1, 'num_tokens', 0, 'strikes', 0,
      'prompt_tokens', prompt_tokens, 'priority', priority, 'arrival_ms', now, 'resume_ms', resume_ms)
    enqueue(sid, s, 0)
  end
end

for i = first, #ARGV, 5 do admit(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]) end
return {'ok', queued + n}
