"""Ranks of an engine that wait at the door until all of them and their leader have come.

Each rank is a process with memory of its own and passes it over a connection of its own. A rank may come before its
leader, and is held for a limited time; how many are held is limited too. What does not fit is refused by name, alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvmesh.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, KvmeshError, Overloaded, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.pidfd import check_pidfd
from kvmesh.kv.region import DmaBuf, Region
from kvmesh.kv.ring import DOORBELL_BYTES
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import MAX_ID_CHARS, layout_from_proto
from kvmesh.transfer.tail import TailBuffer, region_sizes, tails_from_proto
from kvmesh.transfer.transports.base import HOST_MEMORY
from kvmesh.transfer.wire import PROTOCOL

# Held at a time, over all engines that are on their way; each region is two or three descriptors.
MAX_WAITING_RANKS = 64
MAX_WAITING_REGIONS = 256
MAX_PCI_CHARS = 32
MEMORY_KINDS = frozenset({"", "host", "cuda"})


@dataclass(frozen=True, slots=True)
class EngineName:
    """One life of one engine."""

    engine_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"engine {self.engine_id!r} life {self.incarnation}"


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What leader and ranks must agree in."""

    layout: KvLayout
    tails: tuple[TailBuffer, ...]
    # host or cuda: all regions of an engine are of one kind.
    memory: str

    @classmethod
    def of(cls, message: pb.Layout, infos: Sequence[pb.RegionInfo]) -> EngineShape:
        """Of a hello, checked; its regions by `check_regions`. Raises InvalidArgument."""
        layout = layout_from_proto(message)
        memory = next((info.memory for info in infos if info.memory), HOST_MEMORY)
        return cls(layout, tails_from_proto(message, layout), memory)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each region of one rank, by name."""
        return region_sizes(self.layout, self.tails)


@dataclass(slots=True, eq=False)
class Seat:
    """A rank that has come. Its regions are the lobby's to close until it is taken, then the engine's memory's.

    closed: the reason why its connection is over; leave(why) closes it. outcome: its keys once the engine is
    registered, or why not.
    """

    name: EngineName
    rank: int
    shape: EngineShape
    infos: Sequence[pb.RegionInfo]
    regions: list[Region]
    doorbell: Region | None
    closed: asyncio.Future[str]
    leave: Callable[[str], None]
    outcome: asyncio.Future[list[int]] = field(init=False)
    taken: bool = False

    def __post_init__(self) -> None:
        self.outcome = asyncio.get_running_loop().create_future()

    def refuse(self, error: KvmeshError) -> None:
        """Not let in."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            # Its handler may have left.
            self.outcome.exception()

    def let_go(self) -> None:
        """Unmap."""
        for region in self.regions:
            region.close()
        if self.doorbell is not None:
            self.doorbell.close()


def check_names(protocol: int, engine_id: str, incarnation: int) -> EngineName:
    """Who says hello. Raises FailedPrecondition, InvalidArgument."""
    if protocol != PROTOCOL:
        raise FailedPrecondition(f"engine protocol {protocol} is not spoken here (this is {PROTOCOL})")
    if not 1 <= len(engine_id) <= MAX_ID_CHARS or not incarnation:
        raise InvalidArgument("hello: engine_id and incarnation are required")
    return EngineName(engine_id, incarnation)


def check_regions(infos: Sequence[pb.RegionInfo], shape: EngineShape, ranks: Iterable[int]) -> None:
    """One region per name and rank of these ranks, of the layout's sizes. Raises InvalidArgument."""
    sizes = shape.sizes
    wanted = {(name, rank) for name in sizes for rank in ranks}
    if {(info.group, info.rank) for info in infos} != wanted or len(infos) != len(wanted):
        raise InvalidArgument("hello: regions must be one per group and rank")
    if len({info.memory or "host" for info in infos}) != 1 or not {info.memory for info in infos} <= MEMORY_KINDS:
        raise InvalidArgument("hello: regions must be of one kind of memory, host or cuda")
    for info in infos:
        if (info.dmabuf and info.memory != "cuda") or len(info.pci_address) > MAX_PCI_CHARS:
            raise InvalidArgument(f"hello: region {info.group!r} is told of with a dma-buf or a GPU that cannot be")
        if info.nbytes != sizes[info.group]:
            raise InvalidArgument(
                f"hello: region {info.group!r} has {info.nbytes} bytes, its layout {sizes[info.group]}"
            )


def count_fds(infos: Iterable[pb.RegionInfo]) -> int:
    """Descriptors that come for these regions."""
    return sum(1 + info.dmabuf for info in infos)


def adopt_regions(fds: list[int], at: int, infos: Sequence[pb.RegionInfo], opened: list[Region]) -> None:
    """Regions from `fds[at]` on, then the dma-bufs of those that have one. What is taken over leaves `fds`; regions go
    into `opened`. Raises InvalidArgument."""
    adopted: list[Region] = []
    for info in infos:
        adopted.append(adopt_region(fds.pop(at), info))
        opened.append(adopted[-1])
    for region, info in zip(adopted, infos, strict=True):
        if info.dmabuf:
            region.attach(DmaBuf(fds.pop(at), info.dmabuf_offset, info.pci_address))


def adopt_region(fd: int, info: pb.RegionInfo) -> Region:
    """An engine's region: mapped where it is host memory, kept for passing on where it is a GPU's. Takes the descriptor
    over. Raises InvalidArgument."""
    if info.memory == "cuda":
        return Region.hold(fd, info.nbytes, info.group)
    return Region.adopt(fd, info.nbytes, info.group)


def adopt_rank(hello: pb.RankHello, fds: list[int], closed: asyncio.Future[str], leave: Callable[[str], None]) -> Seat:
    """The seat of a rank, its memory mapped. `fds`: pidfd, doorbell where there is one, regions; all but the pidfd are
    taken out as they are adopted. Raises KvmeshError; nothing stays mapped then."""
    name = check_names(hello.protocol, hello.engine_id, hello.incarnation)
    shape = EngineShape.of(hello.layout, hello.regions)
    if not 1 <= hello.rank < shape.layout.tp:
        raise InvalidArgument(f"hello: rank {hello.rank} is not one of 1..{shape.layout.tp - 1}")
    check_regions(hello.regions, shape, [hello.rank])
    if 0 < hello.doorbell_bytes < DOORBELL_BYTES:
        raise InvalidArgument(f"hello: a doorbell has {DOORBELL_BYTES} bytes at least, not {hello.doorbell_bytes}")
    check_pidfd(fds[0])
    opened: list[Region] = []
    try:
        if hello.doorbell_bytes:
            opened.append(Region.adopt(fds.pop(1), hello.doorbell_bytes, f"doorbell of rank {hello.rank}"))
        adopt_regions(fds, 1, hello.regions, opened)
    except BaseException:
        for region in opened:
            region.close()
        raise
    doorbell = opened.pop(0) if hello.doorbell_bytes else None
    return Seat(name, hello.rank, shape, list(hello.regions), opened, doorbell, closed, leave)


class Present(Protocol):
    """What the lobby must know of the engine that is in."""

    def present(self) -> EngineName | None:
        """The engine that is registered and not ending, None where the place is free."""


@dataclass(slots=True)
class _Leader:
    """A leader that is being registered. ranks: those that it still waits for."""

    name: EngineName
    shape: EngineShape
    ranks: frozenset[int]

    def check(self, seat: Seat) -> None:
        """Raises FailedPrecondition, InvalidArgument where this rank is none of those."""
        if seat.name != self.name:
            raise FailedPrecondition(f"{self.name} registers here, not {seat.name}")
        here, there = self.shape.memory, seat.shape.memory
        if here != there:
            raise InvalidArgument(f"rank {seat.rank} of {seat.name} has {there} memory, its leader {here}")
        if seat.shape != self.shape:
            raise InvalidArgument(f"rank {seat.rank} of {seat.name} has another layout than its leader")
        if seat.rank not in self.ranks:
            raise FailedPrecondition(f"rank {seat.rank} of {seat.name} has joined already")


class Lobby:
    """Ranks that wait. Lives on the loop."""

    def __init__(self, door: Present) -> None:
        self._door = door
        self._waiting: dict[tuple[EngineName, int], Seat] = {}
        self._changed = asyncio.Event()
        # That is being registered now.
        self._leader: _Leader | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def leader(self) -> EngineName | None:
        """That of the engine that is being registered."""
        return self._leader.name if self._leader is not None else None

    def enter(self, seat: Seat) -> None:
        """Hold a rank. Raises FailedPrecondition, InvalidArgument (it belongs to nobody here), Overloaded."""
        present = self._door.present()
        if present is not None:
            if present == seat.name:
                raise FailedPrecondition(f"rank {seat.rank} of {seat.name} has joined already")
            raise FailedPrecondition(f"{present} is registered here, not {seat.name}")
        if self._leader is not None:
            self._leader.check(seat)
        if self._has(seat.name, seat.rank):
            raise FailedPrecondition(f"rank {seat.rank} of {seat.name} waits here already")
        regions = sum(len(other.regions) for other in self._waiting.values()) + len(seat.regions)
        if len(self._waiting) >= MAX_WAITING_RANKS or regions > MAX_WAITING_REGIONS:
            raise Overloaded(f"{len(self._waiting)} ranks wait here already", retry_after=1.0)
        self._waiting[seat.name, seat.rank] = seat
        self._changed.set()

    def leave(self, seat: Seat) -> None:
        """It does not wait any more. Idempotent."""
        if self._waiting.get((seat.name, seat.rank)) is seat:
            del self._waiting[seat.name, seat.rank]

    @contextlib.contextmanager
    def registering(self, name: EngineName, shape: EngineShape, ranks: Iterable[int]) -> Iterator[None]:
        """While a leader is registered: who waits and is none of these ranks is sent away, and so is who comes. One at
        a time."""
        self._leader = _Leader(name, shape, frozenset(ranks))
        try:
            for seat in list(self._waiting.values()):
                try:
                    self._leader.check(seat)
                except KvmeshError as error:
                    self.leave(seat)
                    seat.refuse(error)
            yield
        finally:
            self._leader = None

    async def gather(self, closed: asyncio.Future[str], timeout_s: float) -> list[Seat]:
        """Wait for the ranks of the engine that is being registered, and take them. Raises DeadlineExceeded (naming
        who is missing), Unavailable (the leader has gone)."""
        leader = self._leader
        assert leader is not None
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            missing = [rank for rank in sorted(leader.ranks) if not self._has(leader.name, rank)]
            if not missing:
                break
            changed: asyncio.Future[Any] = asyncio.ensure_future(self._changed.wait())
            try:
                either: set[asyncio.Future[Any]] = {changed, closed}
                left = max(0.0, deadline - time.monotonic())
                await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if closed.done():
                raise Unavailable("the leader has gone before its ranks came")
            if time.monotonic() >= deadline:
                named = ", ".join(map(str, missing[:16]))
                raise DeadlineExceeded(f"rank {named} of {leader.shape.layout.tp} did not join within {timeout_s:g} s")
        seats = [self._waiting.pop((leader.name, rank)) for rank in sorted(leader.ranks)]
        for seat in seats:
            seat.taken = True
        # None is awaited any more.
        leader.ranks = frozenset()
        return seats

    def _has(self, name: EngineName, rank: int) -> bool:
        seat = self._waiting.get((name, rank))
        return seat is not None and not seat.closed.done()
