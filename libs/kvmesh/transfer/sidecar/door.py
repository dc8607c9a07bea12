"""The door for engines: a Unix socket that lets one in at a time, whose life is its connections, one per rank.

The next engine is let in only once the last one's session has been torn down: its peers fenced, its memory let go of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kvmesh.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.fds import close_fds
from kvmesh.kv.pidfd import Life, check_pidfd, open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks
from kvmesh.transfer.folder import publish
from kvmesh.transfer.sends import SendTable
from kvmesh.transfer.sidecar.engine import EngineSession, SessionHost
from kvmesh.transfer.sidecar.ranks import (
    EngineName,
    EngineShape,
    Lobby,
    Seat,
    adopt_rank,
    adopt_regions,
    check_names,
    check_regions,
    count_fds,
)
from kvmesh.transfer.transports.base import EngineMemory
from kvmesh.transfer.transports.posted import EnginePoster
from kvmesh.transfer.transports.shm import prefault
from kvmesh.transfer.transports.sockets.listener import Listener, listen_unix
from kvmesh.transfer.watcher import Patience, RingWatcher
from kvmesh.transfer.wire import MAX_HELLO_BYTES, FrameSocket

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
# Connections that have not said anything yet.
MAX_PENDING_HELLOS = 128
FIXED_FDS = 4
MAX_REGIONS = 64
MAX_ORPHANS = 4096
# An end of file that is in this very turn of the loop has been seen by then.
GRACE_S = 0.05


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


class Visitor:
    """One connection at the door. hello: its first message, with the descriptors that belong to it. closed: why it is
    over, never an exception. on_message gets what comes after the hello; without it that is refused."""

    def __init__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[tuple[pb.EngineMessage, list[int]]] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self.on_message: Callable[[bytes], None] | None = None
        self._pidfd = -1
        self.frames = FrameSocket(
            sock,
            on_frame=self._on_frame,
            on_closed=self._on_closed,
            max_frame=MAX_HELLO_BYTES,
            max_fds=FIXED_FDS + 2 * MAX_REGIONS,
        )

    def watch(self, pidfd: int) -> None:
        """Its process's exit ends it too: a child that inherited the socket would keep the end of file from us. Takes
        the pidfd over."""
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self.leave, "its process has exited")

    def pidfd_copy(self) -> int:
        """Of its process, the caller's to close. Raises Unavailable where it has gone."""
        if self._pidfd < 0:
            raise Unavailable("the engine has gone before it was registered")
        return os.dup(self._pidfd)

    def leave(self, why: str) -> None:
        """Close. Idempotent."""
        self.frames.close()
        self._over(why)

    def refuse(self, call_id: int, error: KvmeshError) -> None:
        """Say why not, and close."""
        refused = pb.Refused(reason=error.reason, message=error.message[:1000])
        self.frames.send(pb.SidecarMessage(call_id=call_id, refused=refused))
        self.leave("refused")

    def _on_frame(self, body: bytes) -> None:
        if self.on_message is not None:
            self.on_message(body)
            return
        if self.hello.done():
            raise InvalidArgument("more than a hello before its answer")
        message = pb.EngineMessage.FromString(body)
        kind = message.WhichOneof("body")
        if kind == "hello":
            regions, fixed = message.hello.regions, FIXED_FDS
        elif kind == "rank_hello":
            regions, fixed = message.rank_hello.regions, 1 + bool(message.rank_hello.doorbell_bytes)
        else:
            raise InvalidArgument("the first message of an engine is its hello")
        if len(regions) > MAX_REGIONS:
            raise InvalidArgument(f"hello: more than {MAX_REGIONS} regions")
        self.hello.set_result((message, self.frames.take_fds(fixed + count_fds(regions))))

    def _on_closed(self, error: KvmeshError | None) -> None:
        if not self.hello.done():
            self.hello.set_exception(error or Unavailable("closed before its hello"))
        if self.closed.done():
            return
        self._over(error.message if error is not None else "end of file")
        if self.on_message is not None:
            # Registered: there is nothing left to be said.
            self.frames.close()

    def _over(self, why: str) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.closed.done():
            self.closed.set_result(why)


class EngineServer:
    """Accepts engines, one life after the other, each with all of its ranks."""

    def __init__(self, sidecar: DoorHost) -> None:
        self._sidecar = sidecar
        self._listener: Listener | None = None
        self._pending = 0
        self._tasks = BackgroundTasks()
        self._turn = asyncio.Lock()
        self._lobby = Lobby(self)

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition (taken), OSError."""
        options = self._sidecar.options
        listen = partial(listen_unix, group=options.engine_group)
        where = options.engine_socket
        self._listener = Listener(publish(listen, where) if options.in_folder else listen(where), self._accept)

    def present(self) -> EngineName | None:
        """The engine that is registered and not ending."""
        session = self._sidecar.session
        if session is None or session.ending:
            return None
        return EngineName(session.memory.engine_id, session.memory.incarnation)

    def _accept(self, sock: socket.socket) -> None:
        if self._pending >= MAX_PENDING_HELLOS:
            sock.close()
            return
        self._pending += 1
        self._tasks.spawn(self._serve(sock), name="engine", essential=False)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, from its hello to the end of its session."""
        visitor = Visitor(sock)
        fds: list[int] = []
        call_id = 0
        try:
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    message, fds = await visitor.hello
            finally:
                self._pending -= 1
            call_id = message.call_id
            if message.WhichOneof("body") == "rank_hello":
                await self._rank(visitor, message, fds)
            else:
                await self._engine(visitor, message, fds)
        except (KvmeshError, TimeoutError) as error:
            late = DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:g} s")
            refusal = error if isinstance(error, KvmeshError) else late
            log.warning("an engine was refused: %s", refusal.message)
            visitor.refuse(call_id, refusal)
        finally:
            visitor.leave("the sidecar stops")
            close_fds(fds)

    async def _engine(self, visitor: Visitor, message: pb.EngineMessage, fds: list[int]) -> None:
        """A leader. Raises KvmeshError where it is not let in."""
        session: EngineSession | None = None
        async with self._entering():
            session, seats = await self._register(visitor, message, fds)
        why = "the sidecar stops"
        try:
            await asyncio.wait({visitor.closed})
            why = visitor.closed.result()
        finally:
            self._sidecar.engine_ending(session)
            if visitor.closed.done():
                # At once, so that every rank knows; they may be at the door again before all is torn down.
                _send_off(seats)
            await session.end(why)
            self._sidecar.engine_gone(session)
            _send_off(seats)

    async def _rank(self, visitor: Visitor, message: pb.EngineMessage, fds: list[int]) -> None:
        """A rank that is not the leader. Raises KvmeshError where it is not let in."""
        if self._sidecar.draining:
            raise Unavailable("this sidecar is shutting down")
        seat = adopt_rank(message.rank_hello, fds, visitor.closed, visitor.leave)
        try:
            visitor.watch(fds.pop(0))
            if self.present() is not None:
                # The last life's end of file may be in this very turn of the loop.
                await asyncio.sleep(GRACE_S)
            self._lobby.enter(seat)
            timeout_s = self._sidecar.options.rank_join_s
            either: set[asyncio.Future[Any]] = {seat.outcome, visitor.closed}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if seat.taken and not visitor.closed.done():
                # It is being registered: that ends by itself.
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if visitor.closed.done():
                raise Unavailable(f"rank {seat.rank} of {seat.name} has left: {visitor.closed.result()}")
            if not seat.outcome.done():
                raise DeadlineExceeded(f"the leader and all ranks of {seat.name} did not come within {timeout_s:g} s")
            keys = seat.outcome.result()
        finally:
            self._lobby.leave(seat)
            if not seat.taken:
                seat.let_go()
        visitor.frames.restrict(max_fds=0)
        visitor.on_message = _nothing_more
        welcome = pb.RankWelcome(
            sidecar_id=self._sidecar.options.sidecar_id, incarnation=self._sidecar.incarnation, region_keys=keys
        )
        visitor.frames.send(pb.SidecarMessage(call_id=message.call_id, rank_hello=welcome))
        await asyncio.wait({visitor.closed})

    @contextlib.asynccontextmanager
    async def _entering(self) -> AsyncIterator[None]:
        """One hello at a time, and only into an empty place."""
        if self._lobby.leader is not None:
            await asyncio.sleep(GRACE_S)
            if self._lobby.leader is not None:
                raise FailedPrecondition(f"{self._lobby.leader} is registering here")
        async with self._turn:
            present = self._sidecar.session
            if present is not None and not present.ending:
                # The last one's end of file may be in this very turn of the loop.
                await asyncio.sleep(GRACE_S)
                present = self._sidecar.session
            if present is not None and not present.ending:
                raise FailedPrecondition(f"engine {present.memory.engine_id!r} is registered here")
            if present is not None:
                try:
                    async with asyncio.timeout(4 * self._sidecar.options.lease_s):
                        await self._sidecar.vacant.wait()
                except TimeoutError:
                    raise DeadlineExceeded(f"engine {present.memory.engine_id!r} is being torn down still") from None
            if self._sidecar.draining:
                raise Unavailable("this sidecar is shutting down")
            yield

    async def _register(
        self, visitor: Visitor, message: pb.EngineMessage, fds: list[int]
    ) -> tuple[EngineSession, list[Seat]]:
        """Check the hello and take it in, with its ranks. What is taken out of `fds` is ours; the rest is closed by the
        caller."""
        hello = message.hello
        name = check_names(hello.protocol, hello.engine_id, hello.incarnation)
        if len(hello.orphan_links) > MAX_ORPHANS:
            raise InvalidArgument(f"hello: more than {MAX_ORPHANS} orphans")
        shape = EngineShape.of(hello.layout, hello.regions)
        here = {0, *(info.rank for info in hello.regions)}
        if not here <= set(range(shape.layout.tp)):
            raise InvalidArgument(f"hello: rank {max(here)} is not one of {shape.layout.tp}")
        check_regions(hello.regions, shape, here)
        check_pidfd(fds[0])
        with self._lobby.registering(name, shape, set(range(shape.layout.tp)) - here):
            return await self._let_in(visitor, message, fds, shape)

    async def _let_in(
        self, visitor: Visitor, message: pb.EngineMessage, fds: list[int], shape: EngineShape
    ) -> tuple[EngineSession, list[Seat]]:
        """A hello that is in order."""
        hello = message.hello
        owner = Life(fds[0])
        opened: list[Region] = []
        seats: list[Seat] = []
        try:
            for kind, nbytes in (("doorbell", hello.doorbell_bytes), ("ring", hello.ring_bytes)):
                opened.append(Region.adopt(fds.pop(1), nbytes, kind))
            doorbell, ring = opened
            adopt_regions(fds, 2, hello.regions, opened)
            eventfd = fds[1]
            os.set_blocking(eventfd, False)
            visitor.watch(fds.pop(0))
            seats = await self._lobby.gather(visitor.closed, self._sidecar.options.rank_join_s)
            regions = [*opened[2:], *(region for seat in seats for region in seat.regions)]
            mapped = all(region.mapped for region in regions)
            if mapped and any(name in self._sidecar.transports for name in ("shm", "fake")):
                await asyncio.to_thread(prefault, regions, write=False)
            doorbells = [doorbell, *(seat.doorbell for seat in seats if seat.doorbell is not None)]
            watcher = RingWatcher(ring, doorbells, eventfd, Patience.named(self._sidecar.options.doorbell))
            # Its own from here on.
            fds.remove(eventfd)
        except BaseException as error:
            owner.close()
            for region in opened:
                region.close()
            _unseat(seats, error)
            raise
        # The mappings live on in the watcher's views; nothing else needs these.
        for region in (*doorbells, ring):
            region.close()
        try:
            memory = EngineMemory(
                hello.engine_id,
                hello.incarnation,
                shape.layout,
                [
                    pb.RegionInfo(
                        group=i.group,
                        rank=i.rank,
                        nbytes=i.nbytes,
                        key=secrets.randbits(63) | 1,
                        memory=i.memory,
                        device=i.device,
                    )
                    for i in (*hello.regions, *(info for seat in seats for info in seat.infos))
                ],
                regions,
                shape.tails,
                owner=owner,
            )
            if hello.posts:
                try:
                    memory.poster = EnginePoster(visitor.frames.send, visitor.pidfd_copy(), hello.posts)
                except BaseException:
                    watcher.close()
                    raise
            session = await self._attach(visitor, memory, watcher)
        except BaseException as error:
            if memory.poster is not None:
                memory.poster.lost()
            owner.close()
            for region in opened[2:]:
                region.close()
            _unseat(seats, error)
            raise
        for seat in seats:
            # Also where it has gone meanwhile.
            seat.closed.add_done_callback(partial(_end_of_rank, visitor, seat.rank))
            if not seat.outcome.done():
                seat.outcome.set_result([info.key for info in memory.infos if info.rank == seat.rank])
        visitor.frames.restrict(max_fds=0)
        visitor.on_message = session.on_frame
        self._sidecar.engine_joined(session)
        self._welcome(visitor, message, memory)
        return session, seats

    async def _attach(self, visitor: Visitor, memory: EngineMemory, watcher: RingWatcher) -> EngineSession:
        """Everything that serves an engine gets to know it. The watcher is closed where that fails."""
        sends = SendTable(memory.layout)
        session = EngineSession(self._sidecar, visitor.frames, memory, sends)
        transports = self._sidecar.transports.values()
        try:
            for transport in transports:
                fits, why = transport.fits(memory)
                transport.unfit = "" if fits else why
                if fits:
                    transport.register(memory)
        except BaseException:
            watcher.close()
            for transport in transports:
                transport.deregister()
            raise
        try:
            await self._sidecar.mover.attach(sends, watcher)
        except BaseException:
            # Behind the attaching, which may be under way still.
            await self._sidecar.mover.detach()
            for transport in transports:
                transport.deregister()
            raise
        return session

    def _welcome(self, visitor: Visitor, message: pb.EngineMessage, memory: EngineMemory) -> None:
        options = self._sidecar.options
        hello = pb.SidecarHello(
            sidecar_id=options.sidecar_id,
            incarnation=self._sidecar.incarnation,
            control_address=self._sidecar.control_address,
            region_keys=[info.key for info in memory.infos[: len(message.hello.regions)]],
            heartbeat_s=options.heartbeat_s,
            lease_s=options.lease_s,
            transports=[name for name, t in self._sidecar.transports.items() if t.ready[0]],
            regions=memory.infos,
            dmabufs=True,
            pidfd=True,
            leaving=True,
        )
        pidfd = open_pidfd()
        try:
            visitor.frames.send(pb.SidecarMessage(call_id=message.call_id, hello=hello), [pidfd])
        finally:
            os.close(pidfd)
        layout = memory.layout
        log.info("engine %s is registered (%d ranks, %d pages)", memory.engine_id, layout.tp, layout.num_pages)

    async def close(self) -> None:
        """Stop listening and end the session."""
        if self._listener is not None:
            self._listener.close()
            self._sidecar.options.engine_socket.unlink(missing_ok=True)
            self._listener = None
        await self._tasks.close(timeout_s=6 * self._sidecar.options.lease_s)


def _nothing_more(_: bytes) -> None:
    raise InvalidArgument("a rank says nothing after its hello")


def _unseat(seats: Sequence[Seat], error: BaseException) -> None:
    """Ranks of an engine that was not let in after all."""
    for seat in seats:
        seat.let_go()
        seat.refuse(error if isinstance(error, KvmeshError) else Unavailable("the engine could not be registered"))


def _send_off(seats: Sequence[Seat]) -> None:
    """Close the connections of an engine's ranks."""
    for seat in seats:
        if not seat.closed.done():
            seat.leave("the engine's life is over")


def _end_of_rank(leader: Visitor, rank: int, closed: asyncio.Future[str]) -> None:
    if not closed.cancelled():
        leader.leave(f"rank {rank}: {closed.result()}")
