-- Appends plan changes if the caller's term is the current one. ARGV: kind ('run' or 'pool'), worker, term, number,
-- change... A number other than '' is the caller's own, of this call, and higher than those of its calls before it.
-- Repeated, or held back by a network until the next has come, the call is not carried out again: a spare block that is
-- granted twice could have been used and freed in between.
run_when_full()
local kind, worker, term, number = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HGET', P .. 'term', kind .. ':' .. worker) ~= term then return {'fenced', ''} end
local planned = P .. 'planned:' .. worker
if number ~= '' then
  local of_term, last = string.match(redis.call('HGET', planned, kind) or '', '^(%d+):(%d+)$')
  if of_term == term and tonumber(number) <= tonumber(last) then return {'ok', ''} end
end
local id = ''
for i = 5, #ARGV do
  id = redis.call('XADD', P .. 'plan:' .. worker, 'NOMKSTREAM', '*', 'k', kind, 't', term, 'm', ARGV[i])
  if id == false then return {'gone', ''} end
end
if number ~= '' then
  redis.call('HSET', planned, kind, term .. ':' .. number)
  redis.call('PEXPIRE', planned, redis.call('PTTL', P .. 'plan:' .. worker))
end
return {'ok', id}
