-- Takes or refreshes a lease with a term. ARGV: kind, id, owner, lease_ms. Answer: {term, owner}; term 0: another's.
-- The lease key expires, the term never does: a term is given once.
run_when_full()
local kind, id, owner, lease_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease, field = P .. 'lease:' .. kind .. ':' .. id, kind .. ':' .. id
local holder = redis.call('GET', lease)
if holder == owner then
  redis.call('PEXPIRE', lease, lease_ms)
  return {tonumber(redis.call('HGET', P .. 'term', field)), owner}
end
if holder then return {0, holder} end
redis.call('SET', lease, owner, 'PX', lease_ms)
return {redis.call('HINCRBY', P .. 'term', field, 1), owner}
