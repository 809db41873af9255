-- Cancels sequences whose attach number is still the caller's: ARGV: number, outcome, event, sid...
-- A worker learns it from its next commit, a scheduler that still queues one from the event.
run_when_full()
local number, outcome, event, cancelled, queued = ARGV[1], ARGV[2], ARGV[3], 0, false
for i = 4, #ARGV do
  local s = sequence_key(ARGV[i])
  local f = redis.call('HMGET', s, 'state', 'attach')
  if f[1] and f[1] ~= 'done' and f[2] == number then
    queued = queued or f[1] == 'queued'
    terminate(ARGV[i], s, outcome)
    cancelled = cancelled + 1
  end
end
if queued then announce(event) end
return cancelled
