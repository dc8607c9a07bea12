"""What moves bytes for the poster: a stream of copies that run in order, host or GPU memory behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmesh.proto.v1 import kvtransfer_pb2 as pb

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupRows:
    """Copies of one layer group, for layer_index 0 of it; int64 columns of equal length.

    src, dst: addresses as the backend knows them; length: bytes; dst_stride: bytes from layer to layer at the
    destination; src_stride: the same here, one number since the source has one layout.
    """

    src: Column
    dst: Column
    length: Column
    dst_stride: Column
    src_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Copies that leave layer by layer. groups: by position in the layout. counters: (c,) addresses of the counters'
    words; values: (launches, c) int64, what they are set to behind the n-th launch."""

    groups: Sequence[GroupRows | None]
    counters: Column
    values: Column


@dataclass(frozen=True, slots=True)
class PeerMapping:
    """A destination's memory, mapped. bases: address of each region, in the order of the message; counters: of word 0.
    handle: the backend's own."""

    bases: Sequence[int]
    counters: int
    handle: object


class Backend(Protocol):
    """One stream of copies. Any thread may call it; the poster calls it one call at a time, but for `open_peer` and
    `close_peer`, which come beside the others."""

    memory: str
    # Rows are cut to this many bytes.
    max_row: int

    def base(self, group: str, rank: int) -> int:
        """Address of our own region. Raises KeyError."""

    def open_peer(self, regions: Sequence[pb.RegionInfo], fds: Sequence[int], counter_bytes: int) -> PeerMapping:
        """Map a peer's regions and its counters (the last descriptor). The descriptors stay the caller's; nothing stays
        mapped where this raises (KvmeshError)."""

    def close_peer(self, peer: PeerMapping) -> None:
        """Unmap. Nothing that was launched may use it any more."""

    def prepare(self, batch: Batch) -> object:
        """Make a batch ready for launches."""

    def after_compute(self) -> None:
        """Launches from now on come after what the engine has queued for its pages so far."""

    def launch(self, prepared: object, group: int, first_layer: int, layers: int, launch: int) -> None:
        """Queue the copies of these layers of a group, and then the counters' values of that launch."""

    def mark(self) -> object:
        """A point in the stream: behind everything launched so far."""

    def reached(self, mark: object) -> bool:
        """True once everything before the mark is done."""

    def close(self) -> None:
        """End. Nothing is under way."""
