"""An engine that writes by itself (transport nvlink), as its sidecar's client sees it.

The sidecar hands over a peer's memory, says which transfers may be written and which are to stop; everything that moves
bytes is the poster's. `kvmesh.engine.nvlink` has the one that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvmesh.proto.v1 import kvtransfer_pb2 as pb

# Bodies of SidecarMessage that are a poster's.
POSTER_MESSAGES = frozenset({"peer_memory", "post_transfer", "stop_transfer", "release_peer"})
# A counter's word: generation << GENERATION_SHIFT | bytes.
GENERATION_SHIFT = 44
BYTES_MASK = (1 << GENERATION_SHIFT) - 1
WORD_BYTES = 8
# Descriptors that come with one message: a peer's regions and counters.
MAX_PASSED_FDS = 64


class Poster(Protocol):
    """Called on the client's loop. It outlasts any one sidecar; one connection at a time."""

    @property
    def transports(self) -> Sequence[str]:
        """Those by which it writes."""

    def connected(self, tell: Callable[[pb.EngineMessage], None]) -> None:
        """Registered with a sidecar. What its predecessors have not heard (PeerReleased) is told to it."""

    def take(self, message: pb.SidecarMessage, take_fds: Callable[[int], list[int]]) -> None:
        """One of POSTER_MESSAGES. Raises InvalidArgument for what ends the connection."""

    def pages_ready(self, transfer_id: int, first: int, count: int) -> None:
        """These pages of a transfer are complete in all layers."""

    def tail_ready(self, transfer_id: int) -> None:
        """Its tail rows are written."""

    def when_drained(self, done: Callable[[], None], transfer_id: int | None = None) -> None:
        """Call `done` on the loop once nothing of that transfer (None: of any that there is now) is in flight; at once
        where nothing is."""

    def lost(self) -> None:
        """The sidecar is gone: stop everything, let go of all peers' memory."""

    async def leave(self, timeout_s: float) -> None:
        """Before the connection is closed in order: stop everything, let go of all memory, say so; bounded in time."""
