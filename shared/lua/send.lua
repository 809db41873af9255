-- Appends messages to a stream that somebody reads. ARGV: stream, message... Answer: 1, or 0 if nobody does any more.
run_when_full()
local sent = 1
for i = 2, #ARGV do
  if not redis.call('XADD', P .. ARGV[1], 'NOMKSTREAM', '*', 'm', ARGV[i]) then sent = 0 end
end
return sent
