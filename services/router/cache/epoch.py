"""The epoch of the caches: a number in every key, so that a new one makes everything a miss at once.

It lives in Redis and is known before Redis is used at all: on every new connection it is read first. After that the
stream of events tells of changes, and when the stream is silent it is read again each second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from kvmesh.store import RedisStore, Script, events, keys

log = logging.getLogger(__name__)

BLOCK_MS = 1000
RETRY_S = 0.2
BATCH = 64

# KEYS epoch; ARGV known, bump, highest. One that is lost begins anew with the time, which no earlier one has reached.
_EPOCH = Script(
    "epoch",
    """
local time = redis.call('TIME')
local value = redis.pcall('GET', KEYS[1])
local found = type(value) == 'string' and string.match(value, '^%d+$') and tonumber(value) or nil
if found and found > tonumber(ARGV[3]) then found = nil end
local epoch = math.max(found or tonumber(time[1]), tonumber(ARGV[1]))
if ARGV[2] == '1' then epoch = math.max(epoch + 1, tonumber(time[1])) end
if epoch ~= found then redis.call('SET', KEYS[1], string.format('%d', epoch)) end
return epoch
""",
)


class EpochKeeper:
    """`value` is the present epoch; it never falls. `listener` hears of every purge that any router has ordered."""

    def __init__(self, store: RedisStore, listener: Callable[[events.Event], None] = lambda _: None) -> None:
        self._store = store
        self._listener = listener
        self._last: bytes | None = None
        self.value = 0
        store.on_connect.append(self._connected)

    async def _connected(self, client: Any) -> None:
        self._learn(await _EPOCH(client, [keys.EPOCH], [self.value, 0, events.MAX_EPOCH]))
        if self._last is None:
            try:
                newest = await client.xrevrange(keys.EVENTS, count=1)
            except ResponseError:
                # Not a stream. The epoch is then read each second, and purges are this replica's own.
                return
            self._last = newest[0][0] if newest else b"0-0"

    def _learn(self, value: object) -> None:
        if isinstance(value, int) and value > self.value:
            if self.value:
                log.info("epoch %d of the answer cache: everything older is void", value)
            self.value = value

    async def bump(self) -> int | None:
        """Begin a new epoch, here at once and elsewhere as soon as they hear of it; None when Redis did not take it."""
        before = self.value
        value = await self._store.script(_EPOCH, [keys.EPOCH], [before, 1, events.MAX_EPOCH], write=True)
        if not isinstance(value, int) or value <= before:
            return None
        self._learn(value)
        await publish(self._store, events.Epoch(value))
        return value

    async def follow(self) -> None:
        """Background loop. Runs until cancelled."""
        while True:
            await self._store.up.wait()
            reply = await self._store.tail("events", self._read, None, timeout_s=5 * BLOCK_MS / 1000)
            if reply is None:
                await asyncio.sleep(RETRY_S)
            if not reply:
                self._learn(
                    await self._store.script(_EPOCH, [keys.EPOCH], [self.value, 0, events.MAX_EPOCH], write=True)
                )
                continue
            for self._last, fields in reply[0][1]:
                # Entries are for those who have vectors.
                event = events.decode(fields) if fields.get(b"kind") != b"add" else None
                if isinstance(event, events.Epoch):
                    self._learn(event.epoch)
                if event is not None:
                    self._listener(event)

    async def _read(self, client: Any) -> Any:
        return await client.xread({keys.EVENTS: self._last or b"$"}, count=BATCH, block=BLOCK_MS)


async def publish(store: RedisStore, event: events.Event) -> bool:
    """Tell all replicas; False when Redis did not take it."""
    fields = events.encode(event)
    added = await store.run(
        "event",
        lambda client: client.xadd(keys.EVENTS, fields, maxlen=keys.EVENTS_MAXLEN, approximate=True),
        None,
        write=True,
    )
    return added is not None
