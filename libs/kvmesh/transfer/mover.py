"""The mover: the one thread that posts, copies and completes. The asyncio loop talks to it through `call`.

It owns the send table, the ring watcher and every outbound. A turn: take commands, look at ring and doorbell, let each
link move a bounded number of bytes, hand completions to the table, report what has ended; sleep when nothing is to do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvmesh.errors import DataLoss, Internal, KvmeshError, Unavailable
from kvmesh.transfer.poller import Poller, sharpen_timers
from kvmesh.transfer.sends import Send, SendEvent, SendTable
from kvmesh.transfer.transports.base import Outbound
from kvmesh.transfer.watcher import IDLE_S, RingWatcher

log = logging.getLogger(__name__)
T = TypeVar("T")

# What one link moves before the others, and commands, have their turn.
TURN_BYTES = 8 << 20
CALL_TIMEOUT_S = 30.0


class Mover:
    """Life: `start` → `attach` (an engine) → links come and go → `detach` → … → `stop`.

    on_events(events), on_broken(outbound, reason) and on_engine_fault(reason) are called on the loop.
    """

    def __init__(
        self,
        *,
        on_events: Callable[[list[SendEvent]], None],
        on_broken: Callable[[Outbound, str], None],
        on_engine_fault: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_events = on_events
        self._on_broken = on_broken
        self._on_engine_fault = on_engine_fault
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvmesh-mover", daemon=True)
        self._stopping = False
        # Below: the mover's thread only.
        self._table: SendTable | None = None
        self._watcher: RingWatcher | None = None
        self._links: dict[Outbound, bool] = {}
        self._fds: dict[Outbound, set[int]] = {}
        self._poller = Poller()
        self._poller.set(self._wake, select.POLLIN)
        # Turns that found something to do, and all turns: for tests of idleness.
        self.turns = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def call(self, action: Callable[[], T]) -> T:
        """Run `action` on the mover's thread and return what it returns; it must not block."""
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        self._submit(run)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await asyncio.wrap_future(done)

    def post(self, action: Callable[[], None]) -> None:
        """Like `call`, without waiting. What it raises is logged."""

        def run() -> None:
            try:
                action()
            except Exception:
                log.exception("mover: a command failed")

        self._submit(run)

    async def attach(self, table: SendTable, watcher: RingWatcher | None) -> None:
        """Serve an engine's transfers."""

        def attach() -> None:
            self._table = table
            self._watcher = watcher
            if watcher is not None:
                self._poller.set(watcher.eventfd, select.POLLIN)

        await self.call(attach)

    async def detach(self) -> None:
        """Forget the engine. Its transfers are over and its links removed by then."""

        def detach() -> None:
            if self._watcher is not None:
                self._poller.remove(self._watcher.eventfd)
                self._watcher.close()
            self._table = self._watcher = None

        await self.call(detach)

    async def add_link(self, outbound: Outbound) -> None:
        """Drive a link from now on."""
        await self.call(lambda: self._links.__setitem__(outbound, False))

    async def remove_link(self, outbound: Outbound, reason: str) -> None:
        """Stop the link's transfers, fence it, drain it, close it. Returns when the peer's memory is let go of."""

        def remove() -> None:
            if self._table is not None:
                self._table.stop_link(outbound, reason)
            outbound.fence(reason)
            self._collect(outbound)
            self._links.pop(outbound, None)
            self._watch(outbound, [])
            outbound.close()
            self._report()

        await self.call(remove)

    async def start_send(self, send: Send, ready_pages: int) -> None:
        """Take a transfer up. Raises what the table refuses."""

        def start() -> None:
            if self._table is None:
                raise Internal("no engine is registered")
            if send.outbound not in self._links:
                # Nobody would ever collect its completions.
                raise Unavailable("the link is gone")
            self._table.start(send, ready_pages)

        await self.call(start)

    def pages_ready(self, transfer_id: int, first: int, count: int) -> None:
        """See SendTable."""

        def ready() -> None:
            if self._table is not None:
                self._table.pages_ready(transfer_id, first, count)

        self.post(ready)

    def tail_ready(self, transfer_id: int) -> None:
        """See SendTable."""

        def ready() -> None:
            if self._table is not None:
                self._table.tail_ready(transfer_id)

        self.post(ready)

    def stop_send(self, transfer_id: int, reason: str, *, by_peer: bool = False) -> None:
        """Stop one transfer; nothing where it is over."""

        def stop() -> None:
            if self._table is not None:
                self._table.stop(transfer_id, reason, by_peer=by_peer)

        self.post(stop)

    def wake(self) -> None:
        """Look at the ring now."""
        self._signal()

    @property
    def native_id(self) -> int | None:
        """Of the thread, for pinning; None before `start`."""
        return self._thread.native_id

    @property
    def running(self) -> bool:
        """True between `start` and `stop`."""
        return self._thread.is_alive() and not self._stopping

    async def stop(self) -> None:
        """End the thread; links must be removed by then."""
        self._stopping = True
        self._signal()
        await asyncio.to_thread(self._thread.join, CALL_TIMEOUT_S)
        os.close(self._wake)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _submit(self, action: Callable[[], None]) -> None:
        if self._stopping:
            raise Internal("the mover has stopped")
        self._commands.append(action)
        self._signal()

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        sharpen_timers()
        while not self._stopping:
            try:
                self.turns += 1
                if not self._turn():
                    self._sleep()
            except Exception:
                # A fault here would stop every transfer in silence; a pause keeps a repeating one from spinning.
                log.exception("mover: a turn failed")
                time.sleep(0.05)

    def _turn(self) -> bool:
        busy = False
        while self._commands:
            self._commands.popleft()()
            busy = True
        if self._table is not None and self._watcher is not None:
            try:
                busy |= self._watcher.feed(self._table)
            except DataLoss as error:
                self._engine_fault(error.message)
        for outbound in list(self._links):
            busy |= self._collect(outbound)
            if outbound.broken and not self._links[outbound]:
                self._links[outbound] = True
                if self._table is not None:
                    self._table.stop_link(outbound, outbound.broken)
                    self._collect(outbound)
                self._on_loop(self._on_broken, outbound, outbound.broken)
        self._report()
        return busy

    def _collect(self, outbound: Outbound) -> bool:
        try:
            completions = outbound.poll(TURN_BYTES)
        except Exception as error:
            # Whatever it is: the links behind it in this turn, and in all turns after, are not to pay for it.
            reason = error.message if isinstance(error, KvmeshError) else f"{type(error).__name__}: {error}"
            log.error("mover: a link is given up: %s", reason, exc_info=not isinstance(error, KvmeshError))
            outbound.fence(reason)
            completions = outbound.poll(0)
        if self._table is not None:
            for completion in completions:
                self._table.complete(completion)
        return bool(completions) or outbound.busy

    def _report(self) -> None:
        if self._table is not None:
            events = self._table.events()
            if events:
                self._on_loop(self._on_events, events)

    def _engine_fault(self, reason: str) -> None:
        assert self._watcher is not None
        assert self._table is not None
        self._poller.remove(self._watcher.eventfd)
        self._watcher.close()
        self._watcher = None
        self._table.stop_all(reason)
        self._on_loop(self._on_engine_fault, reason)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        # The loop is closed at interpreter exit only.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _sleep(self) -> None:
        timeout = IDLE_S
        for outbound in self._links:
            self._watch(outbound, outbound.wait_fds())
            at = outbound.wake_at()
            if at is not None:
                timeout = min(timeout, max(0.0, at - time.monotonic()))
        if self._watcher is not None and self._table is not None:
            ready = self._watcher.wait(self._table, self._poller, timeout)
        else:
            ready = self._poller.wait(timeout)
        for fd in ready:
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif self._watcher is not None and fd == self._watcher.eventfd:
                self._watcher.notified()

    def _watch(self, outbound: Outbound, wanted: list[tuple[int, int]]) -> None:
        """Bring the poll set up to date with what this link waits for."""
        mine = self._fds.setdefault(outbound, set())
        for fd in mine - {fd for fd, _ in wanted}:
            self._poller.remove(fd)
            mine.discard(fd)
        for fd, mask in wanted:
            self._poller.set(fd, mask)
            mine.add(fd)
        if not mine:
            del self._fds[outbound]
