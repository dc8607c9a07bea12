"""The door for engines: a Unix socket that lets one in at a time, whose life is the connection.

The next engine is let in only once the last one's session has been torn down: its peers fenced, its memory let go of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Protocol

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.fds import close_fds
from kvmesh.kv.pidfd import check_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks
from kvmesh.transfer.descriptor import MAX_ID_CHARS, layout_from_proto
from kvmesh.transfer.sends import SendTable
from kvmesh.transfer.sidecar.engine import EngineSession, SessionHost
from kvmesh.transfer.transports.base import EngineMemory
from kvmesh.transfer.transports.shm import listen_unix, prefault
from kvmesh.transfer.watcher import RingWatcher
from kvmesh.transfer.wire import MAX_HELLO_BYTES, PROTOCOL, FrameSocket

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
FIXED_FDS = 4
MAX_REGIONS = 64
MAX_ORPHANS = 4096


class DoorHost(SessionHost, Protocol):
    """The sidecar, as its door sees it."""

    control_address: str
    vacant: asyncio.Event

    def engine_joined(self, session: EngineSession) -> None:
        """An engine has registered."""

    def engine_ending(self, session: EngineSession) -> None:
        """Its connection is over; nothing new is taken in for it."""

    def engine_gone(self, session: EngineSession) -> None:
        """Everything of it is let go of: the next may come."""


class EngineServer:
    """Accepts engines, one life after the other."""

    def __init__(self, sidecar: DoorHost) -> None:
        self._sidecar = sidecar
        self._server: socket.socket | None = None
        self._tasks = BackgroundTasks()
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition (taken), OSError."""
        self._server = listen_unix(self._sidecar.options.engine_socket)
        asyncio.get_running_loop().add_reader(self._server.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            self._tasks.spawn(self._serve(sock), name="engine", essential=False)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, from its hello to the end of its session."""
        hello: asyncio.Future[tuple[pb.EngineMessage, list[int]]] = asyncio.get_running_loop().create_future()
        closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        session: EngineSession | None = None

        def on_frame(body: bytes) -> None:
            if session is not None:
                session.on_frame(body)
                return
            if hello.done():
                raise InvalidArgument("more than a hello before its answer")
            message = pb.EngineMessage.FromString(body)
            if message.WhichOneof("body") != "hello":
                raise InvalidArgument("the first message of an engine is its hello")
            if len(message.hello.regions) > MAX_REGIONS:
                raise InvalidArgument(f"hello: more than {MAX_REGIONS} regions")
            hello.set_result((message, frames.take_fds(FIXED_FDS + len(message.hello.regions))))

        def on_closed(error: KvmeshError | None) -> None:
            if not hello.done():
                hello.set_exception(error or Unavailable("closed before its hello"))
            if session is not None:
                frames.close()
            if not closed.done():
                closed.set_result(error.message if error is not None else "end of file")

        def on_exit() -> None:
            frames.close()
            asyncio.get_running_loop().remove_reader(pidfd)
            if not closed.done():
                closed.set_result("its process has exited")

        frames = FrameSocket(
            sock, on_frame=on_frame, on_closed=on_closed, max_frame=MAX_HELLO_BYTES, max_fds=FIXED_FDS + MAX_REGIONS
        )
        fds: list[int] = []
        call_id = 0
        pidfd = -1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message, fds = await hello
            call_id = message.call_id
            async with self._entering():
                session = await self._register(frames, message, fds)
            # A child that inherited the engine's socket would keep its end of file from us.
            pidfd = fds.pop(0)
            asyncio.get_running_loop().add_reader(pidfd, on_exit)
        except (KvmeshError, TimeoutError) as error:
            text = error.message if isinstance(error, KvmeshError) else f"no hello within {HELLO_TIMEOUT_S:g} s"
            reason = error.reason if isinstance(error, KvmeshError) else "DEADLINE_EXCEEDED"
            log.warning("an engine was refused: %s", text)
            frames.send(pb.SidecarMessage(call_id=call_id, refused=pb.Refused(reason=reason, message=text[:1000])))
            frames.close()
            return
        except BaseException:
            frames.close()
            raise
        finally:
            close_fds(fds)
        why = "the sidecar stops"
        try:
            why = await closed
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
            self._sidecar.engine_ending(session)
            await session.end(why)
            self._sidecar.engine_gone(session)

    @contextlib.asynccontextmanager
    async def _entering(self) -> AsyncIterator[None]:
        """One hello at a time, and only into an empty place."""
        async with self._turn:
            present = self._sidecar.session
            if present is not None and not present.ending:
                # The last one's end of file may be in this very turn of the loop.
                await asyncio.sleep(0.05)
                present = self._sidecar.session
            if present is not None and not present.ending:
                raise FailedPrecondition(f"engine {present.memory.engine_id!r} is registered here")
            if present is not None:
                async with asyncio.timeout(4 * self._sidecar.options.lease_s):
                    await self._sidecar.vacant.wait()
            if self._sidecar.draining:
                raise Unavailable("this sidecar is shutting down")
            yield

    async def _register(self, frames: FrameSocket, message: pb.EngineMessage, fds: list[int]) -> EngineSession:
        """Take the hello in. What is taken out of `fds` is ours; the rest is closed by the caller."""
        hello = message.hello
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"engine protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        if not 1 <= len(hello.engine_id) <= MAX_ID_CHARS or not hello.incarnation:
            raise InvalidArgument("hello: engine_id and incarnation are required")
        if len(hello.orphan_links) > MAX_ORPHANS:
            raise InvalidArgument(f"hello: more than {MAX_ORPHANS} orphans")
        layout = layout_from_proto(hello.layout)
        wanted = {(group.name, rank) for group in layout.groups for rank in range(layout.tp)}
        if {(r.group, r.rank) for r in hello.regions} != wanted or len(hello.regions) != len(wanted):
            raise InvalidArgument("hello: regions must be one per group and rank")
        for info in hello.regions:
            if info.nbytes != layout.region_bytes(info.group):
                need = layout.region_bytes(info.group)
                raise InvalidArgument(f"hello: region {info.group!r} has {info.nbytes} bytes, its layout {need}")
        check_pidfd(fds[0])
        opened: list[Region] = []
        try:
            doorbell = Region.adopt(fds.pop(1), hello.doorbell_bytes, "doorbell")
            opened.append(doorbell)
            ring = Region.adopt(fds.pop(1), hello.ring_bytes, "ring")
            opened.append(ring)
            regions = []
            for info in hello.regions:
                regions.append(Region.adopt(fds.pop(2), info.nbytes, info.group))
                opened.append(regions[-1])
            os.set_blocking(fds[1], False)
            watcher = RingWatcher(ring, doorbell, fds[1])
            # Its own from here on.
            fds.pop(1)
        except BaseException:
            for region in opened:
                region.close()
            raise
        # The mappings live on in the watcher's views; nothing else needs these two.
        doorbell.close()
        ring.close()
        infos = [
            pb.RegionInfo(group=i.group, rank=i.rank, nbytes=i.nbytes, key=secrets.randbits(63) | 1)
            for i in hello.regions
        ]
        memory = EngineMemory(hello.engine_id, hello.incarnation, layout, infos, regions)
        if any(name in self._sidecar.transports for name in ("shm", "fake")):
            await asyncio.to_thread(prefault, regions, write=False)
        sends = SendTable(layout)
        session = EngineSession(self._sidecar, frames, memory, sends)
        for transport in self._sidecar.transports.values():
            transport.register(memory)
        await self._sidecar.mover.attach(sends, watcher)
        frames.restrict(max_fds=0)
        self._sidecar.engine_joined(session)
        options = self._sidecar.options
        frames.send(
            pb.SidecarMessage(
                call_id=message.call_id,
                hello=pb.SidecarHello(
                    sidecar_id=options.sidecar_id,
                    incarnation=self._sidecar.incarnation,
                    control_address=self._sidecar.control_address,
                    region_keys=[info.key for info in infos],
                    heartbeat_s=options.heartbeat_s,
                    lease_s=options.lease_s,
                    transports=[name for name, t in self._sidecar.transports.items() if t.status[0]],
                ),
            )
        )
        log.info("engine %s is registered (%d pages)", hello.engine_id, layout.num_pages)
        return session

    async def close(self) -> None:
        """Stop listening and end the session."""
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.close()
            self._sidecar.options.engine_socket.unlink(missing_ok=True)
            self._server = None
        await self._tasks.close(timeout_s=6 * self._sidecar.options.lease_s)
