-- queued -> placed, with the Admit in the worker's plan in the same call: nothing lies between assigned and sent.
run_when_full()
local sid, epoch, worker, term, admit = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local s = sequence_key(sid)
local f = redis.call('HMGET', s, 'state', 'epoch', 'worker')
if redis.call('HGET', P .. 'term', 'run:' .. worker) ~= term then return {'fenced', ''} end
if f[1] == 'placed' and f[2] == tostring(epoch + 1) and f[3] == worker then return {'ok', ''} end -- a lost reply
if f[1] ~= 'queued' or f[2] ~= epoch then return {'stale', f[1] or 'gone'} end
if redis.call('XADD', P .. 'plan:' .. worker, 'NOMKSTREAM', '*', 'k', 'run', 't', term, 'm', admit) == false then
  return {'gone', ''}
end
dequeue(s)
redis.call('HSET', s, 'state', 'placed', 'worker', worker, 'epoch', epoch + 1)
redis.call('SADD', P .. 'on:' .. worker, sid)
return {'ok', ''}
