"""What a way of moving bytes must do: the interface, and nothing about slots, engines or sockets.

A sidecar has one `Transport` per name. Between two sidecars there is one link, of one transport: the writer holds its
`Outbound`, the destination its `Inbound`.

    destination                                     writer
    register(memory)                                register(memory)
    expect(link) -> Endpoint  ── PeerHelloReply ──▶ connect(reply) -> Outbound
    Inbound.grant(immediate, pages)   ◀── bind ──
                                                    post(write) … poll() -> completions
    Inbound.poll() -> arrivals  ◀────── bytes ─────
    Inbound.revoke(immediate)                       flush(immediate)
    Inbound.fence()                                 fence(), close()

What every implementation promises:
1. A posted write completes exactly once in the writer's `poll`, in any order, as done or with an error.
2. A write that completed as done HAS landed. One that completed with an error may have landed in part or in full, and
   nothing of it lands afterwards: a writer with no outstanding writes of a generation may say Drained. On a broken link
   this does not hold (bytes may be on their way still): only the destination's fence ends its generations.
3. Arrivals add up: for every write done, the receiver's `poll` returns its bytes once in total, under its immediate,
   after they landed; in one arrival or several, in any order, possibly long after the generation is over.
4. After `Inbound.fence()` returned, nothing lands through this link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.kv.layout import KvLayout
from kvmesh.kv.pidfd import Life
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.tail import TailBuffer

if TYPE_CHECKING:
    from kvmesh.transfer.transports.posted import EnginePoster

HOST_MEMORY = "host"


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Copies of one generation that complete together. Columns of equal length, bytes.

    context: the poster's own number. src_region, dst_region: index into the writer's and the destination's regions.
    src, dst: offsets in those regions; length: bytes of each run, at least 1; nbytes: their sum.
    """

    context: int
    immediate: int
    src_region: int
    dst_region: int
    src: Sequence[int]
    dst: Sequence[int]
    length: Sequence[int]
    nbytes: int


class Completion(NamedTuple):
    """End of a write at the writer; error "" means done."""

    context: int
    nbytes: int
    error: str = ""


class Arrival(NamedTuple):
    """Bytes that have landed at the receiver, by immediate. Never believed without the slot table."""

    immediate: int
    nbytes: int


@dataclass(slots=True, eq=False)
class EngineMemory:
    """The regions of the engine that is registered, in no promised order: one per (group or tail buffer, rank)."""

    engine_id: str
    incarnation: int
    layout: KvLayout
    infos: Sequence[pb.RegionInfo]
    regions: Sequence[Region]
    tails: tuple[TailBuffer, ...] = ()
    # Where the engine writes by itself (nvlink).
    poster: EnginePoster | None = None
    # Whose memory it is; None where that is not known.
    owner: Life | None = None

    def index(self, group: str, rank: int) -> int:
        """Position of a region; raises KeyError."""
        for position, info in enumerate(self.infos):
            if info.group == group and info.rank == rank:
                return position
        raise KeyError((group, rank))

    def pages(self, position: int) -> tuple[int, int]:
        """(bytes of a page, pages of a layer) of the region at that position; a tail's pages are its rows."""
        name = self.infos[position].group
        for tail in self.tails:
            if tail.name == name:
                return tail.row_bytes, tail.rows
        return self.layout.page_bytes(name), self.layout.num_pages


class Endpoint(NamedTuple):
    """Where a writer connects for data, and the token that opens it once. verbs, efa: what that transport's writer
    needs."""

    address: str
    token: bytes
    verbs: pb.VerbsEndpoint | None = None
    efa: pb.EfaEndpoint | None = None


def memory_kind(memory: EngineMemory) -> str:
    """`host` or `cuda`: what the engine's regions are."""
    return next((info.memory for info in memory.infos if info.memory), HOST_MEMORY)


Ask = Callable[[pb.DataHello], Awaitable[pb.DataHelloReply]]
"""Send a data hello over the control stream of a link and return its answer; bounded in time. Raises KvmeshError."""


class Outbound(ABC):
    """The writer's end of a link. Every method but the constructor is called on the mover's thread only.

    hands_over: a transfer is posted as ONE write of all its bytes, without rows, and the engine does the writing.
    """

    hands_over = False

    def announce(self, immediate: int, transfer_id: int, request: pb.StartTransfer) -> None:  # noqa: B027
        """On the loop: this transfer will be started next. What outbounds that hand over need of it."""

    async def released(self) -> None:  # noqa: B027
        """On the loop, after `close`: wait (bounded) until the peer's memory is let go of by whoever had it."""

    @abstractmethod
    def post(self, write: Write) -> None:
        """Queue a write; never blocks, never fails. On a broken link it completes with an error at the next poll."""

    @abstractmethod
    def poll(self, budget: int) -> list[Completion]:
        """Make progress, moving about `budget` bytes at most, and return what has completed. Never blocks."""

    @abstractmethod
    def flush(self, immediate: int) -> None:
        """Give up the writes of this immediate that have not begun: they complete with an error. Those that have begun
        run to their end. The generation is drained when none is outstanding."""

    @abstractmethod
    def fence(self, reason: str) -> None:
        """Break the link from this side: everything outstanding completes with an error and nothing more is moved."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the peer's memory and tell it, where the transport has a way to. Only after `fence` and the last
        completion. Idempotent."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while `poll` could make progress right now."""

    @property
    @abstractmethod
    def broken(self) -> str:
        """Why the link cannot be used any more, "" while it can."""

    def wait_fds(self) -> list[tuple[int, int]]:
        """(descriptor, poll event mask) on which `poll` should be called again."""
        return []

    def wake_at(self) -> float | None:
        """Monotonic time at which `poll` should be called again, None for no such time (fakes delay things)."""
        return None

    def nics(self) -> list[pb.NicStatus]:
        """The pairs of NICs that it goes through, for status. Any thread."""
        return []


class GrantedPages(NamedTuple):
    """Where writes of a generation may land: page numbers per region index, ascending int64."""

    pages: Mapping[int, npt.NDArray[np.int64]]


class Inbound(ABC):
    """The destination's end of a link. Lives on the asyncio loop."""

    @abstractmethod
    def grant(self, immediate: int, pages: GrantedPages) -> None:
        """Let writes of this immediate in, to these pages. Transports where the writer itself stores cannot check;
        those where we store must refuse everything else."""

    @abstractmethod
    def revoke(self, immediate: int) -> None:
        """The generation is over: what still comes under this immediate is dropped (its arrival may be reported)."""

    @abstractmethod
    def poll(self) -> list[Arrival]:
        """What has landed since the last call. Called after `on_ready`; never blocks."""

    @abstractmethod
    async def fence(self) -> None:
        """Make later writes impossible, and return when they are. For memory that the peer has mapped this waits for
        its Unmapped or its exit, as long as that takes: callers bound their own wait, pages stay exposed meanwhile."""

    @abstractmethod
    def unmapped(self) -> None:
        """The peer said over the control API that it has unmapped our memory (no effect where it never does)."""

    def nics(self) -> list[pb.NicStatus]:
        """The pairs of NICs that it comes through, for status."""
        return []


@dataclass(slots=True, eq=False)
class Expected:
    """A link that a destination waits for.

    on_joined(inbound, pidfd | None) is called before the writer gets access and must have made the fact durable when it
    returns (it is awaited); pidfd is the callee's to close. on_ready: `Inbound.poll` has something. on_end(reason): the
    data connection is gone. All on the loop. offer: what the writer said of this transport.
    """

    link_id: int
    peer: str
    on_joined: Callable[[Inbound, int | None], Awaitable[None]]
    on_ready: Callable[[], None]
    on_end: Callable[[str], None]
    # Ranks of the source's engine, each of which may write.
    source_ranks: int = field(default=1, kw_only=True)
    offer: pb.TransportOffer | None = None


class Transport(ABC):
    """One way of moving bytes, for the life of a sidecar. Lives on the asyncio loop.

    unfit: why it cannot serve the engine that is registered (it has not been registered here then), "" where it can.
    """

    name: str
    unfit = ""

    @abstractmethod
    async def start(self) -> None:
        """Begin to listen. Raises KvmeshError where this machine cannot do it; the transport is then not usable."""

    @property
    @abstractmethod
    def status(self) -> tuple[bool, str]:
        """(usable, why or why not)."""

    @abstractmethod
    def offer(self) -> pb.TransportOffer:
        """What a destination needs to judge whether it can be reached this way."""

    @abstractmethod
    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        """Destination: (can be used with that writer, why or why not)."""

    @property
    def ready(self) -> tuple[bool, str]:
        """`status`, or why not with the memory of the engine that is registered."""
        return (False, self.unfit) if self.unfit else self.status

    def fits(self, memory: EngineMemory) -> tuple[bool, str]:
        """Whether this transport can read and write such memory, and why (not)."""
        kind = memory_kind(memory)
        return kind == HOST_MEMORY, f"does not reach {kind} memory" if kind != HOST_MEMORY else "host memory"

    def reached(self, link_id: int, address: str) -> None:  # noqa: B027
        """Writer, before `connect`: the control address of that link's destination."""

    def holds(self, link_id: int) -> bool:
        """Writer: True while somebody may still have the peer's memory of that link mapped."""
        return False

    @abstractmethod
    def register(self, memory: EngineMemory) -> None:
        """Adopt the engine's regions."""

    @abstractmethod
    def deregister(self) -> None:
        """Forget them. Every link is fenced by then."""

    @abstractmethod
    def expect(self, link: Expected) -> Endpoint:
        """Destination: let one writer in."""

    @abstractmethod
    def forget(self, link_id: int) -> None:
        """Destination: close the door for a writer that has not come in yet. Idempotent."""

    @abstractmethod
    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        """Writer: open the data connection. Raises KvmeshError; another transport may then be tried."""

    async def connect_over(self, ask: Ask, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        """Writer: as `connect`, for transports whose data hello goes over the control stream."""
        return await self.connect(reply, sidecar_id, timeout_s)

    async def join(self, hello: pb.DataHello) -> pb.DataHelloReply:
        """Destination: a data hello that came over the control stream."""
        return pb.DataHelloReply(ok=False, reason=f"{self.name} takes its data hello elsewhere")

    def nics(self) -> list[pb.NicStatus]:
        """This machine's NICs as it sees them, used or not, for status."""
        return []

    @property
    def nodes(self) -> frozenset[int]:
        """NUMA nodes of the NICs (or of what else the threads that serve it should be near to)."""
        return frozenset()

    @property
    def waiting(self) -> str:
        """How it waits for the network and why so, "" where there is no choice. For status."""
        return ""

    def threads(self) -> list[tuple[str, int | None]]:
        """Name and native id of its own threads, which may be pinned."""
        return []

    @abstractmethod
    async def close(self) -> None:
        """Stop listening."""
