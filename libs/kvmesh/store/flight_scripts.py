"""The scripts of `flights`. All keys of one call are in the slot of the question.

A flight's state is a hash `{token, gateway, until, takeovers, ended}`. The lease holds while `until` (milliseconds)
lies ahead, by Redis' own clock; a test may bring another. The hash outlives the lease, so that a token that was given
once is known to be given: whoever holds an older one is refused, also after the lease has lapsed.
"""

from __future__ import annotations

from kvmesh.store.scripts import Script

_NOW = """
local function now(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function named(value)
  local token, flight, gateway = string.match(value or '', '^(%d+) (%S+) (%S+)$')
  return tonumber(token), flight, gateway
end
local function state_of(key)
  local got = redis.call('HMGET', key, 'token', 'gateway', 'until', 'takeovers', 'ended')
  return {token = tonumber(got[1]), gateway = got[2], till = tonumber(got[3]) or 0, takeovers = tonumber(got[4]) or 0,
          ended = got[5] == '1'}
end
"""

RENEW = Script(
    "flight_renew",
    _NOW
    + """
-- KEYS pointer state joined frames; ARGV flight gateway token lease_ms life_ms presence_ms clock
local flight, gateway, token = ARGV[1], ARGV[2], tonumber(ARGV[3])
local at, state = now(ARGV[7]), state_of(KEYS[2])
if state.ended or (state.token and (state.token > token or (state.token == token and state.gateway ~= gateway))) then
  return {'lost', 0}
end
redis.call('HSET', KEYS[2], 'token', ARGV[3], 'gateway', gateway, 'until', at + ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
local there = redis.call('GET', KEYS[1])
local _, named_flight = named(there)
if not there or named_flight == flight then
  redis.call('SET', KEYS[1], ARGV[3] .. ' ' .. flight .. ' ' .. gateway, 'PX', ARGV[4])
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', at - ARGV[6])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
return {'ok', redis.call('ZCARD', KEYS[3])}
""",
)

APPEND = Script(
    "flight_append",
    _NOW
    + """
-- KEYS state frames; ARGV token gateway begun life_ms frame...
local state = state_of(KEYS[1])
if not state.token then return 'unknown' end
if state.ended or state.token ~= tonumber(ARGV[1]) or state.gateway ~= ARGV[2] then return 'lost' end
if ARGV[3] == '1' and redis.call('EXISTS', KEYS[2]) == 0 then return 'gap' end
for i = 5, #ARGV do redis.call('XADD', KEYS[2], '*', 'f', ARGV[i]) end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 'ok'
""",
)

END = Script(
    "flight_end",
    _NOW
    + """
-- KEYS pointer state frames; ARGV flight gateway token how linger_ms frame...; how: finished failed free handed
local state = state_of(KEYS[2])
local token = tonumber(ARGV[3])
if state.ended or (state.token and (state.token ~= token or state.gateway ~= ARGV[2])) then return 'lost' end
for i = 6, #ARGV do redis.call('XADD', KEYS[3], '*', 'f', ARGV[i]) end
local free = ARGV[4] == 'free' or ARGV[4] == 'handed'
-- Handed over, the token is nobody's: what we may still have on the way is refused.
redis.call('HSET', KEYS[2], 'token', ARGV[3], 'gateway', free and '' or ARGV[2], 'until', 0)
if not free then redis.call('HSET', KEYS[2], 'ended', '1') end
if ARGV[4] == 'handed' and state.takeovers > 0 then redis.call('HSET', KEYS[2], 'takeovers', state.takeovers - 1) end
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
if ARGV[4] == 'finished' then return 'ok' end
local named_token, named_flight = named(redis.call('GET', KEYS[1]))
if named_flight == ARGV[1] and named_token == token then redis.call('DEL', KEYS[1]) end
return 'ok'
""",
)

KEEP = Script(
    "flight_keep",
    _NOW
    + """
-- KEYS pointer state joined; ARGV flight gateway life_ms clock
local at, state = now(ARGV[4]), state_of(KEYS[2])
redis.call('ZADD', KEYS[3], at, ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
if state.ended then return {'ended', state.token, state.gateway} end
if state.token then return {state.till > at and 'led' or 'free', state.token, state.gateway} end
local token, flight, gateway = named(redis.call('GET', KEYS[1]))
if flight == ARGV[1] then return {'led', token, gateway} end
return {'free', 0, ''}
""",
)

DISOWN = Script(
    "flight_disown",
    _NOW
    + """
-- KEYS pointer state; ARGV flight gateway
local _, flight, gateway = named(redis.call('GET', KEYS[1]))
if flight == ARGV[1] and gateway == ARGV[2] and redis.call('EXISTS', KEYS[2]) == 0 then
  return redis.call('DEL', KEYS[1])
end
return 0
""",
)

TAKE_OVER = Script(
    "flight_take_over",
    _NOW
    + """
-- KEYS pointer state joined counter; ARGV flight gateway known_token lease_ms life_ms most counter_ms clock
local flight, gateway, at, state = ARGV[1], ARGV[2], now(ARGV[8]), state_of(KEYS[2])
if state.ended then return {'ended', state.token, state.gateway} end
if state.token then
  if state.till > at then return {'led', state.token, state.gateway} end
else
  local token, named_flight, leader = named(redis.call('GET', KEYS[1]))
  if named_flight == flight then return {'led', token, leader} end
end
if state.takeovers >= tonumber(ARGV[6]) then return {'spent', state.token or 0, state.gateway or ''} end
local token = redis.call('INCR', KEYS[4])
local least = math.max(state.token or 0, tonumber(ARGV[3])) + 1
if token < least then
  -- The counter was lost; a token must not be given twice.
  token = least
  redis.call('SET', KEYS[4], string.format('%d', token), 'KEEPTTL')
end
if redis.call('PTTL', KEYS[4]) < tonumber(ARGV[7]) then redis.call('PEXPIRE', KEYS[4], ARGV[7]) end
redis.call('HSET', KEYS[2], 'token', string.format('%d', token), 'gateway', gateway, 'until', at + ARGV[4],
           'takeovers', state.takeovers + 1)
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('ZREM', KEYS[3], gateway)
local there = redis.call('GET', KEYS[1])
local _, named_flight = named(there)
if not there or named_flight == flight then
  redis.call('SET', KEYS[1], string.format('%d', token) .. ' ' .. flight .. ' ' .. gateway, 'PX', ARGV[4])
end
return {'taken', token, gateway}
""",
)
