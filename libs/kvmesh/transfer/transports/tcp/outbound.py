"""The writer's end of a tcp link: one or more streams; a write is cut over them and completes when all of it has."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Sequence
from functools import partial

import numpy as np

from kvmesh.errors import DataLoss
from kvmesh.kv.region import Region
from kvmesh.transfer.native.moves import memory_of
from kvmesh.transfer.transports.base import Completion, Write
from kvmesh.transfer.transports.sockets.helpers import Helpers
from kvmesh.transfer.transports.sockets.outbound import SocketOutbound
from kvmesh.transfer.transports.tcp.lane import Lane, Part, Source, Whole
from kvmesh.transfer.transports.tcp.wireformat import MAX_RUNS

# What is worth a stream of its own, and what a checksum is taken over at most.
MIN_PART_BYTES = 512 << 10
CHECKED_PART_BYTES = 2 << 20


class TcpOutbound(SocketOutbound):
    """Sends from this engine's regions over connected streams; completes on acknowledgement."""

    def __init__(
        self,
        socks: Sequence[socket.socket],
        source: Sequence[Region],
        *,
        checksums: bool = False,
        helpers: Helpers | None = None,
    ) -> None:
        super().__init__()
        self._sources = [Source(memory_of(region), region.buf) for region in source]
        self._lanes = [Lane(sock, self._sources, checksums=checksums) for sock in socks]
        self._checksums = checksums
        self._helpers = helpers or Helpers(1)

    def take(self, write: Write) -> None:
        parts = self._cut(write)
        for part in parts:
            if len(part.length) > MAX_RUNS:
                # Split by the mover's plan long before; a table of this length would be refused.
                self.completions.append(Completion(write.context, 0, f"a write of {len(write.length)} runs"))
                return
        for part in parts:
            min(self._lanes, key=lambda lane: lane.backlog).add(part)

    def step(self, budget: int) -> None:
        try:
            for lane in self._lanes:
                for part, error in lane.receive():
                    self._over(part, error)
        except DataLoss as error:
            self.fence(error.message)
            return
        ready = [lane for lane in self._lanes if lane.pending]
        if ready and budget > 0:
            self._helpers.run([partial(lane.send, budget // len(ready) + 1) for lane in ready])

    def flush(self, immediate: int) -> None:
        for lane in self._lanes:
            for part in lane.flush(immediate):
                self._over(part, "flushed")

    def give_up(self) -> None:
        for lane in self._lanes:
            for part in lane.give_up():
                self._over(part, self.broken)

    def release(self) -> None:
        # A view of a region would keep it mapped.
        for source in self._sources:
            source.view.release()
        for lane in self._lanes:
            lane.sock.close()

    @property
    def busy(self) -> bool:
        return bool(self.completions) or any(lane.pending and not lane.blocked for lane in self._lanes)

    def wait_fds(self) -> list[tuple[int, int]]:
        if self.broken:
            return []
        return [(lane.sock.fileno(), select.POLLIN | (select.POLLOUT if lane.pending else 0)) for lane in self._lanes]

    def _cut(self, write: Write) -> list[Part]:
        """Parts for the streams, cut between runs: as many as there are streams and it is worth."""
        count = min(len(self._lanes), max(1, write.nbytes // MIN_PART_BYTES))
        if self._checksums:
            count = max(count, -(-write.nbytes // CHECKED_PART_BYTES))
        count = min(count, len(write.length))
        whole = Whole(write, count)
        if count == 1:
            return [Part(whole, write.src, write.dst, write.length, write.nbytes)]
        sums = np.cumsum(np.asarray(write.length, dtype=np.int64))
        cuts = np.searchsorted(sums, write.nbytes * np.arange(1, count) // count) + 1
        edges = sorted({0, *cuts.tolist(), len(write.length)})
        whole.parts = len(edges) - 1
        parts = []
        for first, last in itertools.pairwise(edges):
            runs = slice(first, last)
            nbytes = int(sums[last - 1] - (sums[first - 1] if first else 0))
            parts.append(Part(whole, write.src[runs], write.dst[runs], write.length[runs], nbytes))
        return parts

    def _over(self, part: Part, error: str) -> None:
        whole = part.whole
        whole.parts -= 1
        whole.error = whole.error or error
        if not whole.parts:
            nbytes = 0 if whole.error else whole.write.nbytes
            self.completions.append(Completion(whole.write.context, nbytes, whole.error))
