-- Refreshes an incarnation's lease, keeps its streams alive and trims them up to what it has handled.
-- ARGV: kind, incarnation, lease_ms, stream_ms, then stream, handled id. Answer: {'lapsed'}, or {'ok', last id a stream}
-- ('' where the stream is gone): a last id below the handled one means that the stream is not the one it was.
run_when_full()
local kind, id, lease_ms, stream_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('PEXPIRE', P .. 'lease:' .. kind .. ':' .. id, lease_ms) == 0 then return {'lapsed'} end
if kind == 'worker' then redis.call('PEXPIRE', P .. 'planned:' .. id, stream_ms) end
local reply = {'ok'}
for i = 5, #ARGV, 2 do
  local stream = P .. ARGV[i]
  redis.call('PEXPIRE', stream, stream_ms)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  reply[#reply + 1] = last[1] and last[1][1] or ''
  if last[1] then redis.call('XTRIM', stream, 'MINID', ARGV[i + 1]) end
end
return reply
