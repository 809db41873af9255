-- Prelude of every script. KEYS[1] is the model's prefix; all other keys are built from it and lie in its slot.
-- Payloads are opaque strings: cmsgpack is never used (it refuses `bin` and damages integers past 2^53).
local P = KEYS[1]

-- Makes the writes that follow possible on a full server (checked once, at a script's first write). Not in `admit`.
local function run_when_full() redis.call('DEL', P .. 'absent') end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A hint, so the oldest may go.
local function announce(event) redis.call('XADD', P .. 'events', 'MAXLEN', '~', 1000, '*', 'm', event) end

local function open_queue() redis.pcall('XGROUP', 'CREATE', P .. 'requests', 'schedulers', '0', 'MKSTREAM') end

local function sequence_key(sid) return P .. 's:' .. sid end
local function request_of(sid) return string.match(sid, '^(.*)%.%d+$') end

-- A sequence before its first place. Its fields: name, value..., besides those that all begin with. Returns its key.
-- num_tokens is where its log ends, among the output tokens: below 0 while log-probabilities of the prompt are missing.
local function new_sequence(sid, ...)
  local s = sequence_key(sid)
  redis.call('HSET', s, 'epoch', 0, 'attach', 1, 'num_tokens', 0, 'strikes', 0, ...)
  return s
end

-- By this key a call that is repeated finds the first one, as long as that is kept.
local function name_for_repeats(rid, key)
  if key == '' then return end
  redis.call('HSET', P .. 'r:' .. rid, 'repeat_key', key)
  redis.call('SET', P .. 'repeat:' .. key, rid)
end

-- The header carries the deadlines that still count: to start, until it has been placed once; for the first token, until
-- there is one; for all of it.
local function enqueue(sid, s, epoch)
  local f = redis.call('HMGET', s, 'prompt_tokens', 'num_tokens', 'priority', 'arrival_ms', 'strikes')
  local d = redis.call('HMGET', P .. 'r:' .. request_of(sid), 'owner', 'start_by', 'first_by', 'end_by')
  local start_by = tonumber(epoch) == 0 and d[2] or 0
  local first_by = tonumber(f[2]) <= 0 and d[3] or 0
  local qid = redis.call('XADD', P .. 'requests', '*', 'sid', sid, 'epoch', epoch, 'prompt', f[1], 'output', f[2],
    'priority', f[3], 'arrival', f[4], 'strikes', f[5], 'key', d[1] or '', 'start_by', start_by or 0,
    'first_by', first_by or 0, 'end_by', d[4] or 0)
  redis.call('HSET', s, 'state', 'queued', 'worker', '', 'qid', qid)
  redis.call('HINCRBY', P .. 'queue', 'tokens', f[1])
end

local function dequeue(s)
  local f = redis.call('HMGET', s, 'qid', 'prompt_tokens')
  if f[1] and f[1] ~= '' then
    redis.call('XACK', P .. 'requests', 'schedulers', f[1])
    if redis.call('XDEL', P .. 'requests', f[1]) == 1 then
      redis.call('HINCRBY', P .. 'queue', 'tokens', -f[2])
      redis.call('HINCRBY', P .. 'queue', 'left', 1) -- ever: two readings tell how fast the queue drains
    end
    redis.call('HSET', s, 'qid', '')
  end
end

-- What an API key may use in a minute is a bucket that refills evenly, kept as the time (ms) at which it is full again.
-- Once that has passed there is nothing to keep.
local function bucket_full_at(owner, what, now)
  return math.max(now, tonumber(redis.call('HGET', P .. 'rate:' .. owner, what) or 0))
end
local function take_from_bucket(owner, what, now, ms)
  local rate, full_at = P .. 'rate:' .. owner, bucket_full_at(owner, what, now) + ms
  redis.call('HSET', rate, what, full_at)
  local ttl = math.ceil(full_at - now)
  if redis.call('PTTL', rate) < ttl then redis.call('PEXPIRE', rate, ttl) end
end

-- All keys of a request expire.
local function expire_request(rid)
  local r = P .. 'r:' .. rid
  local f = redis.call('HMGET', r, 'n', 'retention_ms', 'repeat_key')
  if not f[2] then return end -- another of the call, that is gone already
  redis.call('PEXPIRE', r, f[2])
  if f[3] then redis.call('PEXPIRE', P .. 'repeat:' .. f[3], f[2]) end
  for i = 0, f[1] - 1 do
    local s = sequence_key(rid .. '.' .. i)
    redis.call('PEXPIRE', s, f[2])
    redis.call('PEXPIRE', s .. ':log', f[2])
  end
end

-- When the last sequence of a request is done its key may have another one open, and its tokens are taken from what the
-- key may use. With the last request of its call all keys of the call expire: it is there as a whole, or not at all.
-- Returns nothing.
local function settle_request(rid)
  local r = P .. 'r:' .. rid
  if redis.call('EXISTS', r) == 0 then return end
  if redis.call('HINCRBY', r, 'open', -1) > 0 then return end
  local f = redis.call('HMGET', r, 'n', 'owner', 'token_ms', 'call')
  redis.call('SREM', P .. 'open:' .. f[2], rid)
  if f[3] then
    local num_tokens = 0
    for i = 0, f[1] - 1 do
      num_tokens = num_tokens + math.max(0, redis.call('HGET', sequence_key(rid .. '.' .. i), 'num_tokens') or 0)
    end
    if num_tokens > 0 then take_from_bucket(f[2], 'tokens', now_ms(), num_tokens * f[3]) end
  end
  local call = f[4] and P .. 'r:' .. f[4]
  if not call or redis.call('EXISTS', call) == 0 then return expire_request(rid) end
  if redis.call('HINCRBY', call, 'open_requests', -1) > 0 then return end
  for one in string.gmatch(redis.call('HGET', call, 'requests') or rid, '%S+') do expire_request(one) end
end

-- Enters `done`, once; the caller has checked that the state is not done. Returns the gateway's stream name.
local function settle(sid, s, outcome)
  local f = redis.call('HMGET', s, 'state', 'gateway', 'worker')
  if f[1] == 'queued' then
    dequeue(s)
  elseif f[3] and f[3] ~= '' then
    redis.call('SREM', P .. 'on:' .. f[3], sid)
  end
  redis.call('HSET', s, 'state', 'done', 'outcome', outcome)
  settle_request(request_of(sid))
  return f[2]
end

-- Enters `done` and writes the terminal entry to the gateway that the record names.
local function terminate(sid, s, outcome)
  local gateway = settle(sid, s, outcome)
  redis.call('XADD', P .. 'out:' .. gateway, 'NOMKSTREAM', '*', '!' .. sid, outcome)
end

-- What people are told of a sequence that was given up: what it was and why, no text of it.
local function keep_dead(sid, s, reason, deaths)
  local worker, prompt, output = unpack(redis.call('HMGET', s, 'worker', 'prompt_tokens', 'num_tokens'))
  redis.call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'sid', sid, 'reason', reason, 'deaths', deaths,
    'prompt', prompt, 'output', math.max(0, output), 'worker', worker or '')
end
