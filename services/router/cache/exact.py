"""The exact cache: answers in Redis under the digest of the whole request, and who is making one just now.

A look-up is one script: the answer, or the flight that will have it, or the lead of a new one. All times are Redis's
own. A stored value is a header of HEADER bytes and a protobuf `CachedAnswer`:

    magic "kA\\x01" (3), stored and expires (u64 each, ms, big endian), entry id (16), family (8), tenant tag (16),
    model tag (16)

What is not of this form, too large, or of a wrong type is deleted and a miss.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from kvmesh.store import RedisStore, Script, keys

MAGIC = b"kA\x01"
_HEAD = struct.Struct(">3sQQ16s8s16s16s")
HEADER = _HEAD.size
LEASE_MS = 3000
"""Life of a flight's pointer, renewed each second by its leader's gateway."""

MAX_POINTER_BYTES = 512
COUNTER_MS = 900_000
"""Of the tokens' counter, of which every question leaves one behind. A flight that lives longer knows its own token,
and whoever takes it over takes a higher one."""

_WELL_FORMED = f"""
local function stored(key, most)
  local size = redis.pcall('STRLEN', key)
  if type(size) == 'number' and size == 0 then return nil end
  if type(size) == 'number' and size > {HEADER} and size <= most then
    local value = redis.call('GET', key)
    if string.sub(value, 1, 3) == 'kA\\1' then return value end
  end
  redis.call('DEL', key)
  return nil
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function pointer(key)
  local value = redis.pcall('GET', key)
  if type(value) == 'string' and #value <= {MAX_POINTER_BYTES} then
    local token, id, gateway = string.match(value, '^(%d+) (%x+) (.*)$')
    if token and #token <= 15 then return token, id, gateway end
  end
  if value then redis.call('DEL', key) end
  return nil
end
"""

# KEYS answer pointer counter; ARGV most bytes, families (8 bytes each), oldest age ms or -1, entry id or "", read, fly,
# gateway, flight id, lease ms, life of the counter ms.
GET_OR_JOIN = Script(
    "get_or_join",
    _WELL_FORMED
    + """
if ARGV[5] == '1' then
  local value = stored(KEYS[1], tonumber(ARGV[1]))
  if value then
    local since, expires = struct.unpack('>I8I8', value, 4)
    local family, fits = string.sub(value, 36, 43), false
    for i = 1, #ARGV[2], 8 do fits = fits or string.sub(ARGV[2], i, i + 7) == family end
    local age, oldest = math.max(0, now - since), tonumber(ARGV[3])
    if fits and expires > now and (oldest < 0 or age <= oldest)
        and (ARGV[4] == '' or ARGV[4] == string.sub(value, 20, 35)) then
      return {'hit', value, age}
    end
  end
end
if ARGV[6] ~= '1' then return {'miss'} end
local token, id, gateway = pointer(KEYS[2])
if token then return {'follow', id, gateway, token} end
local counted = redis.pcall('INCR', KEYS[3])
if type(counted) ~= 'number' then
  redis.call('DEL', KEYS[3])
  counted = redis.call('INCR', KEYS[3])
end
redis.call('PEXPIRE', KEYS[3], ARGV[10])
redis.call('SET', KEYS[2], string.format('%d %s %s', counted, ARGV[8], ARGV[7]), 'PX', ARGV[9])
return {'lead', ARGV[8], counted}
""",
)

# KEYS answer pointer; ARGV most bytes, entry id, family, tenant tag, model tag, answer, life ms, replace, flight id,
# token.
# Reply: what came of it, its entry id, when it was stored and expires, header of what it replaced or "", size of that.
PUT = Script(
    "put",
    _WELL_FORMED
    + f"""
if ARGV[9] ~= '' then
  local token, id = pointer(KEYS[2])
  if id == ARGV[9] then
    if tonumber(token) > tonumber(ARGV[10]) then return {{'fenced'}} end
    redis.call('DEL', KEYS[2])
  end
end
local old, header, size = stored(KEYS[1], tonumber(ARGV[1])), '', 0
if old then
  local since, expires = struct.unpack('>I8I8', old, 4)
  if ARGV[8] ~= '1' and expires > now and string.sub(old, 36, 43) == ARGV[3] then
    return {{'kept', string.sub(old, 20, 35), since, expires, '', 0}}
  end
  header, size = string.sub(old, 1, {HEADER}), #old - {HEADER}
end
local expires = now + tonumber(ARGV[7])
local value = 'kA\\1' .. struct.pack('>I8I8', now, expires) .. ARGV[2] .. ARGV[3] .. ARGV[4] .. ARGV[5] .. ARGV[6]
redis.call('SET', KEYS[1], value, 'PX', ARGV[7])
return {{'stored', ARGV[2], now, expires, header, size}}
""",
)

# KEYS answer, semantic entry; ARGV entry id. Reply: the header of what was deleted, or "".
DROP = Script(
    "drop",
    f"""
redis.call('DEL', KEYS[2])
local header = redis.pcall('GETRANGE', KEYS[1], 0, {HEADER - 1})
if type(header) == 'string' and #header == {HEADER} and string.sub(header, 20, 35) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return header
end
return ''
""",
)

# KEYS pointer; ARGV flight id, token.
END_FLIGHT = Script(
    "end_flight",
    _WELL_FORMED
    + """
local token, id = pointer(KEYS[1])
if id == ARGV[1] and tonumber(token) <= tonumber(ARGV[2]) then return redis.call('DEL', KEYS[1]) end
return 0
""",
)


@dataclass(frozen=True, slots=True)
class Head:
    """A stored value's header. Times in ms since 1970, by Redis's clock. Tags are hex, the id is 16 bytes."""

    stored_ms: int
    expires_ms: int
    entry_id: bytes
    family: bytes
    tenant: str
    model: str

    @classmethod
    def parse(cls, data: object) -> Head | None:
        """From the first HEADER bytes; None when they are none."""
        if not isinstance(data, bytes) or len(data) < HEADER:
            return None
        magic, stored, expires, entry_id, family, tenant, model = _HEAD.unpack_from(data)
        return cls(stored, expires, entry_id, family, tenant.hex(), model.hex()) if magic == MAGIC else None


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of a look-up. `hit`: head and body are there, age in seconds. `follow` and `lead`: flight, gateway and
    token are. `skipped`: Redis was not asked, or did not answer."""

    kind: Literal["hit", "follow", "lead", "miss", "skipped"]
    head: Head | None = None
    body: bytes = b""
    age_s: float = 0.0
    flight_id: str = ""
    gateway_id: str = ""
    token: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Outcome of storing. kept: an earlier answer of the same family was left, and its id and expiry are these.
    replaced: header of the entry that had to go, with its size."""

    entry_id: bytes
    stored_ms: int
    expires_ms: int
    kept: bool
    replaced: Head | None
    replaced_size: int


SKIPPED = Joined("skipped")
MISS = Joined("miss")


class ExactCache:
    """Answers by tag and exact key (both hex). No method raises for anything Redis does or does not do."""

    def __init__(self, store: RedisStore, *, ttl_s: float, max_entry_bytes: int) -> None:
        self.store = store
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._max_bytes = max_entry_bytes
        self._undoing: set[asyncio.Task[None]] = set()

    async def get_or_join(
        self,
        tag: str,
        exact: str,
        families: Collection[bytes],
        *,
        timeout_s: float,
        read: bool = True,
        fly: bool = False,
        gateway_id: str = "",
        max_age_s: float | None = None,
        entry_id: bytes = b"",
    ) -> Joined:
        """The answer of one of `families` (8 bytes each), no older than `max_age_s` seconds, and with `entry_id` only
        that entry; else, with `fly`, the running flight or the lead of a new one."""
        flight_id = secrets.token_hex(16) if fly else ""
        limit_ms = -1 if max_age_s is None else int(max_age_s * 1000)
        try:
            reply = await self.store.script(
                GET_OR_JOIN,
                [keys.answer(tag, exact), keys.pointer(tag, exact), keys.counter(tag, exact)],
                [
                    HEADER + self._max_bytes,
                    b"".join(families),
                    limit_ms,
                    entry_id,
                    int(read),
                    int(fly),
                    gateway_id,
                    flight_id,
                    LEASE_MS,
                    COUNTER_MS,
                ],
                timeout_s=timeout_s,
            )
        except asyncio.CancelledError:
            self._undo(tag, exact, flight_id)
            raise
        joined = _joined(reply)
        if joined.kind == "skipped":
            self._undo(tag, exact, flight_id)
        return joined

    def _undo(self, tag: str, exact: str, flight_id: str) -> None:
        """A look-up of which no reply came may have been done after all: nobody must follow what nobody leads."""
        if flight_id and self.store.ok:
            task = asyncio.create_task(self.end_flight(tag, exact, flight_id, 1 << 53), name="flight-undone")
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)

    async def put(
        self,
        tag: str,
        exact: str,
        answer: bytes,
        *,
        family: bytes,
        tenant: str,
        model: str,
        replace: bool,
        flight_id: str = "",
        token: int = 0,
    ) -> Put | None:
        """Store an answer for the cache's lifetime and end its flight; None when it is too large, Redis did not take
        it, or the flight has another leader by now. Without `replace` a living answer of the family stays."""
        if not 0 < len(answer) <= self._max_bytes:
            return None
        reply = await self.store.script(
            PUT,
            [keys.answer(tag, exact), keys.pointer(tag, exact)],
            [
                HEADER + self._max_bytes,
                secrets.token_bytes(16),
                family,
                bytes.fromhex(tenant),
                bytes.fromhex(model),
                answer,
                self._ttl_ms,
                int(replace),
                flight_id,
                token,
            ],
            write=True,
        )
        if not isinstance(reply, list) or len(reply) != 6:
            return None
        what, entry_id, since, expires, header, size = reply
        return Put(entry_id, int(since), int(expires), what == b"kept", Head.parse(header), int(size))

    async def end_flight(self, tag: str, exact: str, flight_id: str, token: int) -> None:
        """Take the pointer away, if it still is this flight's and no later leader's."""
        await self.store.script(END_FLIGHT, [keys.pointer(tag, exact)], [flight_id, token], write=True)

    async def delete(self, tag: str, exact: str, entry_id: bytes) -> Head | None:
        """Drop one entry, its semantic one too; its header, None when it was gone already."""
        return Head.parse(
            await self.store.script(
                DROP, [keys.answer(tag, exact), keys.entry(tag, entry_id.hex())], [entry_id], write=True
            )
        )


def _joined(reply: Any) -> Joined:
    if not isinstance(reply, list) or not reply:
        return SKIPPED
    kind = reply[0]
    if kind == b"hit":
        head = Head.parse(reply[1])
        return MISS if head is None else Joined("hit", head, reply[1][HEADER:], int(reply[2]) / 1000)
    if kind == b"follow":
        return Joined(
            "follow",
            flight_id=reply[1].decode("ascii", "replace"),
            gateway_id=reply[2].decode("utf-8", "replace"),
            token=int(reply[3]),
        )
    if kind == b"lead":
        return Joined("lead", flight_id=reply[1].decode("ascii", "replace"), token=int(reply[2]))
    return MISS
