"""Watchers: gateways and tools that follow the fleet.

A watcher's backlog is a set of worker ids, not of messages: what is told about a worker is read when it is sent. Many
changes of one worker become one entry, a slow reader gets the present state instead of the past, and its cost is
bounded; past `MAX_PENDING` ids it simply gets the whole fleet again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from kvmesh.errors import Overloaded, Unavailable
from kvmesh.proto.v1 import router_pb2
from services.router.fleet import Fleet

HEARTBEAT_S = 1.0
MAX_PENDING = 512
MAX_WATCHERS = 1024


class Watcher:
    """What one watcher has not been told yet."""

    def __init__(self, fleet: Fleet, aliases: Mapping[str, str] | None = None) -> None:
        self._fleet = fleet
        self._aliases = aliases or {}
        self._pending: set[str] = set()
        self._snapshot = True
        self.wake = asyncio.Event()

    def add(self, worker_id: str, *, urgent: bool) -> None:
        """A worker changed, reported or left; loads are not urgent, they travel with the next heartbeat."""
        if not self._snapshot:
            self._pending.add(worker_id)
            if len(self._pending) > MAX_PENDING:
                self._pending.clear()
                self._snapshot = True
        if urgent:
            self.wake.set()

    def take(self) -> router_pb2.WatchResponse:
        """The next message: the whole fleet where that is due, otherwise what changed since the last one."""
        self.wake.clear()
        if self._snapshot:
            self._snapshot = False
            self._pending.clear()
            return router_pb2.WatchResponse(
                snapshot=True, workers=[w.status() for w in self._fleet.workers], aliases=self._aliases
            )
        message = router_pb2.WatchResponse()
        for worker_id in sorted(self._pending):
            worker = self._fleet.get(worker_id)
            if worker is None:
                message.removed.append(worker_id)
            else:
                message.workers.append(worker.status())
        self._pending.clear()
        return message

    @property
    def pending(self) -> int:
        """Ids kept for this watcher."""
        return len(self._pending)


class WatchHub:
    """All watchers of one router; listens to the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        cache_status: Callable[[], router_pb2.CacheStatus],
        heartbeat_s: float = HEARTBEAT_S,
        *,
        aliases: Mapping[str, str] | None = None,
        embedder: Callable[[], str] = lambda: "",
    ) -> None:
        """`embedder`: id under which texts are embedded here, "" while they are not."""
        self._fleet = fleet
        self._cache_status = cache_status
        self._embedder = embedder
        self._heartbeat_s = heartbeat_s
        self._aliases = dict(aliases or {})
        self._watchers: set[Watcher] = set()
        self._closed = False
        fleet.add_listener(self)

    def __len__(self) -> int:
        return len(self._watchers)

    async def stream(self) -> AsyncGenerator[router_pb2.WatchResponse]:
        """Messages for one watcher, until it leaves. Raises Overloaded (too many), Unavailable (close)."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} watchers are attached", retry_after=5.0)
        watcher = Watcher(self._fleet, self._aliases)
        self._watchers.add(watcher)
        try:
            while not self._closed:
                message = watcher.take()
                message.cache.CopyFrom(self._cache_status())
                message.embedder = self._embedder()
                yield message
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await watcher.wake.wait()
                except TimeoutError:
                    continue
        finally:
            self._watchers.discard(watcher)
        raise Unavailable("this router is stopping")

    def close(self) -> None:
        """End all streams, so that watchers turn to another router."""
        self._closed = True
        for watcher in self._watchers:
            watcher.wake.set()

    # --- FleetListener --------------------------------------------------------------------------------------------

    def worker_changed(self, worker_id: str) -> None:
        """Tell every watcher at once."""
        self._add(worker_id, urgent=True)

    def worker_left(self, worker_id: str) -> None:
        """Tell every watcher at once."""
        self._add(worker_id, urgent=True)

    def worker_loaded(self, worker_id: str) -> None:
        """Tell with the next heartbeat."""
        self._add(worker_id, urgent=False)

    def worker_replaced(self, worker_id: str) -> None:
        """Nothing of its own: the change that follows carries the new incarnation."""

    def _add(self, worker_id: str, *, urgent: bool) -> None:
        for watcher in self._watchers:
            watcher.add(worker_id, urgent=urgent)
