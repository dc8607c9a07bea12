"""From a transfer's pages to rows with addresses: the planner's columns, the peer's bases, the counters' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmesh.engine.nvlink.backend import Backend, Batch, Column, GroupRows, PeerMapping
from kvmesh.errors import FailedPrecondition, InvalidArgument
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.planner import plan
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import layout_from_proto
from kvmesh.transfer.immediate import MAX_SLOTS
from kvmesh.transfer.posting import GENERATION_SHIFT, WORD_BYTES


@dataclass(slots=True, eq=False)
class Peer:
    """A destination's memory as a link brought it."""

    message: pb.PeerMemory
    layout: KvLayout
    mapping: PeerMapping
    releasing: str | None = None

    @property
    def link_id(self) -> int:
        return self.message.link_id

    def base(self, group: str, rank: int) -> int:
        """Address of its region. Raises FailedPrecondition where it has none."""
        for info, base in zip(self.message.regions, self.mapping.bases, strict=True):
            if (info.group, info.rank) == (group, rank):
                return base
        raise FailedPrecondition(f"the destination has no region of group {group!r} rank {rank}")


def check_peer(message: pb.PeerMemory, source: KvLayout) -> KvLayout:
    """The peer's layout, where its regions and counters are what the layouts need. Raises InvalidArgument."""
    layout = layout_from_proto(message.layout)
    for info in message.regions:
        if info.group in {group.name for group in layout.groups} and info.nbytes < layout.region_bytes(info.group):
            raise InvalidArgument(f"the destination's region {info.group!r} is smaller than its layout")
    if message.counter_bytes < source.tp * MAX_SLOTS * WORD_BYTES:
        raise InvalidArgument(f"counters of {message.counter_bytes} bytes are too few for {source.tp} ranks")
    return layout


@dataclass(slots=True, eq=False)
class Claim:
    """Pages of a transfer that leave together: rows per group name, and bytes of ONE layer per (group, source rank)."""

    transfer: Transfer
    rows: dict[str, GroupRows]
    nbytes: dict[tuple[str, int], int]


@dataclass(slots=True, eq=False)
class Transfer:
    """One generation of one slot, from PostTransfer to PostEnded.

    posted: bytes launched so far, per source rank: what the counters stand at. mark: behind its last launch.
    """

    transfer_id: int
    peer: Peer
    slot: int
    generation: int
    src_pages: dict[str, list[int]]
    dst_pages: dict[str, list[int]]
    stopped: str | None = None
    planned: int = 0
    posted: dict[int, int] = field(default_factory=dict)
    mark: object = None
    # The step whose layers are leaving now, and pages that wait for its end: the counter only grows.
    step: object = None
    deferred: list[tuple[int, int]] = field(default_factory=list)
    # Of a sidecar that is gone: nobody is told of its end.
    orphan: bool = False
    claimed: bytearray = field(default_factory=bytearray)

    @property
    def total(self) -> int:
        """Bytes launched."""
        return sum(self.posted.values())

    @property
    def complete(self) -> bool:
        """Every page is claimed and every claim launched in all its layers."""
        return all(self.claimed) and self.total == self.planned

    def counter(self, rank: int) -> int:
        """Address of the word that counts for a source rank."""
        return self.peer.mapping.counters + (rank * MAX_SLOTS + self.slot) * WORD_BYTES

    def word(self, nbytes: int) -> int:
        """What the counter says after that many bytes; as int64."""
        word = self.generation << GENERATION_SHIFT | nbytes
        return word - (1 << 64) if word >> 63 else word


def transfer_of(post: pb.PostTransfer, peer: Peer, layout: KvLayout) -> Transfer:
    """What a PostTransfer asks for. The sidecar has checked it; what this poster cannot do is refused by name
    (FailedPrecondition, InvalidArgument)."""
    request, descriptor = post.request, post.request.descriptor
    if request.tails or descriptor.tails:
        raise FailedPrecondition("tail buffers do not go by nvlink yet")
    if any(entry.kept for entry in request.pages):
        raise FailedPrecondition("lists of kept pages do not go by nvlink yet")
    if layout.page_size != peer.layout.page_size:
        raise FailedPrecondition("pages of unequal size do not go by nvlink yet")
    src = {entry.group: list(entry.pages) for entry in request.pages}
    dst = {entry.group: list(entry.pages) for entry in descriptor.groups}
    names = {group.name for group in layout.groups}
    counts = {len(pages) for pages in (*src.values(), *dst.values())}
    if set(src) != names or set(dst) != names or len(counts) != 1:
        raise InvalidArgument("a transfer needs page lists of one length for every group")
    transfer = Transfer(post.transfer_id, peer, descriptor.slot, descriptor.generation, src, dst)
    transfer.claimed = bytearray(counts.pop())
    return transfer


def claim(transfer: Transfer, layout: KvLayout, backend: Backend, first: int, count: int) -> Claim:
    """Take pages [first, first + count) of the transfer's lists, once. Raises InvalidArgument."""
    if first < 0 or count < 1 or first + count > len(transfer.claimed):
        raise InvalidArgument(f"pages [{first}, +{count}) of a list of {len(transfer.claimed)}")
    if any(transfer.claimed[first : first + count]):
        raise InvalidArgument(f"a page of [{first}, +{count}) was named before")
    peer = transfer.peer
    rows: dict[str, GroupRows] = {}
    nbytes: dict[tuple[str, int], int] = {}
    for group in layout.groups:
        columns = plan(
            layout,
            peer.layout,
            transfer.src_pages[group.name][first : first + count],
            transfer.dst_pages[group.name][first : first + count],
            group=group,
            replica_draw=transfer.slot + transfer.generation,
            max_message=backend.max_row,
        )
        src, dst = columns.src_offset.copy(), columns.dst_offset.copy()
        for src_rank, dst_rank, chosen in columns.pairs():
            src[chosen] += backend.base(group.name, src_rank)
            dst[chosen] += peer.base(group.name, dst_rank)
            key = (group.name, src_rank)
            nbytes[key] = nbytes.get(key, 0) + int(columns.length[chosen].sum())
        stride = np.full(len(src), peer.layout.layer_stride(group), dtype=np.int64)
        rows[group.name] = GroupRows(src, dst, columns.length, stride, layout.layer_stride(group))
    transfer.claimed[first : first + count] = b"\1" * count
    transfer.planned += sum(n * layout.group(name).num_layers for (name, _), n in nbytes.items())
    return Claim(transfer, rows, nbytes)


def batch_of(
    claims: Sequence[Claim], layout: KvLayout, launches: Sequence[tuple[str, int]], posted: Sequence[Mapping[int, int]]
) -> Batch:
    """One batch of several claims. launches: (group, layers) of each launch, in order; posted: per claim, what its
    transfer's counters stand at before the first."""
    groups: list[GroupRows | None] = []
    for group in layout.groups:
        parts = [item.rows[group.name] for item in claims]
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "length")]
        stride = np.concatenate([part.dst_stride for part in parts])
        groups.append(GroupRows(columns[0], columns[1], columns[2], stride, layout.layer_stride(group)))
    counters: list[int] = []
    words: list[list[int]] = [[] for _ in launches]
    for item, before in zip(claims, posted, strict=True):
        for rank in sorted({rank for _, rank in item.nbytes}):
            counters.append(item.transfer.counter(rank))
            value = before.get(rank, 0)
            for row, (name, layers) in zip(words, launches, strict=True):
                value += layers * item.nbytes.get((name, rank), 0)
                row.append(item.transfer.word(value))
    values: Column = np.asarray(words, dtype=np.int64).reshape(len(launches), len(counters))
    return Batch(groups, np.asarray(counters, dtype=np.int64), values)
