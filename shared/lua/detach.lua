-- Nobody reads these sequences any more: those whose attach number is still the caller's are cancelled by a scheduler
-- after `wait_ms`, unless a client attaches before. ARGV: number, wait_ms, sid...
run_when_full()
local number, orphan_at, detached = ARGV[1], now_ms() + ARGV[2], 0
for i = 3, #ARGV do
  local s = sequence_key(ARGV[i])
  local f = redis.call('HMGET', s, 'state', 'attach', 'gateway')
  if f[1] ~= 'done' and f[2] == number and f[3] ~= '' then
    redis.call('HSET', s, 'gateway', '', 'orphan_at_ms', orphan_at)
    detached = detached + 1
  end
end
return detached
