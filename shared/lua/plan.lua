-- Appends plan changes if the caller's term is the current one. ARGV: kind ('run' or 'pool'), worker, term, number,
-- change... A number other than '' is the caller's own, of this call: repeated, the call is not carried out again,
-- since a spare block that is granted twice could have been used and freed in between.
run_when_full()
local kind, worker, term, number = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HGET', P .. 'term', kind .. ':' .. worker) ~= term then return {'fenced', ''} end
local planned, this = P .. 'planned:' .. worker, term .. ':' .. number
if number ~= '' and redis.call('HGET', planned, kind) == this then return {'ok', ''} end
local id = ''
for i = 5, #ARGV do
  id = redis.call('XADD', P .. 'plan:' .. worker, 'NOMKSTREAM', '*', 'k', kind, 't', term, 'm', ARGV[i])
  if id == false then return {'gone', ''} end
end
if number ~= '' then
  redis.call('HSET', planned, kind, this)
  redis.call('PEXPIRE', planned, redis.call('PTTL', P .. 'plan:' .. worker))
end
return {'ok', id}
