"""`fake` in a real sidecar: the shm transport, with the faults of a file between the writer and the memory."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Completion, Outbound, Write
from kvmesh.transfer.transports.fake import FakeOutbound, FaultOptions
from kvmesh.transfer.transports.shm import ShmOutbound, ShmTransport


class FaultyOutbound(FakeOutbound):
    """Lands and tells through a shm link that it owns."""

    def __init__(self, options: FaultOptions, inner: ShmOutbound) -> None:
        super().__init__(options, self._copy, inner.tell, clock=time.monotonic)
        self._inner = inner

    def poll(self, budget: int) -> list[Completion]:
        self._inner.poll(0)
        if self._inner.broken and not self.broken:
            self.fence(self._inner.broken)
        return super().poll(budget)

    def wait_fds(self) -> list[tuple[int, int]]:
        return self._inner.wait_fds()

    def fence(self, reason: str) -> None:
        super().fence(reason)
        self._inner.fence(reason)

    def close(self) -> None:
        super().close()
        self._inner.close()

    def _copy(self, write: Write, first: int, last: int) -> int:
        moved = 0
        for run in range(first, last):
            moved += self._inner.copy(write, run, 1)[1]
        return moved


class FakeTransport(ShmTransport):
    """Only for tests: chosen when the settings name `fake`."""

    name = "fake"

    def __init__(self, socket_path: Path, faults: Path | None) -> None:
        super().__init__(socket_path)
        self._faults = faults

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        usable, why = super().judge(offer)
        return usable, f"faults on purpose, {why}"

    def outbound(self, sock: socket.socket, source: Sequence[Region], target: Sequence[Region]) -> Outbound:
        options = FaultOptions.load(self._faults) if self._faults is not None else FaultOptions()
        return FaultyOutbound(options, ShmOutbound(sock, source, target))
