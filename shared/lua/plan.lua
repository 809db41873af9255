-- Appends plan changes if the caller's term is the current one. ARGV: kind ('run' or 'pool'), worker, term, change...
run_when_full()
local kind, worker, term = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', P .. 'term', kind .. ':' .. worker) ~= term then return {'fenced', ''} end
local id = ''
for i = 4, #ARGV do
  id = redis.call('XADD', P .. 'plan:' .. worker, 'NOMKSTREAM', '*', 'k', kind, 't', term, 'm', ARGV[i])
  if id == false then return {'gone', ''} end
end
return {'ok', id}
