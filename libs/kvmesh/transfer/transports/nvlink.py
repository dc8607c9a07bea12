"""nvlink, the sidecars' part: the destination's memory goes by descriptors to the source's ENGINE, which writes by
itself and stores cumulative byte counters; the sidecars hand over, bind, abort, fence and count.

On the data connection only hellos and the writer's last word (unmapped) travel; counts are read from the counters.
A transfer is one `Write` here: posted when the slot is bound, completed when the engine says that it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
from collections import deque
from pathlib import Path

from kvmesh.errors import FailedPrecondition, InvalidArgument
from kvmesh.kv.fds import close_fds
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.posting import MAX_PASSED_FDS
from kvmesh.transfer.transports.base import (
    Arrival,
    Completion,
    EngineMemory,
    Expected,
    GrantedPages,
    Outbound,
    Write,
    memory_kind,
)
from kvmesh.transfer.transports.counters import CounterWatch, LinkCounters
from kvmesh.transfer.transports.posted import EnginePoster
from kvmesh.transfer.transports.shm import KIND_UNMAPPED, RECORD, ShmInbound, ShmTransport
from kvmesh.transfer.wire import open_unix

log = logging.getLogger(__name__)
# An engine drains in milliseconds. One that takes longer is heard later, by a notice.
RELEASE_S = 5.0


class NvlinkOutbound(Outbound):
    """The writer's end, seen from its sidecar. The mover's thread calls `post`, `poll`, `flush`, `fence` and `close`;
    what they ask of the engine is asked on the loop."""

    hands_over = True

    def __init__(self, sock: socket.socket, link_id: int, poster: EnginePoster) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._link_id = link_id
        self._poster = poster
        self._loop = asyncio.get_running_loop()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._announced: dict[int, tuple[int, pb.StartTransfer]] = {}
        self._writes: dict[int, tuple[int, Write]] = {}
        self._ended: deque[tuple[int, int, str]] = deque()
        self._completions: list[Completion] = []
        self._broken = ""
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def announce(self, immediate: int, transfer_id: int, request: pb.StartTransfer) -> None:
        """On the loop, before the transfer is started."""
        self._announced[immediate] = (transfer_id, request)

    def post(self, write: Write) -> None:
        transfer_id, request = self._announced.pop(write.immediate)
        if self._broken:
            self._completions.append(Completion(write.context, 0, self._broken))
            return
        self._writes[transfer_id] = (write.immediate, write)
        self._on_loop(self._poster.post, transfer_id, self._link_id, request, self._end_of(transfer_id))

    def poll(self, budget: int) -> list[Completion]:
        self._look()
        if not self._closed:
            # Behind `close` the descriptor's number may be another's.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        while self._ended:
            transfer_id, nbytes, reason = self._ended.popleft()
            if transfer_id not in self._writes:
                continue
            _, write = self._writes.pop(transfer_id)
            if not reason and nbytes != write.nbytes:
                reason = f"the engine wrote {nbytes} of {write.nbytes} bytes"
            self._completions.append(Completion(write.context, 0 if reason else nbytes, reason))
        completions, self._completions = self._completions, []
        return completions

    def flush(self, immediate: int) -> None:
        for transfer_id, (mine, _) in self._writes.items():
            if mine == immediate:
                self._on_loop(self._poster.stop, transfer_id, "given up")

    def fence(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
        # The engine may still write: only Unmapped, or its exit, ends these generations at the destination.
        self._completions.extend(Completion(write.context, 0, self._broken) for _, write in self._writes.values())
        self._writes.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fence("closed")
            self._on_loop(self._poster.release, self._link_id, self._broken)

    async def released(self) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            await self._poster.released(self._link_id, RELEASE_S)
            if not self._poster.holds(self._link_id):
                with contextlib.suppress(OSError):
                    self._sock.send(RECORD.pack(0, KIND_UNMAPPED, 0), socket.MSG_NOSIGNAL)
        finally:
            self._sock.close()
            os.close(self._wake)

    @property
    def busy(self) -> bool:
        return bool(self._completions)

    @property
    def broken(self) -> str:
        return self._broken

    def wait_fds(self) -> list[tuple[int, int]]:
        return [] if self._broken else [(self._sock.fileno(), select.POLLIN), (self._wake, select.POLLIN)]

    def _end_of(self, transfer_id: int) -> _End:
        return _End(self, transfer_id)

    def ended(self, transfer_id: int, nbytes: int, reason: str) -> None:
        """On the loop: the engine has ended a transfer."""
        if self._closed:
            # Later than anybody waited for it: the fence has ended it here.
            return
        self._ended.append((transfer_id, nbytes, reason))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _on_loop(self, function: object, *args: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]

    def _look(self) -> None:
        if self._broken:
            return
        try:
            data = self._sock.recv(1)
            self.fence("the destination's sidecar sent what nobody asked for" if data else "the destination is gone")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.fence(f"the destination is gone: {error.strerror}")


class _End:
    """Tells an outbound of a transfer's end, without keeping it alive by a closure over more."""

    def __init__(self, outbound: NvlinkOutbound, transfer_id: int) -> None:
        self._outbound = outbound
        self._transfer_id = transfer_id

    def __call__(self, nbytes: int, reason: str) -> None:
        self._outbound.ended(self._transfer_id, nbytes, reason)


class NvlinkInbound(ShmInbound):
    """The destination's end: counts come from the counters, the last word from the socket."""

    def __init__(self, sock: socket.socket, pidfd: int, expected: Expected, watch: CounterWatch) -> None:
        super().__init__(sock, pidfd, expected)
        self._watch = watch
        self._told = False
        self.counters = LinkCounters(expected.source_ranks, self._changed)
        self._counting = True

    def _changed(self) -> None:
        """On the watch's thread, which looks far more often than a busy loop turns: one call waits there at most."""
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell_ready)

    def _tell_ready(self) -> None:
        self._told = False
        self._expected.on_ready()

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        if self._counting:
            self._watch.grant(self.counters, immediate)

    def revoke(self, immediate: int) -> None:
        if self._counting:
            self._watch.revoke(self.counters, immediate)

    def poll(self) -> list[Arrival]:
        # A count on the socket is nothing that is spoken here.
        super().poll()
        return self.counters.read() if self._counting else []

    async def fence(self) -> None:
        await super().fence()
        self._expected.on_ready()
        self._stop_counting()

    def abandon(self) -> None:
        super().abandon()
        self._stop_counting()

    def _stop_counting(self) -> None:
        if self._counting:
            self._counting = False
            self._watch.remove(self.counters)


class NvlinkTransport(ShmTransport):
    """Listens on a Unix socket of its own for other sidecars of this host."""

    name = "nvlink"

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self._watch = CounterWatch()
        self._addresses: dict[int, str] = {}

    @property
    def _poster(self) -> EnginePoster | None:
        poster = self.memory.poster if self.memory is not None else None
        return poster if poster is not None and self.name in poster.transports else None

    def fits(self, memory: EngineMemory) -> tuple[bool, str]:
        if len(memory.regions) >= MAX_PASSED_FDS:
            return False, f"passes at most {MAX_PASSED_FDS - 1} regions, the engine has {len(memory.regions)}"
        return True, "descriptors of any memory"

    def offer(self) -> pb.TransportOffer:
        kind = memory_kind(self.memory) if self.memory is not None and self._poster is not None else ""
        return pb.TransportOffer(name=self.name, host_id=self._host_id, memory=kind)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        if not offer.host_id or offer.host_id != self._host_id:
            return False, "another host"
        if not offer.memory:
            return False, "the writer's engine does not write by itself"
        mine = memory_kind(self.memory) if self.memory is not None else ""
        if offer.memory != mine:
            return False, f"{offer.memory} memory there, {mine or 'none'} here"
        return True, f"same host (boot id), {mine} memory at both ends"

    def holds(self, link_id: int) -> bool:
        poster = self._poster
        return poster is not None and poster.holds(link_id)

    def reached(self, link_id: int, address: str) -> None:
        self._addresses[link_id] = address

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        address = self._addresses.pop(reply.link_id, "")
        poster = self._poster
        if poster is None:
            raise FailedPrecondition("no engine that writes by itself is registered")
        # The engine's: it is the engine that will have the memory.
        pidfd = poster.pidfd_copy()
        try:
            sock = await open_unix(reply.endpoint, timeout_s)
            hello = pb.DataHello(token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
            answer, fds = await self.greet(sock, hello, [pidfd], len(reply.regions) + 1, timeout_s)
        finally:
            os.close(pidfd)
        try:
            if len(fds) != len(reply.regions) + 1 or [r.key for r in answer.regions] != [r.key for r in reply.regions]:
                raise InvalidArgument("the destination sent other regions than it announced")
            memory = pb.PeerMemory(
                link_id=reply.link_id,
                engine_id=reply.engine_id,
                incarnation=reply.incarnation,
                control_address=address,
                layout=reply.layout,
                regions=reply.regions,
                counter_bytes=answer.counter_bytes,
            )
            await poster.map(memory, fds, timeout_s)
            try:
                return NvlinkOutbound(sock, reply.link_id, poster)
            except BaseException:
                poster.give_up(reply.link_id, "the link could not be made")
                raise
        except BaseException:
            sock.close()
            raise
        finally:
            close_fds(fds)

    def inbound(self, sock: socket.socket, pidfd: int, expected: Expected) -> ShmInbound:
        return NvlinkInbound(sock, pidfd, expected, self._watch)

    def passed(self, inbound: ShmInbound, memory: EngineMemory) -> tuple[pb.DataHelloReply, list[int]]:
        assert isinstance(inbound, NvlinkInbound)
        counters = inbound.counters.region
        reply, fds = super().passed(inbound, memory)
        reply.counter_bytes = counters.nbytes
        return reply, [*fds, counters.fd]

    async def close(self) -> None:
        await super().close()
        self._watch.stop()
