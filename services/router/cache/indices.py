"""Which entries there are: by tenant, by model, by id. Written after the answer, by commands of their own: losing them
costs what `kvmesh.store.keys` says. A tenant over its limits loses its oldest entries, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.store import RedisStore, Script, keys
from kvmesh.store.keys import Member
from services.router.cache.exact import ExactCache, Head

MAX_EVICTED = 32
"""Entries that one store may push out; a limit that was lowered is reached after some."""

BATCH = 256

# KEYS zset, sum ("" = none is kept); ARGV member, size, expires ms, most entries, most bytes, most evicted.
# Reply: entries, bytes, evicted members...
_ADD = Script(
    "index_add",
    """
local zset, sum, most = KEYS[1], KEYS[2], tonumber(ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', zset) == 0 then redis.call('DEL', sum) end
local function size_of(member) return tonumber(string.match(member, ' (%d+)$') or 0) end
if redis.call('ZADD', zset, ARGV[3], ARGV[1]) == 1 then redis.call('INCRBY', sum, ARGV[2]) end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', zset, '-inf', now, 'LIMIT', 0, most)) do
  redis.call('ZREM', zset, member)
  redis.call('DECRBY', sum, size_of(member))
end
local reply = {0, 0}
local entries, bytes = redis.call('ZCARD', zset), tonumber(redis.call('GET', sum) or 0)
while entries > 0 and #reply - 2 < most and (entries > tonumber(ARGV[4]) or bytes > tonumber(ARGV[5])) do
  local member = redis.call('ZRANGE', zset, 0, 0)[1]
  redis.call('ZREM', zset, member)
  bytes, entries = redis.call('DECRBY', sum, size_of(member)), entries - 1
  reply[#reply + 1] = member
end
local life = math.max(tonumber(ARGV[3]) - now, 1)
if redis.call('PTTL', zset) < life then redis.call('PEXPIRE', zset, string.format('%d', life)) end
if redis.call('PTTL', sum) < life then redis.call('PEXPIRE', sum, string.format('%d', life)) end
reply[1], reply[2] = entries, bytes
return reply
""",
)

# KEYS zset, sum; ARGV members...
_REMOVE = Script(
    "index_remove",
    """
local removed = 0
for _, member in ipairs(ARGV) do
  if redis.call('ZREM', KEYS[1], member) == 1 then
    removed = removed + 1
    redis.call('DECRBY', KEYS[2], tonumber(string.match(member, ' (%d+)$') or 0))
  end
end
return removed
""",
)

_NO_LIMIT = 1 << 53


@dataclass(frozen=True, slots=True)
class Held:
    """What a tenant holds in Redis: entries, and bytes of answers."""

    entries: int
    bytes: int


class Indices:
    """Indices of one epoch at a time. No method raises for anything Redis does or does not do."""

    def __init__(self, store: RedisStore, exact: ExactCache, *, max_entries: int, max_bytes: int) -> None:
        self._store = store
        self._exact = exact
        self._max_entries = max_entries
        self._max_bytes = max_bytes

    async def add(self, member: Member, head: Head, epoch: int) -> Held | None:
        """Note an entry; what its tenant then has too much of is dropped."""
        life = max(1, head.expires_ms - head.stored_ms)
        size: list[str | bytes | int] = [str(member), member.size, head.expires_ms]
        by_tenant, _, _ = await asyncio.gather(
            self._store.script(
                _ADD,
                keys.tenant_index(head.tenant, epoch),
                [*size, self._max_entries, self._max_bytes, MAX_EVICTED],
                write=True,
            ),
            self._store.script(
                _ADD, keys.model_index(head.model, epoch), [*size, _NO_LIMIT, _NO_LIMIT, MAX_EVICTED], write=True
            ),
            self._store.run(
                "index_id",
                lambda client: client.set(keys.id_index(member.entry_id), f"{member}", px=life),
                None,
                write=True,
            ),
        )
        if not isinstance(by_tenant, list) or len(by_tenant) < 2:
            return None
        for raw in by_tenant[2:]:
            evicted = Member.parse(raw)
            if evicted is not None:
                await self.drop(evicted, epoch)
        return Held(int(by_tenant[0]), int(by_tenant[1]))

    async def drop(self, member: Member, epoch: int) -> bool:
        """Forget one entry, everywhere; True when its answer was still there."""
        head = await self._exact.delete(member.tag, member.exact, bytes.fromhex(member.entry_id))
        if head is not None:
            await self.forget(member, head, epoch)
        return head is not None

    async def forget(self, member: Member, head: Head, epoch: int) -> None:
        """Take an entry out of the indices; its answer is gone, or another's by now."""
        shard = keys.vector_index(keys.vector_shard(member.entry_id), epoch)
        await asyncio.gather(
            self.remove(keys.tenant_index(head.tenant, epoch), [member]),
            self.remove(keys.model_index(head.model, epoch), [member]),
            self._store.run("index_id", lambda client: client.delete(keys.id_index(member.entry_id)), 0, write=True),
            self._store.run(
                "index_vector", lambda client: client.zrem(shard, f"{member.tag} {member.entry_id}"), 0, write=True
            ),
        )

    async def remove(self, index: tuple[str, str], members: Sequence[Member]) -> None:
        """Take members out of one index."""
        if members:
            await self._store.script(_REMOVE, index, [str(member) for member in members], write=True)

    async def by_id(self, entry_id: str) -> Member | None:
        """The entry of an id."""
        return Member.parse(
            await self._store.run("index_id", lambda client: client.get(keys.id_index(entry_id)), None, write=True)
        )

    async def scan(self, zset: str, cursor: int) -> tuple[int, list[Member]] | None:
        """One bounded batch of an index and where to go on (0: that was all); None when Redis is away."""
        reply = await self._store.run(
            "index_scan", lambda client: client.zscan(zset, cursor=cursor, count=BATCH), None, write=True
        )
        if reply is None:
            return None
        members = (Member.parse(raw) for raw, _ in reply[1])
        return int(reply[0]), [member for member in members if member is not None]

    async def held(self, tenant: str, epoch: int) -> Held | None:
        """What a tenant (its tag) holds."""
        zset, total = keys.tenant_index(tenant, epoch)
        entries = await self._store.run("index_held", lambda client: client.zcard(zset), None, write=True)
        size = await self._store.run("index_held", lambda client: client.get(total), None, write=True)
        return None if entries is None else Held(int(entries), int(size or 0))
