-- Appends a message to a stream that somebody reads. ARGV: stream, message. Answer: 1, or 0 if nobody does any more.
run_when_full()
return redis.call('XADD', P .. ARGV[1], 'NOMKSTREAM', '*', 'm', ARGV[2]) and 1 or 0
