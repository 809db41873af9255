-- Bounds, record, queue entries. Idempotent by rid. Its first write is refused on a full server: nothing is half done.
local rid, n, prompt, spec, gateway = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local num_tokens, priority, owner = tonumber(ARGV[6]), ARGV[7], ARGV[8]
local max_requests, max_tokens, retention_ms = tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11]
local r = P .. 'r:' .. rid
if redis.call('EXISTS', r) == 1 then return {'exists', 0} end
local queued = redis.call('XLEN', P .. 'requests')
if queued + n > max_requests then return {'full_requests', queued} end
local tokens = tonumber(redis.call('HGET', P .. 'queue', 'tokens') or '0')
if queued > 0 and tokens + n * num_tokens > max_tokens then return {'full_tokens', tokens} end
local now = now_ms()
redis.call('HSET', r, 'prompt', prompt, 'spec', spec, 'owner', owner, 'n', n, 'open', n,
  'arrival_ms', now, 'retention_ms', retention_ms)
for i = 0, n - 1 do
  local sid = rid .. '.' .. i
  local s = sequence_key(sid)
  redis.call('HSET', s, 'epoch', 0, 'gateway', gateway, 'attach', 1, 'num_tokens', 0, 'strikes', 0,
    'prompt_tokens', num_tokens, 'priority', priority, 'arrival_ms', now)
  enqueue(sid, s, 0)
end
return {'ok', queued + n}
