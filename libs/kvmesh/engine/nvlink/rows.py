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
from kvmesh.transfer.sends import check_lists
from kvmesh.transfer.tail import TailBuffer, region_sizes, rows_from_proto, tail_feeds, tails_from_proto


@dataclass(slots=True, eq=False)
class Peer:
    """A destination's memory as a link brought it."""

    message: pb.PeerMemory
    layout: KvLayout
    tails: tuple[TailBuffer, ...]
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


def check_peer(message: pb.PeerMemory, source: KvLayout) -> tuple[KvLayout, tuple[TailBuffer, ...]]:
    """The peer's layout and tail buffers, where its regions and counters are what they need. Raises InvalidArgument."""
    layout = layout_from_proto(message.layout)
    tails = tails_from_proto(message.layout, layout)
    sizes = region_sizes(layout, tails)
    for info in message.regions:
        if info.nbytes < sizes.get(info.group, 0):
            raise InvalidArgument(f"the destination's region {info.group!r} is smaller than its layout")
    if message.counter_bytes != (need := source.tp * MAX_SLOTS * WORD_BYTES):
        # Not more either: all of it is pinned.
        raise InvalidArgument(f"counters of {message.counter_bytes} bytes, {source.tp} ranks have {need}")
    return layout, tails


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
    # Tokens [first_token, end_token) of the sequence; kept: groups of which only these positions are sent, compacted,
    # with the last claim; tails: (source's row, destination's row, bytes).
    first_token: int
    end_token: int
    kept: dict[str, list[int]]
    tails: dict[str, tuple[int, int, int]]
    stopped: str | None = None
    planned: int = 0
    posted: dict[int, int] = field(default_factory=dict)
    mark: object = None
    # The step whose layers are leaving now; steps that are not through; what waits for their end, since the counter
    # only grows: pages, or None for the tail.
    step: object = None
    open_steps: int = 0
    deferred: list[tuple[int, int] | None] = field(default_factory=list)
    tail_claimed: bool = False
    # Of a sidecar that is gone: nobody is told of its end.
    orphan: bool = False
    claimed: bytearray = field(default_factory=bytearray)

    @property
    def total(self) -> int:
        """Bytes launched."""
        return sum(self.posted.values())

    @property
    def complete(self) -> bool:
        """Every page and the tail are claimed, and every claim launched in all its layers."""
        return all(self.claimed) and self.total == self.planned and (self.tail_claimed or not self.tails)

    @property
    def draw(self) -> int:
        """Chooses among source replicas, as the sidecars' own transports do."""
        return self.slot + self.generation

    def counter(self, rank: int) -> int:
        """Address of the word that counts for a source rank."""
        return self.peer.mapping.counters + (rank * MAX_SLOTS + self.slot) * WORD_BYTES

    def word(self, nbytes: int) -> int:
        """What the counter says after that many bytes; as int64."""
        word = self.generation << GENERATION_SHIFT | nbytes
        return word - (1 << 64) if word >> 63 else word


def transfer_of(post: pb.PostTransfer, peer: Peer, layout: KvLayout, tails: Sequence[TailBuffer]) -> Transfer:
    """What a PostTransfer asks for. tails: those of the source. Raises InvalidArgument (the sidecar has checked it)."""
    request, descriptor = post.request, post.request.descriptor
    src = {entry.group: list(entry.pages) for entry in request.pages}
    dst = {entry.group: list(entry.pages) for entry in descriptor.groups}
    kept = {entry.group: list(entry.kept) for entry in request.pages if entry.kept}
    if set(src) != {group.name for group in layout.groups}:
        raise InvalidArgument(f"page lists are of groups {sorted(src)}")
    first = descriptor.first_block * peer.layout.page_size
    end, count = check_lists(layout, peer.layout, src, dst, first, descriptor.num_tokens or None, kept)
    here, there = rows_from_proto(request.tails, tails), rows_from_proto(descriptor.tails, peer.tails)
    sizes = {tail.name: tail.row_bytes for tail in tails}
    if here.keys() != there.keys() or any(t.row_bytes != sizes[t.name] for t in peer.tails if t.name in here):
        raise InvalidArgument(f"tails {sorted(here)} for {sorted(there)}, or of another size")
    rows = {name: (row, there[name], sizes[name]) for name, row in here.items()}
    transfer = Transfer(
        post.transfer_id, peer, descriptor.slot, descriptor.generation, src, dst, first, end, kept, rows
    )
    transfer.claimed = bytearray(count)
    return transfer


def claim(transfer: Transfer, layout: KvLayout, backend: Backend, first: int, count: int) -> Claim:
    """Take pages [first, first + count) of the source's lists, once. Raises InvalidArgument."""
    if first < 0 or count < 1 or first + count > len(transfer.claimed):
        raise InvalidArgument(f"pages [{first}, +{count}) of a list of {len(transfer.claimed)}")
    if any(transfer.claimed[first : first + count]):
        raise InvalidArgument(f"a page of [{first}, +{count}) was named before")
    transfer.claimed[first : first + count] = b"\1" * count
    taken = Claim(transfer, {}, {})
    for group in layout.groups:
        if group.name not in transfer.kept:
            _plan(taken, layout, backend, group.name, first, count)
        elif all(transfer.claimed):
            _plan(taken, layout, backend, group.name, 0, len(transfer.claimed))
    transfer.planned += sum(n * layout.group(name).num_layers for (name, _), n in taken.nbytes.items())
    return taken


def _plan(taken: Claim, layout: KvLayout, backend: Backend, name: str, first: int, count: int) -> None:
    """Rows of one group for source pages [first, first + count)."""
    transfer, peer = taken.transfer, taken.transfer.peer
    here, there = layout.page_size, peer.layout.page_size
    kept = transfer.kept.get(name)
    # Tokens of the claim, and the pages at the destination that they fall into.
    start = (transfer.first_token // here + first) * here
    begin, end = max(start, transfer.first_token), min(start + count * here, transfer.end_token)
    if kept is not None:
        end = begin + len(kept) * here
    at = (begin - transfer.first_token) // there
    columns = plan(
        layout,
        peer.layout,
        transfer.src_pages[name][first : first + count],
        transfer.dst_pages[name][at : -(-(end - transfer.first_token) // there)],
        group=name,
        first_token=begin,
        num_tokens=end - begin,
        src_start=start,
        dst_start=transfer.first_token + at * there,
        kept_pages=kept,
        replica_draw=transfer.draw,
        max_message=backend.max_row,
    )
    src, dst = columns.src_offset.copy(), columns.dst_offset.copy()
    for src_rank, dst_rank, chosen in columns.pairs():
        src[chosen] += backend.base(name, src_rank)
        dst[chosen] += peer.base(name, dst_rank)
        key = (name, src_rank)
        taken.nbytes[key] = taken.nbytes.get(key, 0) + int(columns.length[chosen].sum())
    stride = np.full(len(src), peer.layout.layer_stride(name), dtype=np.int64)
    taken.rows[name] = GroupRows(src, dst, columns.length, stride, layout.layer_stride(name))


def tail_batch(transfer: Transfer, layout: KvLayout, backend: Backend) -> tuple[Batch, dict[int, int]]:
    """All tail rows of a transfer as one launch, and the bytes of each source rank."""
    src: list[int] = []
    dst: list[int] = []
    length: list[int] = []
    nbytes: dict[int, int] = {}
    for name, (here, there, size) in transfer.tails.items():
        for src_rank, dst_rank in tail_feeds(layout.tp, transfer.peer.layout.tp, transfer.draw):
            src.append(backend.base(name, src_rank) + here * size)
            dst.append(transfer.peer.base(name, dst_rank) + there * size)
            length.append(size)
            nbytes[src_rank] = nbytes.get(src_rank, 0) + size
    columns = [np.asarray(column, dtype=np.int64) for column in (src, dst, length)]
    rows = GroupRows(columns[0], columns[1], columns[2], np.zeros(len(src), dtype=np.int64), 0)
    counters = [transfer.counter(rank) for rank in nbytes]
    values = [transfer.word(transfer.posted.get(rank, 0) + size) for rank, size in nbytes.items()]
    return Batch([rows], np.asarray(counters, dtype=np.int64), np.asarray([values], dtype=np.int64)), nbytes


def batch_of(
    claims: Sequence[Claim], layout: KvLayout, launches: Sequence[tuple[str, int]], posted: Sequence[Mapping[int, int]]
) -> Batch:
    """One batch of several claims. launches: (group, layers) of each launch, in order; posted: per claim, what its
    transfer's counters stand at before the first. Claims of one transfer count together."""
    groups: list[GroupRows | None] = []
    for group in layout.groups:
        parts = [item.rows[group.name] for item in claims if group.name in item.rows]
        if not parts:
            groups.append(None)
            continue
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "length")]
        stride = np.concatenate([part.dst_stride for part in parts])
        groups.append(GroupRows(columns[0], columns[1], columns[2], stride, layout.layer_stride(group)))
    counters: list[int] = []
    words: list[list[int]] = [[] for _ in launches]
    together: dict[Transfer, tuple[Mapping[int, int], dict[tuple[str, int], int]]] = {}
    for item, before in zip(claims, posted, strict=True):
        _, nbytes = together.setdefault(item.transfer, (before, {}))
        for key, size in item.nbytes.items():
            nbytes[key] = nbytes.get(key, 0) + size
    for transfer, (before, nbytes) in together.items():
        for rank in sorted({rank for _, rank in nbytes}):
            counters.append(transfer.counter(rank))
            value = before.get(rank, 0)
            for row, (name, layers) in zip(words, launches, strict=True):
                value += layers * nbytes.get((name, rank), 0)
                row.append(transfer.word(value))
    values: Column = np.asarray(words, dtype=np.int64).reshape(len(launches), len(counters))
    return Batch(groups, np.asarray(counters, dtype=np.int64), values)
