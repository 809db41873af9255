-- Appends to the stream of hints that all services read. ARGV: event.
run_when_full()
announce(ARGV[1])
return 1
