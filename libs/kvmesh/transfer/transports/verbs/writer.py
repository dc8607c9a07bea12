"""What the writer's end of every RDMA link has: writes that wait, writes in flight, and how they end."""

from __future__ import annotations

import select
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Completion, Outbound, Write
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.device import Memory, RdmaDevice

POLL_BATCH = 64


@dataclass(slots=True, eq=False)
class Pending:
    """A write until it has completed. next_row: the first that is not posted in full, of which `row_done` bytes are;
    parts: what is in flight of it."""

    write: Write
    next_row: int = 0
    row_done: int = 0
    parts: int = 0
    error: str = ""
    ended: bool = False
    ticket: int = 0

    @property
    def posted(self) -> bool:
        return self.next_row == len(self.write.length)


class RdmaOutbound(Outbound):
    """Takes the queue over. sources: this engine's regions; regions: the destination's."""

    def __init__(
        self,
        device: RdmaDevice,
        queue: CompletionQueue,
        sources: Sequence[Memory],
        regions: Sequence[Memory],
        *,
        spins: bool,
    ) -> None:
        self._device = device
        self._sources = sources
        self._regions = regions
        self._spins = spins
        self._fd = queue.fd
        self._queue: deque[Pending] = deque()
        self._completions: list[Completion] = []
        self._broken = ""
        self._fault = ""
        self._closed = False
        # The pair of NICs, for status.
        self.pair_of_nics: pb.NicStatus | None = None

    def nics(self) -> list[pb.NicStatus]:
        return [self.pair_of_nics] if self.pair_of_nics is not None else []

    # --- what a kind of link adds --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def outstanding(self) -> int:
        """Work requests posted and not completed."""

    @abstractmethod
    def _may_post(self) -> bool:
        """Whether credits allow for anything now."""

    @abstractmethod
    def _collect(self) -> None:
        """Take completions. Raises KvmeshError or pyverbs' error where the link is over."""

    @abstractmethod
    def _fill(self, budget: int) -> None:
        """Post what may be posted, about `budget` bytes. Raises as `_collect`."""

    @abstractmethod
    def _tear_down(self) -> None:
        """Destroy the queue pairs: after that the device reads no page of ours. Must not raise KvmeshError."""

    @abstractmethod
    def _abandon(self) -> Iterable[Pending]:
        """Forget what was in flight; returns it."""

    @abstractmethod
    def _free(self) -> None:
        """Let go of what the queue pairs used."""

    # --- the interface -------------------------------------------------------------------------------------------

    def post(self, write: Write) -> None:
        if self._broken:
            self._completions.append(Completion(write.context, 0, self._broken))
        else:
            self._queue.append(Pending(write))

    def poll(self, budget: int) -> list[Completion]:
        if not self._broken:
            try:
                self._collect()
                self._fill(budget)
            except (KvmeshError, self._device.api.error) as error:
                self.fence(str(error))
        completions, self._completions = self._completions, []
        return completions

    def flush(self, immediate: int) -> None:
        kept: deque[Pending] = deque()
        for pending in self._queue:
            if pending.write.immediate != immediate:
                kept.append(pending)
                continue
            # Of one that has begun nothing more is posted; it ends when what was posted has completed.
            pending.error = pending.error or "flushed"
            self._settle(pending)
        self._queue = kept

    def fence(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
            self._tear_down()
        for pending in self._abandon():
            self._end(pending, self._broken)
        for pending in self._queue:
            self._end(pending, self._broken)
        self._queue.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fence("closed")
            self._free()

    @property
    def busy(self) -> bool:
        if self._completions:
            return True
        if self._broken:
            return False
        return bool(self._queue and self._may_post()) or (self._spins and self.outstanding > 0)

    @property
    def broken(self) -> str:
        return self._broken

    def wait_fds(self) -> list[tuple[int, int]]:
        return [] if self._broken else [(self._fd, select.POLLIN)]

    # --- for them ------------------------------------------------------------------------------------------------

    def _settle(self, pending: Pending) -> None:
        """End a write of which nothing is in flight and nothing more will be posted."""
        if not pending.parts and (pending.posted or pending.error):
            self._end(pending, pending.error)

    def _end(self, pending: Pending, error: str) -> None:
        if not pending.ended:
            pending.ended = True
            self._completions.append(Completion(pending.write.context, 0 if error else pending.write.nbytes, error))


def refuse_row(src: int, dst: int, length: int) -> InvalidArgument:
    """What is outside of its registration is never posted."""
    return InvalidArgument(f"a write of {length} bytes from {src} to {dst} is outside of its region")
