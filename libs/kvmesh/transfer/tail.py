"""Tail buffers: what comes with a prompt's KV but is none (its last hidden states, its logits), a row per transfer.

A tail buffer is a region of `rows * row_bytes` bytes on every rank, all ranks alike. A transfer writes whole rows: each
destination rank's is fed by one source rank, as replicated heads are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.sharding import feeds_between
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

MAX_TAILS = 16
MAX_ROW_BYTES = 1 << 26
MAX_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class TailBuffer:
    """rows of row_bytes each. Raises InvalidArgument."""

    name: str
    row_bytes: int
    rows: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 64:
            raise InvalidArgument(f"a tail buffer's name must have 1..64 characters, got {self.name!r}")
        for what, value, high in (("row_bytes", self.row_bytes, MAX_ROW_BYTES), ("rows", self.rows, MAX_ROWS)):
            if not 1 <= value <= high:
                raise InvalidArgument(f"tail {self.name!r}: {what} must be in 1..{high}, got {value}")

    @property
    def nbytes(self) -> int:
        """Of its region on one rank."""
        return self.row_bytes * self.rows


def check_tails(layout: KvLayout, tails: Sequence[TailBuffer]) -> None:
    """Raises InvalidArgument where a name is taken twice, also by a layer group: regions are named by them."""
    if len(tails) > MAX_TAILS:
        raise InvalidArgument(f"more than {MAX_TAILS} tail buffers")
    names = [*(group.name for group in layout.groups), *(tail.name for tail in tails)]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"tail buffers and kv groups must have distinct names, got {names}")


def tails_from_proto(message: pb.Layout, layout: KvLayout) -> tuple[TailBuffer, ...]:
    """The checked tail buffers beside a layout. Raises InvalidArgument."""
    if len(message.tails) > MAX_TAILS:
        raise InvalidArgument(f"layout: more than {MAX_TAILS} tail buffers")
    tails = tuple(TailBuffer(tail.name, tail.row_bytes, tail.rows) for tail in message.tails)
    check_tails(layout, tails)
    return tails


def region_sizes(layout: KvLayout, tails: Iterable[TailBuffer] = ()) -> dict[str, int]:
    """Bytes of every region of one rank, by name: layer groups, then tail buffers."""
    sizes = {group.name: layout.region_bytes(group) for group in layout.groups}
    return sizes | {tail.name: tail.nbytes for tail in tails}


def rows_to_proto(rows: Mapping[str, int]) -> list[pb.TailRow]:
    """Rows, in the mapping's order."""
    return [pb.TailRow(name=name, row=row) for name, row in rows.items()]


def rows_from_proto(message: Sequence[pb.TailRow], tails: Sequence[TailBuffer]) -> dict[str, int]:
    """Checked rows: known buffers, named once, rows inside. Raises InvalidArgument."""
    known = {tail.name: tail for tail in tails}
    rows: dict[str, int] = {}
    if len(message) > len(known):
        raise InvalidArgument(f"tails: {len(message)} rows for {len(known)} tail buffers")
    for entry in message:
        if entry.name not in known:
            raise InvalidArgument(f"tails: no tail buffer {entry.name!r} here (has {sorted(known)})")
        if entry.name in rows:
            raise InvalidArgument(f"tails: {entry.name!r} is named twice")
        if entry.row >= known[entry.name].rows:
            raise InvalidArgument(f"tails: row {entry.row} of {entry.name!r} is not one of {known[entry.name].rows}")
        rows[entry.name] = entry.row
    return rows


def tail_bytes(layout: KvLayout, tails: Sequence[TailBuffer], rows: Mapping[str, int]) -> int:
    """What all ranks of the destination count for these rows."""
    return layout.tp * sum(tail.row_bytes for tail in tails if tail.name in rows)


def tail_feeds(src_tp: int, dst_tp: int, draw: int) -> list[tuple[int, int]]:
    """(src_rank, dst_rank) of each row's copies."""
    feeds = feeds_between(1, src_tp, dst_tp, draw)
    return list(zip(feeds.src_rank.tolist(), feeds.dst_rank.tolist(), strict=True))
