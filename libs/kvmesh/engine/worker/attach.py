"""One `Router.Attach` stream to every router replica: registration, load, requests seen, KV events.

Nothing here is waited for by serving: a router that is away costs a reconnecting task, no more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvmesh.engine.worker.resolve import resolve
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.prefix import CacheEvent
from kvmesh.proto.v1 import engine_pb2, router_pb2, router_pb2_grpc
from kvmesh.rpc.channel import MeshChannel, cancelling, raising
from kvmesh.rpc.tasks import cancel_and_wait

log = logging.getLogger(__name__)

RESOLVE_S = 5.0
# A router answers with a heartbeat each second.
SILENCE_S = 5.0
MAX_BACKOFF_S = 5.0
# Blocks in one message: 16 bytes each.
BATCH_BLOCKS = 16_384
# What may wait for a slow router; over it the router gets the whole cache anew.
MAX_PENDING_BLOCKS = 262_144
MAX_PENDING_SEEN = 65_536


class CacheMirror:
    """The hashes in the prefix cache, as told by its events; lets a router start with a snapshot. On the event loop."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, None] = {}

    def apply(self, event: CacheEvent) -> None:
        """Follow one event."""
        if event.kind == "stored":
            self.hashes.update(dict.fromkeys(event.hashes))
        else:
            for block in event.hashes:
                self.hashes.pop(block, None)


class _Outbox:
    """What one router has not been told yet. Events stay in order: a block may be stored, removed and stored again."""

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self.restart()

    def restart(self) -> None:
        """A new stream knows nothing."""
        self.register = True
        self._reset = True
        self._events: list[tuple[bool, bytes]] = []
        self._seen: list[str] = []

    def cache_event(self, event: CacheEvent) -> None:
        if self._reset:
            return
        if len(self._events) + len(event.hashes) > MAX_PENDING_BLOCKS:
            self._reset = True
            self._events.clear()
            return
        stored = event.kind == "stored"
        self._events.extend((stored, block) for block in event.hashes)

    def seen(self, request_id: str) -> None:
        if len(self._seen) < MAX_PENDING_SEEN:
            self._seen.append(request_id)

    def take_seen(self) -> list[str]:
        seen, self._seen = self._seen, []
        return seen

    def take_kv(self) -> list[router_pb2.KvEvents]:
        """Messages that bring the router up to date. Within a message removals are applied before what is stored."""
        if self._reset:
            self._reset = False
            self._events.clear()
            blocks = list(self._mirror.hashes)
            first = router_pb2.KvEvents(reset=True, stored=blocks[:BATCH_BLOCKS])
            rest = range(BATCH_BLOCKS, len(blocks), BATCH_BLOCKS)
            return [first, *(router_pb2.KvEvents(stored=blocks[at : at + BATCH_BLOCKS]) for at in rest)]
        events, self._events = self._events, []
        messages: list[router_pb2.KvEvents] = []
        # A run of one kind a message: then no order inside a message matters.
        run: list[bytes] = []
        for at, (stored, block) in enumerate(events):
            run.append(block)
            last = at + 1 == len(events) or events[at + 1][0] != stored
            if last or len(run) == BATCH_BLOCKS:
                messages.append(router_pb2.KvEvents(stored=run) if stored else router_pb2.KvEvents(removed=run))
                run = []
        return messages


class RouterLinks:
    """Keeps a stream to every address behind `targets`. `run` is a background task; `close` ends all streams."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        info: Callable[[], engine_pb2.WorkerInfo],
        load: Callable[[], engine_pb2.WorkerLoad],
        open_channel: Callable[[str], MeshChannel],
        interval_s: float,
    ) -> None:
        self._targets = list(targets)
        self._addresses: dict[str, set[str]] = {}
        self._info = info
        self._load = load
        self._open = open_channel
        self._interval = interval_s
        self._links: dict[str, tuple[asyncio.Task[None], _Outbox]] = {}
        self._changed = asyncio.Event()
        self.mirror = CacheMirror()
        self.attached: dict[str, str] = {}

    def on_cache_event(self, event: CacheEvent) -> None:
        """On the event loop, in the cache's order."""
        self.mirror.apply(event)
        for _, outbox in self._links.values():
            outbox.cache_event(event)

    def on_seen(self, request_id: str) -> None:
        """A request was accepted."""
        for _, outbox in self._links.values():
            outbox.seen(request_id)

    def on_change(self) -> None:
        """State or sidecar address changed: register again, at once."""
        for _, outbox in self._links.values():
            outbox.register = True
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Resolve, open and close streams, for ever."""
        if not self._targets:
            return
        try:
            while True:
                complete = await self._resolve()
                for address in self._known() - set(self._links):
                    outbox = _Outbox(self.mirror)
                    task = asyncio.create_task(self._keep(address, outbox), name=f"attach:{address}")
                    self._links[address] = (task, outbox)
                for address in set(self._links) - self._known():
                    task, _ = self._links.pop(address)
                    await cancel_and_wait(task)
                await asyncio.sleep(RESOLVE_S if complete else 1.0)
        finally:
            await self.close()

    async def _resolve(self) -> bool:
        """Look every target up; one that cannot be resolved now keeps its addresses. True when all could be."""
        complete = True
        for target in self._targets:
            found = await resolve(target)
            if found is None:
                complete = False
            else:
                self._addresses[target] = found
        return complete

    def _known(self) -> set[str]:
        return set().union(*self._addresses.values())

    async def close(self) -> None:
        """End all streams. Idempotent."""
        tasks = [task for task, _ in self._links.values()]
        self._links.clear()
        await cancel_and_wait(*tasks)

    async def _keep(self, address: str, outbox: _Outbox) -> None:
        """One router: attach, and attach again with backoff."""
        backoff = 0.1
        while True:
            channel = self._open(address)
            try:
                outbox.restart()
                if await self._attach(address, channel, outbox):
                    backoff = 0.1
            except KvmeshError as error:
                log.info("router %s: %s", address, error.message)
            except Exception:
                log.exception("router %s: the stream failed", address)
            finally:
                self.attached.pop(address, None)
                await channel.close(None)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(MAX_BACKOFF_S, backoff * 2)

    async def _attach(self, address: str, channel: MeshChannel, outbox: _Outbox) -> bool:
        """One stream, until it ends or the router falls silent. True if the router had answered."""
        stub = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        loop = asyncio.get_running_loop()
        answered = False
        call: Any = stub.Attach(self._messages(outbox))
        with raising(), cancelling(call):
            try:
                async with asyncio.timeout(SILENCE_S) as silence:
                    async for answer in call:
                        silence.reschedule(loop.time() + SILENCE_S)
                        if not answered:
                            answered = True
                            self.attached[address] = answer.router_id
                            log.info("attached to router %s (%s)", answer.router_id or "?", address)
            except TimeoutError:
                raise Unavailable(f"no heartbeat for {SILENCE_S:g} s") from None
        return answered

    async def _messages(self, outbox: _Outbox) -> AsyncIterator[router_pb2.AttachRequest]:
        while True:
            changed = self._changed
            if outbox.register:
                outbox.register = False
                yield router_pb2.AttachRequest(registration=self._info())
            for events in outbox.take_kv():
                yield router_pb2.AttachRequest(kv=events)
            report = router_pb2.LoadReport(load=self._load(), seen_requests=outbox.take_seen())
            yield router_pb2.AttachRequest(load=report)
            try:
                async with asyncio.timeout(self._interval):
                    await changed.wait()
            except TimeoutError:
                pass


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
