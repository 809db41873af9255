-- Runs a dead request again, under another id: a copy of its record with no reader, without time limits and rates, its
-- sequences suspects from the start. Refused on a full server. ARGV: old rid, new rid, spec, strikes, resume_ms,
-- where its logs begin.
-- Answer: ok, exists (a repeat), or gone (the record has expired).
local old, new, spec, strikes, resume_ms, log_start = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local r = P .. 'r:' .. new
if redis.call('EXISTS', r) == 1 then return 'exists' end
local fields = redis.call('HGETALL', P .. 'r:' .. old)
local record = {}
for i = 1, #fields, 2 do record[fields[i]] = fields[i + 1] end
if not record['n'] then return 'gone' end
local now = now_ms()
redis.call('HSET', r, unpack(fields))
redis.call('HSET', r, 'spec', spec, 'open', record['n'], 'arrival_ms', now, 'resume_ms', resume_ms, 'start_by', 0,
  'first_by', 0, 'end_by', 0)
redis.call('HDEL', r, 'token_ms', 'repeat_key', 'call', 'requests', 'open_requests')
for i = 0, record['n'] - 1 do
  local sid = new .. '.' .. i
  local f = redis.call('HMGET', sequence_key(old .. '.' .. i), 'prompt_tokens', 'priority')
  enqueue(sid, new_sequence(sid, 'gateway', '', 'strikes', strikes, 'prompt_tokens', f[1], 'priority', f[2],
    'arrival_ms', now, 'resume_ms', resume_ms, 'orphan_at_ms', now + resume_ms, 'num_tokens', log_start), 0)
end
return 'ok'
