"""What the replicas of the semantic cache tell one another, through Redis.

Vectors and answers live in Redis; what a process holds is a copy of them. Each router writes its own entries there and
an event of each (`kvmesh.store.keys` and `events` have the forms), and follows the events of all. A fresh one reads the
index of entries first, shard by shard. Followed is by id: where the last one seen is no longer in the stream, some
may have been missed, and the index is read again behind the requests' back. Redis being away costs only this: what is
in memory is searched all the same, and answers that memory holds are served.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvmesh.errors import InvalidArgument
from kvmesh.store import RedisStore, events, keys
from services.router.cache.fingerprint import CacheKey
from services.router.near.entries import Entry
from services.router.near.index import NearIndex
from services.router.near.nearcache import NearCache, Origin
from services.router.near.search import Vector

log = logging.getLogger(__name__)

BLOCK_MS = 1000
READ_TIMEOUT_S = 5.0
RETRY_S = 0.2
FAILED_S = 5.0
LOADING_S = 0.02
SCANNED_AT_ONCE = 256
READ_AT_ONCE = 256
READ_BESIDE_REQUESTS = 32
"""Entries parsed in one go, about 0.1 ms each: less once the event loop has requests to serve."""

STALLED_S = 30.0
"""So long without progress, and a fresh router goes on with what it has."""

_MEMBER = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{32})")


class Gone(Exception):
    """Redis does not answer."""


class Replica:
    """Keeps one `NearCache` and Redis in step. `run` is the caller's to run."""

    def __init__(self, store: RedisStore, cache: NearCache) -> None:
        self._store = store
        self._cache = cache
        self._last = b""
        self._done = 0
        self._moved = time.monotonic()
        self._embedder = ""
        self.epoch = 0
        """Of the entries in memory."""
        self.progress = 0.0
        """Of the rebuild, 0 to 1; 1 once there was a whole one."""
        self.ready = asyncio.Event()
        """Set once the first rebuild has ended, or there is nothing to wait for; never cleared."""
        self.rebuilds = 0
        """Rebuilds that were finished, entries taken in from Redis, and events or entries that were no use."""
        self.taken = 0
        self.refused = 0
        cache.publish = self.publish

    # --- writing ----------------------------------------------------------------------------------------------------

    async def publish(self, key: CacheKey, vector: Vector, embedder: str, origin: Origin) -> None:
        """Write an entry to Redis and tell the others. Never raises for what Redis does."""
        added = events.Added(
            entry_id=origin.entry_id,
            partition=key.partition,
            tag=origin.tag,
            exact=origin.exact,
            text=key.text,
            prompt=key.prompt,
            vector=np.ascontiguousarray(vector, dtype="<f4").tobytes(),
            embedder=embedder,
            tenant=origin.tenant,
            model=origin.model,
            family=origin.family,
            epoch=origin.epoch,
            expires_ms=origin.expires_ms,
        )
        entry_id = origin.entry_id.hex()
        entry, shard = keys.entry(origin.tag, entry_id), keys.vector_index(keys.vector_shard(entry_id), origin.epoch)

        async def write(client: Any) -> bool:
            # First what the event and the index lead to. In a cluster the three lie on different nodes.
            await client.set(entry, added.pack(), pxat=origin.expires_ms)
            pipe = client.pipeline(transaction=False)
            pipe.zremrangebyscore(shard, "-inf", int(time.time() * 1000))
            pipe.zadd(shard, {f"{origin.tag} {entry_id}": origin.expires_ms})
            # All entries of an epoch live equally long: the index ends with its latest.
            pipe.pexpireat(shard, origin.expires_ms)
            pipe.xadd(keys.EVENTS, events.encode(added), maxlen=keys.EVENTS_MAXLEN, approximate=True)
            await pipe.execute()
            return True

        if not await self._store.run("near_publish", write, False, write=True):
            log.debug("an entry of the semantic cache is known to this router alone")

    # --- following --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Rebuild, then follow; begin anew where events were missed. Runs until cancelled."""
        watchdog = asyncio.create_task(self._watch_progress(), name="near-progress")
        try:
            while not self._cache.settled.is_set():
                await asyncio.sleep(LOADING_S)
            if self._cache.state != "ready":
                self.ready.set()
                return
            self._embedder = self._cache.embedder_id
            while True:
                try:
                    await self._up()
                    if not self._last:
                        await self._rebuild()
                    await self._follow()
                except Gone:
                    await asyncio.sleep(RETRY_S)
                except Exception:
                    # Whatever lies in Redis: it must not end the following of it.
                    log.exception("the semantic cache's replica failed; it begins anew")
                    self._last = b""
                    await asyncio.sleep(FAILED_S)
        finally:
            watchdog.cancel()

    async def _up(self) -> None:
        while not self._store.ok:
            if self._store.checked.is_set() and not self.ready.is_set():
                log.warning("redis is away: the semantic cache begins with nothing")
                self.ready.set()
            await asyncio.sleep(RETRY_S)

    async def _watch_progress(self) -> None:
        while not self.ready.is_set():
            left = self._moved + STALLED_S - time.monotonic()
            if left <= 0:
                log.warning(
                    "no progress of the rebuild for %.0f s: going on at %.0f %%", STALLED_S, 100 * self.progress
                )
                self.ready.set()
            await asyncio.sleep(max(RETRY_S, min(1.0, left)))

    async def _rebuild(self) -> None:
        """Read the index of entries of the present epoch; what memory has and Redis has not is forgotten."""
        if not self.ready.is_set():
            self.progress = 0.0
        last = await self._newest()
        await self._read_epoch()
        # Whatever comes meanwhile from this process's own requests stays.
        mark = await self._on_index(lambda index: index.mark())
        seen: set[bytes] = set()
        started, before = time.monotonic(), self.taken
        for shard in range(keys.VECTOR_SHARDS):
            await self._shard(keys.vector_index(shard, self.epoch), seen)
            self._step((shard + 1) / keys.VECTOR_SHARDS)
        await self._on_index(lambda index: index.sweep(mark, seen))
        self._last = last
        self.rebuilds += 1
        self.progress = 1.0
        log.info("%d entries from redis in %.1f s", self.taken - before, time.monotonic() - started)
        self.ready.set()

    def _step(self, progress: float) -> None:
        self._moved = time.monotonic()
        if not self.ready.is_set():
            self.progress = progress

    async def _shard(self, key: str, seen: set[bytes]) -> None:
        cursor = 0
        while True:
            scan = functools.partial(_scan, key, cursor)
            cursor, found = await self._ask("near_scan", scan)
            now = time.time() * 1000
            matches = [_MEMBER.fullmatch(member) for member, expires in found if expires > now]
            names = [(match[1].decode(), match[2].decode()) for match in matches if match is not None]
            self.refused += matches.count(None)
            step = READ_BESIDE_REQUESTS if self.ready.is_set() else READ_AT_ONCE
            for start in range(0, len(names), step):
                await self._entries(names[start : start + step], seen)
            self._moved = time.monotonic()
            if cursor == 0:
                return

    async def _entries(self, names: Sequence[tuple[str, str]], seen: set[bytes]) -> None:
        async def read(client: Any) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for tag, entry_id in names:
                # Whatever lies there: no more of it than an entry has.
                pipe.getrange(keys.entry(tag, entry_id), 0, events.MAX_PACKED_BYTES)
            return list(await pipe.execute(raise_on_error=False))

        packed = await self._ask("near_entries", read)
        added = [event for data in packed if (event := self._entry(data)) is not None]
        seen.update(event.entry_id for event in added)
        await self._take(added)

    def _entry(self, data: object) -> events.Added | None:
        if not data:
            # Its answer went before the index did.
            return None
        try:
            return events.Added.unpack(data)
        except ValueError:
            self.refused += 1
            log.warning("a corrupt entry of the semantic cache in redis is left out")
            return None

    async def _follow(self) -> None:
        """Take in events until some are missed (then `_last` is empty). Raises Gone."""
        while True:
            last = self._last
            read = functools.partial(_read_events, last)
            reply = await self._store.tail("near_events", read, None, timeout_s=READ_TIMEOUT_S)
            if reply is None:
                raise Gone
            # While the last one seen is there, none after it was trimmed away.
            if not await self._there(last):
                log.warning("events of the semantic cache were missed: rebuilding")
                self._last = b""
                return
            entries = reply[0][1] if reply else []
            await self._apply([event for _, fields in entries if (event := events.decode(fields)) is not None])
            if entries:
                self._last = entries[-1][0]

    async def _newest(self) -> bytes:
        """Id of the newest event; an empty stream gets one, to be known by."""
        newest = await self._ask("near_newest", lambda client: client.xrevrange(keys.EVENTS, count=1))
        if newest:
            return bytes(newest[0][0])
        return bytes(await self._ask("near_begin", lambda client: client.xadd(keys.EVENTS, {"kind": "begin"})))

    async def _there(self, last: bytes) -> bool:
        return bool(await self._ask("near_there", lambda client: client.xrange(keys.EVENTS, min=last, max=last)))

    async def _apply(self, found: Sequence[events.Event]) -> None:
        """In their order; neighbours that are added go in together."""
        added: list[events.Added] = []
        for event in found:
            if isinstance(event, events.Added):
                added.append(event)
                continue
            await self._take(added)
            added = []
            if isinstance(event, events.Epoch):
                await self._enter(event.epoch)
            else:
                await self._on_index(functools.partial(_purge, event))
        await self._take(added)

    async def _read_epoch(self) -> None:
        epoch = await self._ask("near_epoch", lambda client: client.get(keys.EPOCH))
        known = isinstance(epoch, bytes) and epoch.isdigit() and len(epoch) <= events.MAX_NUMBER_DIGITS
        await self._enter(int(epoch) if known and int(epoch) <= events.MAX_EPOCH else 0)

    async def _enter(self, epoch: int) -> None:
        if epoch > self.epoch:
            await self._on_index(lambda index: index.drop_before(epoch))
            self.epoch = epoch

    async def _take(self, added: Sequence[events.Added]) -> None:
        if any(event.epoch > self.epoch for event in added):
            # Faster than the event of its epoch, or corrupt: the epoch itself says which.
            await self._read_epoch()
        wanted = [event for event in added if event.epoch == self.epoch and event.embedder == self._embedder]
        if not wanted:
            return
        now = time.time()

        def take(index: NearIndex) -> tuple[int, int]:
            taken = refused = 0
            for event in wanted:
                if index.find(event.entry_id) is not None:
                    continue
                left = event.expires_ms / 1000 - now
                try:
                    vector = np.frombuffer(event.vector, dtype="<f4")
                    entry = Entry(
                        event.text,
                        event.prompt,
                        None,
                        entry_id=event.entry_id,
                        tag=event.tag,
                        exact=event.exact,
                        tenant=event.tenant,
                        model=event.model,
                        family=event.family,
                        epoch=event.epoch,
                    )
                    taken += index.add(event.partition, vector, entry, left_s=left, age_s=index.age_of(left))
                except InvalidArgument as exc:
                    refused += 1
                    log.warning("an entry of the semantic cache in redis is left out: %s", exc)
            return taken, refused

        taken, refused = await self._on_index(take)
        self.taken += taken
        self.refused += refused

    # --- both sides -------------------------------------------------------------------------------------------------

    async def _on_index(self, work: Any) -> Any:
        result = await self._cache.bulk(lambda index: (work(index),))
        if not isinstance(result, tuple):
            raise Gone
        return result[0]

    async def _ask(self, operation: str, work: Any) -> Any:
        async def boxed(client: Any) -> tuple[Any]:
            return (await work(client),)

        reply = await self._store.run(operation, boxed, None, write=True)
        if reply is None:
            raise Gone
        return reply[0]

    def status(self) -> Mapping[str, float]:
        """Numbers for operators."""
        return {
            "progress": self.progress,
            "rebuilds": self.rebuilds,
            "taken": self.taken,
            "refused": self.refused,
            "epoch": self.epoch,
        }


def _purge(event: events.Purged, index: NearIndex) -> int:
    return index.purge(event.what, event.value)


async def _scan(key: str, cursor: int, client: Any) -> Any:
    return await client.zscan(key, cursor=cursor, count=SCANNED_AT_ONCE)


async def _read_events(last: bytes, client: Any) -> Any:
    return await client.xread({keys.EVENTS: last}, count=READ_BESIDE_REQUESTS, block=BLOCK_MS)
