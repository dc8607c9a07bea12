"""The scripts of `limits`. All keys of one call are in the slot of the tenant.

Rates are token buckets: `rates` is a hash `{r, ra, t, ta}` of the level of requests and of tokens, and when (ms) each
was right. A level is counted in 1/60000, so that a limit a minute fills it by a whole number each millisecond: nothing
is rounded. It may fall below zero: what was used is owed.

A hold is a member of the sorted set `leases` (score: when it lapses, ms) and a field `<cost> <tokens>` of the hash
`amounts`, whose field `+` is the sum of the costs. Every call first drops what has lapsed.

Time is milliseconds of Redis' own clock; a test may bring another.
"""

from __future__ import annotations

from kvmesh.store.scripts import Script

# Milliseconds. MARGIN: how long keys outlive what they are needed for. LONGEST: life of any hold; what lies further
# ahead was written before Redis' clock was put back.
_COMMON = """
local MARGIN = 60000
local LONGEST = 600000
local function now(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function text(number) return string.format('%.0f', number) end
local function drop(leases, amounts, id)
  redis.call('ZREM', leases, id)
  local cost, tokens = string.match(redis.call('HGET', amounts, id) or '', '^(%d+) (%d+)$')
  if cost then
    redis.call('HDEL', amounts, id)
    if cost ~= '0' then redis.call('HINCRBY', amounts, '+', '-' .. cost) end
  end
  return tonumber(tokens)
end
local function lapse(leases, amounts, at)
  for _, range in ipairs({{'-inf', text(at)}, {'(' .. text(at + LONGEST + MARGIN), '+inf'}}) do
    while true do
      local gone = redis.call('ZRANGEBYSCORE', leases, range[1], range[2], 'LIMIT', 0, 500)
      if #gone == 0 then break end
      for _, id in ipairs(gone) do drop(leases, amounts, id) end
    end
  end
  -- One of the two keys may have been lost alone.
  if redis.call('ZCARD', leases) == 0 then redis.call('DEL', amounts) end
end
local function lease(leases, amounts, id, at, hold_ms)
  redis.call('ZADD', leases, text(at + hold_ms), id)
  redis.call('PEXPIRE', leases, text(hold_ms + MARGIN))
  redis.call('PEXPIRE', amounts, text(hold_ms + MARGIN))
end
local function level(got, since, limit, at)
  local full = limit * 60000
  since = tonumber(since or at)
  -- Where the clock was put back, nobody knows how long ago that was; to wait until it is there again could take hours.
  if not got or since > at + MARGIN then return full end
  return math.min(full, tonumber(got) + math.max(0, at - since) * limit)
end
local function owe(rates, tpm, at, back)
  local got = redis.call('HMGET', rates, 't', 'ta')
  local t = math.min(tpm * 60000, level(got[1], got[2], tpm, at) + back * 60000)
  redis.call('HSET', rates, 't', text(t), 'ta', text(at))
  local lives = math.max(redis.call('PTTL', rates), math.ceil(60000 - t / tpm) + MARGIN)
  redis.call('PEXPIRE', rates, text(lives))
end
"""

TAKE = Script(
    "limit_take",
    _COMMON
    + """
-- KEYS rates leases amounts spent; ARGV clock id hold_ms requests_per_minute tokens_per_minute max_concurrent amount
-- cost tokens
local at, id, hold_ms = now(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local rpm, tpm, most, amount = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local cost, tokens = tonumber(ARGV[8]), tonumber(ARGV[9])
lapse(KEYS[2], KEYS[3], at)
local spent = tonumber(redis.call('GET', KEYS[4]) or 0)
local held = tonumber(redis.call('HGET', KEYS[3], '+') or 0)
local running = redis.call('ZCARD', KEYS[2])
local got = redis.call('HMGET', KEYS[1], 'r', 'ra', 't', 'ta')
local r, t = level(got[1], got[2], rpm, at), level(got[3], got[4], tpm, at)
local verdict, wait = 'ok', 0
-- What asks for more than a full bucket holds is let in by a full one, and owes the rest.
local need = math.min(tokens, tpm) * 60000
if amount > 0 and spent + cost > amount then
  verdict = 'spent'
elseif rpm > 0 and r < 60000 then
  verdict, wait = 'requests', math.ceil((60000 - r) / rpm)
elseif tpm > 0 and t < need then
  verdict, wait = 'tokens', math.ceil((need - t) / tpm)
elseif most > 0 and running >= most then
  verdict = 'concurrent'
elseif amount > 0 and spent + held + cost > amount then
  verdict = 'held'
else
  if rpm > 0 then
    r = r - 60000
    redis.call('HSET', KEYS[1], 'r', text(r), 'ra', text(at))
  end
  if tpm > 0 then
    t = t - tokens * 60000
    redis.call('HSET', KEYS[1], 't', text(t), 'ta', text(at))
  end
  local full = math.max(rpm > 0 and 60000 - r / rpm or 0, tpm > 0 and 60000 - t / tpm or 0)
  if rpm > 0 or tpm > 0 then redis.call('PEXPIRE', KEYS[1], text(math.ceil(full) + MARGIN)) end
  redis.call('HSET', KEYS[3], id, ARGV[8] .. ' ' .. (tpm > 0 and ARGV[9] or '0'))
  redis.call('HINCRBY', KEYS[3], '+', ARGV[8])
  lease(KEYS[2], KEYS[3], id, at, hold_ms)
  held, running = held + cost, running + 1
end
local function left(of) return math.max(0, math.floor(of / 60000)) end
local function reset(of, limit) return limit > 0 and math.ceil((limit * 60000 - of) / limit) or 0 end
return {verdict, wait, running, spent, held, left(r), reset(r, rpm), left(t), reset(t, tpm)}
""",
)

TOP_UP = Script(
    "limit_top_up",
    _COMMON
    + """
-- KEYS leases amounts spent rates; ARGV clock id hold_ms amount held most tokens_per_minute more
local at, id, tpm, more = now(ARGV[1]), ARGV[2], tonumber(ARGV[7]), tonumber(ARGV[8])
lapse(KEYS[1], KEYS[2], at)
local cost, tokens = string.match(redis.call('HGET', KEYS[2], id) or '', '^(%d+) (%d+)$')
if not cost then
  -- It lapsed although it runs: what it has is its own.
  cost, tokens = ARGV[5], '0'
  redis.call('HINCRBY', KEYS[2], '+', cost)
end
local amount, grant = tonumber(ARGV[4]), tonumber(ARGV[6])
if amount > 0 then
  local spent = tonumber(redis.call('GET', KEYS[3]) or 0)
  local held = tonumber(redis.call('HGET', KEYS[2], '+') or 0)
  grant = math.max(0, math.min(grant, amount - spent - held))
end
local total = text(tonumber(cost) + grant)
if tpm > 0 and more > 0 then
  -- A rate stops nothing that runs: it is owed, and the next request waits.
  owe(KEYS[4], tpm, at, -more)
  tokens = text(tonumber(tokens) + more)
end
redis.call('HSET', KEYS[2], id, total .. ' ' .. tokens)
redis.call('HINCRBY', KEYS[2], '+', text(grant))
lease(KEYS[1], KEYS[2], id, at, tonumber(ARGV[3]))
return {grant, tonumber(total)}
""",
)

RENEW = Script(
    "limit_renew",
    _COMMON
    + """
-- KEYS leases amounts; ARGV clock hold_ms (id cost)...
local at = now(ARGV[1])
for i = 3, #ARGV, 2 do
  local id, wanted = ARGV[i], tonumber(ARGV[i + 1])
  local cost, tokens = string.match(redis.call('HGET', KEYS[2], id) or '', '^(%d+) (%d+)$')
  -- Forgotten by Redis, or let in while it was away; or grown meanwhile.
  local more = wanted - (tonumber(cost) or 0)
  if more > 0 or not cost then
    redis.call('HSET', KEYS[2], id, ARGV[i + 1] .. ' ' .. (tokens or '0'))
    redis.call('HINCRBY', KEYS[2], '+', text(more))
  end
  lease(KEYS[1], KEYS[2], id, at, tonumber(ARGV[2]))
end
lapse(KEYS[1], KEYS[2], at)
return redis.call('ZCARD', KEYS[1])
""",
)

SETTLE = Script(
    "limit_settle",
    _COMMON
    + """
-- KEYS rates leases amounts spent usage seen; ARGV clock tokens_per_minute spent_ms usage_ms seen_ms unit
-- (number id cost used model prompt cached completion)...
local at, tpm = now(ARGV[1]), tonumber(ARGV[2])
-- A key of another type fails here, before anything is written: half a settlement would be charged at each try.
redis.call('HLEN', KEYS[1])
redis.call('ZCARD', KEYS[2])
redis.call('HLEN', KEYS[3])
redis.call('GET', KEYS[4])
redis.call('HLEN', KEYS[5])
local last = tonumber(redis.call('GET', KEYS[6]) or 0)
local back = 0
for i = 7, #ARGV, 8 do
  local number = tonumber(ARGV[i])
  if number > last then
    last = number
    local taken = drop(KEYS[2], KEYS[3], ARGV[i + 1])
    back = back + (taken or 0) - tonumber(ARGV[i + 3])
    if ARGV[i + 2] ~= '0' then redis.call('INCRBY', KEYS[4], ARGV[i + 2]) end
    local model = ':' .. ARGV[i + 4]
    redis.call('HINCRBY', KEYS[5], 'requests' .. model, 1)
    redis.call('HINCRBY', KEYS[5], 'prompt' .. model, ARGV[i + 5])
    redis.call('HINCRBY', KEYS[5], 'cached' .. model, ARGV[i + 6])
    redis.call('HINCRBY', KEYS[5], 'completion' .. model, ARGV[i + 7])
    redis.call('HINCRBY', KEYS[5], ARGV[6] .. model, ARGV[i + 2])
  end
end
redis.call('SET', KEYS[6], text(last), 'PX', ARGV[5])
redis.call('PEXPIRE', KEYS[5], ARGV[4])
if ARGV[3] ~= '0' then redis.call('PEXPIRE', KEYS[4], ARGV[3]) end
if tpm > 0 and back ~= 0 then owe(KEYS[1], tpm, at, back) end
lapse(KEYS[2], KEYS[3], at)
return last
""",
)

FIGURES = Script(
    "limit_figures",
    _COMMON
    + """
-- KEYS leases amounts spent; ARGV clock
lapse(KEYS[1], KEYS[2], now(ARGV[1]))
return {tonumber(redis.call('GET', KEYS[3]) or 0), tonumber(redis.call('HGET', KEYS[2], '+') or 0),
        redis.call('ZCARD', KEYS[1])}
""",
)
