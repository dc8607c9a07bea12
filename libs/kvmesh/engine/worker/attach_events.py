"""What routers are told of the prefix cache: hashes of every 8th block of a chain, packed, numbered.

A router's answer to a prefix is a number of tokens, and where the index names each 8th block it is at most 7 blocks too
low. The mirror holds those hashes only. An outbox keeps, for one router, the LAST thing that happened to each hash, so
that what waits never exceeds what was touched, and the order of events within a message does not matter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from kvmesh.kv.hashing import CHAIN_STRIDE
from kvmesh.kv.prefix import CacheEvent
from kvmesh.proto.v1 import router_pb2

log = logging.getLogger(__name__)

# Hashes in one message: 16 bytes each. A router takes a message at one go, in a few microseconds a hash, and decides
# nothing meanwhile.
BATCH_BLOCKS = 1024
# What may wait for a slow router; over it the router gets the whole cache anew.
MAX_PENDING_BLOCKS = 262_144
MAX_PENDING_SEEN = 65_536
# A message goes out this often even where nothing changed: a router tells a quiet cache from lost events by it.
KEEPALIVE_S = 1.0

Clock = Callable[[], float]


class CacheMirror:
    """The hashes of every 8th block in the prefix cache, as told by its events. On the event loop."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, None] = {}

    def apply(self, event: CacheEvent) -> list[bytes]:
        """Follow one event; the hashes among its own that routers hear of."""
        if event.kind == "stored":
            # The run's first block is `depth` from the root; blocks 8, 16, … are told.
            told = list(event.hashes[-event.depth % CHAIN_STRIDE :: CHAIN_STRIDE])
            self.hashes.update(dict.fromkeys(told))
            return told
        told = [block for block in event.hashes if block in self.hashes]
        for block in told:
            del self.hashes[block]
        return told


class Outbox:
    """What one router has not been told yet."""

    def __init__(self, mirror: CacheMirror, incarnation: int, clock: Clock = time.monotonic) -> None:
        self._mirror = mirror
        self._incarnation = incarnation
        self._clock = clock
        self.stream = 0
        self.restart()

    def restart(self) -> None:
        """A new stream knows nothing, and counts from 1."""
        self.stream += 1
        self.register = True
        self._seen: list[str] = []
        self._sequence = 0
        self._told_at = self._clock()
        self.resync()

    def resync(self) -> None:
        """Begin again with a snapshot: the router lacks events, or too many wait for it."""
        self._reset = True
        # hash → whether it is in the cache now, for those that were stored or removed since the last message.
        self._changed: dict[bytes, bool] = {}

    def changed(self, hashes: list[bytes], *, stored: bool) -> None:
        """Hashes that the mirror has gained or lost."""
        if self._reset:
            return
        if len(self._changed) + len(hashes) > MAX_PENDING_BLOCKS:
            self.resync()
        else:
            self._changed.update(dict.fromkeys(hashes, stored))

    def seen(self, request_id: str) -> None:
        """A request was accepted."""
        if len(self._seen) < MAX_PENDING_SEEN:
            self._seen.append(request_id)

    def take_seen(self) -> list[str]:
        """Requests accepted since the last time."""
        seen, self._seen = self._seen, []
        return seen

    def take_kv(self) -> list[router_pb2.KvEvents]:
        """Messages that bring the router up to date; an empty one when it has heard nothing for a while."""
        stored: list[bytes]
        removed: list[bytes] = []
        reset, self._reset = self._reset, False
        if reset:
            stored = list(self._mirror.hashes)
        else:
            stored = [block for block, there in self._changed.items() if there]
            removed = [block for block, there in self._changed.items() if not there]
        self._changed = {}
        now = self._clock()
        if not (reset or stored or removed) and now - self._told_at < KEEPALIVE_S:
            return []
        self._told_at = now
        # Removals travel first; hashes are in one list or the other, so that no order is lost by it.
        ends = range(0, max(len(removed), len(stored), 1), BATCH_BLOCKS)
        messages = []
        for at in ends:
            self._sequence += 1
            messages.append(
                router_pb2.KvEvents(
                    reset=reset and at == 0,
                    removed_packed=b"".join(removed[at : at + BATCH_BLOCKS]),
                    stored_packed=b"".join(stored[at : at + BATCH_BLOCKS]),
                    incarnation=self._incarnation,
                    sequence=self._sequence,
                    more=reset and at != ends[-1],
                )
            )
        return messages


class CacheRelay:
    """From the core's thread to `on_cache_event` on the loop, in order and many at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: Callable[[CacheEvent], None]) -> None:
        self._loop = loop
        self._sink = sink
        self._lock = threading.Lock()
        self._gathered: list[CacheEvent] = []

    def __call__(self, event: CacheEvent) -> None:
        """On the core's thread; only the first event of a batch wakes the loop."""
        with self._lock:
            self._gathered.append(event)
            first = len(self._gathered) == 1
        if first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                log.debug("cache events after the loop was closed")

    def _deliver(self) -> None:
        with self._lock:
            events, self._gathered = self._gathered, []
        for event in events:
            self._sink(event)
