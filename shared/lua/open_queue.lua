-- Makes the group of schedulers that read the queue; the queue itself is not touched if it is there.
run_when_full()
open_queue()
return 1
