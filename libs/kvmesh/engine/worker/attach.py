"""One `Router.Attach` stream to every router replica: registration, load, requests seen, KV events.

Nothing here is waited for by serving: a router that is away costs a reconnecting task, no more.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvmesh.engine.worker.attach_events import CacheMirror, Outbox
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.prefix import CacheEvent
from kvmesh.proto.v1 import engine_pb2, router_pb2, router_pb2_grpc
from kvmesh.rpc.channel import MeshChannel, cancelling, raising
from kvmesh.rpc.resolve import host_of, resolve
from kvmesh.rpc.tasks import cancel_and_wait

log = logging.getLogger(__name__)

RESOLVE_S = 5.0
# A router answers with a heartbeat each second.
SILENCE_S = 5.0
MAX_BACKOFF_S = 2.0


class RouterLinks:
    """Keeps a stream to every address behind `targets`. `run` is a background task; `close` ends all streams."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        incarnation: int,
        info: Callable[[], engine_pb2.WorkerInfo],
        load: Callable[[], engine_pb2.WorkerLoad],
        open_channel: Callable[[str, str], MeshChannel],
        interval_s: float,
    ) -> None:
        """`open_channel` gets an address, and the name that it was found by, "" where there was none."""
        self._targets = list(targets)
        self._incarnation = incarnation
        self._addresses: dict[str, set[str]] = {}
        self._info = info
        self._load = load
        self._open = open_channel
        self._interval = interval_s
        self._links: dict[str, tuple[asyncio.Task[None], Outbox]] = {}
        self._changed = asyncio.Event()
        self.mirror = CacheMirror()
        self.attached: dict[str, str] = {}

    def on_cache_event(self, event: CacheEvent) -> None:
        """On the event loop, in the cache's order."""
        told = self.mirror.apply(event)
        if told:
            for _, outbox in self._links.values():
                outbox.changed(told, stored=event.kind == "stored")

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
                    outbox = Outbox(self.mirror, self._incarnation)
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

    def _name_of(self, address: str) -> str:
        return next((host_of(target) for target, found in self._addresses.items() if address in found), "")

    async def close(self) -> None:
        """End all streams. Idempotent."""
        tasks = [task for task, _ in self._links.values()]
        self._links.clear()
        await cancel_and_wait(*tasks)

    async def _keep(self, address: str, outbox: Outbox) -> None:
        """One router: attach, and attach again with backoff."""
        backoff, trouble = 0.1, ""
        while True:
            channel = self._open(address, self._name_of(address))
            try:
                outbox.restart()
                if await self._attach(address, channel, outbox):
                    backoff, trouble = 0.1, ""
            except KvmeshError as error:
                if error.message != trouble:
                    log.info("router %s: %s", address, error.message)
                trouble = error.message
            except Exception:
                log.exception("router %s: the stream failed", address)
            finally:
                self.attached.pop(address, None)
                await channel.close(None)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(MAX_BACKOFF_S, backoff * 2)

    async def _attach(self, address: str, channel: MeshChannel, outbox: Outbox) -> bool:
        """One stream, until it ends or the router falls silent. True if the router had answered."""
        stub = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        loop = asyncio.get_running_loop()
        answered = False
        call: Any = stub.Attach(self._messages(outbox, outbox.stream))
        with raising(), cancelling(call):
            try:
                async with asyncio.timeout(SILENCE_S) as silence:
                    async for answer in call:
                        silence.reschedule(loop.time() + SILENCE_S)
                        if answer.need_snapshot:
                            outbox.resync()
                        if not answered:
                            answered = True
                            self.attached[address] = answer.router_id
                            log.info("attached to router %s (%s)", answer.router_id or "?", address)
            except TimeoutError:
                raise Unavailable(f"no heartbeat for {SILENCE_S:g} s") from None
        return answered

    async def _messages(self, outbox: Outbox, stream: int) -> AsyncIterator[router_pb2.AttachRequest]:
        told: engine_pb2.WorkerLoad | None = None
        # gRPC asks once more after a stream that the router ended: what waits by then is the next stream's.
        while outbox.stream == stream:
            changed = self._changed
            if outbox.register:
                outbox.register = False
                yield router_pb2.AttachRequest(registration=self._info())
            # Of an idle worker a message a second is enough, with the cache's keepalive: nothing has changed.
            kept = outbox.take_kv()
            for events in kept:
                yield router_pb2.AttachRequest(kv=events)
            load, seen = self._load(), outbox.take_seen()
            if kept or seen or load != told:
                told = load
                yield router_pb2.AttachRequest(load=router_pb2.LoadReport(load=load, seen_requests=seen))
            try:
                async with asyncio.timeout(self._interval):
                    await changed.wait()
            except TimeoutError:
                pass
