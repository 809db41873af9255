-- Puts back a request that a Redis without an append-only file has forgotten, with the tokens that its gateway has had.
-- Nothing if it is there. ARGV: rid, gateway, attach number, owner, resume_ms, retention_ms, body digest, priority,
-- total_ms (0 = no limit, else from now on), prompt tokens, prompt, spec, n, repeat key or '', then a choice: outcome
-- ('' = goes on), where its log ends, number of chunks, chunk... Answer: 1, or 0. Prompts of a call come back one by
-- one, and expire so.
run_when_full()
local rid, gateway, attach, owner, resume_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local total_ms, prompt_tokens, n = tonumber(ARGV[9]), ARGV[10], tonumber(ARGV[13])
local r, now, at = P .. 'r:' .. rid, now_ms(), 15
if redis.call('EXISTS', r) == 1 then return 0 end
redis.call('HSET', r, 'prompt', ARGV[11], 'spec', ARGV[12], 'n', n, 'open', n, 'arrival_ms', now,
  'resume_ms', resume_ms, 'owner', owner, 'start_by', 0, 'first_by', 0, 'end_by', total_ms > 0 and now + total_ms or 0,
  'retention_ms', ARGV[6], 'body_digest', ARGV[7])
name_for_repeats(rid, ARGV[14])
redis.call('SADD', P .. 'open:' .. owner, rid)
for i = 0, n - 1 do
  local sid = rid .. '.' .. i
  local outcome, num_chunks = ARGV[at], tonumber(ARGV[at + 2])
  redis.call('DEL', sequence_key(sid), sequence_key(sid) .. ':log')
  local s = new_sequence(sid, 'gateway', gateway, 'attach', attach, 'num_tokens', ARGV[at + 1],
    'prompt_tokens', prompt_tokens, 'priority', ARGV[8], 'arrival_ms', now, 'resume_ms', resume_ms)
  for c = 1, num_chunks do redis.call('RPUSH', s .. ':log', ARGV[at + 2 + c]) end
  at = at + 3 + num_chunks
  if outcome == '' then
    enqueue(sid, s, 0)
  else
    settle(sid, s, outcome)
  end
end
return 1
