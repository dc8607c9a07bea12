"""The writer's end of a verbs link: runs of plain writes, each closed by one write-with-immediate, over several queue
pairs. Nothing is posted that is not paid for in credits; nothing that failed is posted again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import DataLoss, KvmeshError, Unavailable
from kvmesh.transfer.transports.verbs.credits import SendCredits
from kvmesh.transfer.transports.verbs.device import Device, Memory
from kvmesh.transfer.transports.verbs.mailbox import Mailbox
from kvmesh.transfer.transports.verbs.qp import (
    KIND_CLOSE,
    KIND_INNER,
    KIND_RECEIVE,
    KIND_WORD,
    Done,
    QueuePair,
    RunQueue,
)
from kvmesh.transfer.transports.verbs.rows import ROW, Rows
from kvmesh.transfer.transports.verbs.writer import POLL_BATCH, Pending, RdmaOutbound, refuse_row

log = logging.getLogger(__name__)
_WHAT = {KIND_CLOSE: "a run", KIND_INNER: "a write", KIND_RECEIVE: "a receive", KIND_WORD: "a word"}


@dataclass(slots=True, eq=False)
class Target:
    """What the destination lets this link write to. rings: address and rkey of each queue pair's mailbox."""

    regions: Sequence[Memory]
    rings: Sequence[tuple[int, int]]
    receives: int


@dataclass(slots=True, eq=False)
class _Run:
    parts: list[Pending]
    nbytes: int


@dataclass(slots=True, eq=False)
class _Lane:
    """One queue pair with its accounts."""

    pair: QueuePair
    credits: SendCredits
    runs: deque[_Run] = field(default_factory=deque)


class VerbsOutbound(RdmaOutbound):
    """Takes the queue pairs, the queue and the mailbox over. sources: this engine's regions."""

    def __init__(
        self,
        device: Device,
        queue: RunQueue,
        pairs: Sequence[QueuePair],
        mailbox: Mailbox,
        mail: Memory,
        sources: Sequence[Memory],
        target: Target,
    ) -> None:
        options = device.options
        super().__init__(device, queue, sources, target.regions, spins=options.spins)
        self._cq = queue
        self._mailbox = mailbox
        self._mail = mail
        self._target = target
        self._options = options
        self._lanes = [_Lane(pair, SendCredits(options.send_depth, target.receives)) for pair in pairs]
        self._turn = 0

    @property
    def outstanding(self) -> int:
        return sum(lane.credits.outstanding for lane in self._lanes)

    def _may_post(self) -> bool:
        return self._lane() is not None

    def _abandon(self) -> Iterable[Pending]:
        found = [pending for lane in self._lanes for run in lane.runs for pending in run.parts]
        for lane in self._lanes:
            lane.runs.clear()
        return found

    def _free(self) -> None:
        self._cq.close()
        self._device.release(self._mail)
        self._mailbox.close()

    # --- posting -------------------------------------------------------------------------------------------------

    def _lane(self) -> _Lane | None:
        """The next queue pair on which a run may start."""
        count = len(self._lanes)
        for step in range(count):
            lane = self._lanes[(self._turn + step) % count]
            if lane.credits.room:
                self._turn = (self._turn + step) % count
                return lane
        return None

    def _fill(self, budget: int) -> None:
        while self._queue and budget > 0:
            lane = self._lane()
            if lane is None:
                return
            rows, run = self._next_run(min(lane.credits.room - 1, self._options.run_rows))
            number = lane.credits.take(len(rows) // ROW + 1)
            place = lane.pair.place
            base, rkey = self._target.rings[place]
            entry = self._mailbox.put(place, number, run.nbytes)
            into = base + entry - self._mailbox.ring_address(place)
            lane.runs.append(run)
            lane.pair.post_run(number, rows, entry, self._mail, into, rkey, run.parts[0].write.immediate)
            budget -= run.nbytes
            self._turn += 1

    def _next_run(self, max_rows: int) -> tuple[Rows, _Run]:
        """Rows of one generation from the head of the queue, of several writes where they fit."""
        rows: Rows = []
        run = _Run([], 0)
        immediate = self._queue[0].write.immediate
        while self._queue and len(rows) < max_rows * ROW and run.nbytes < self._options.run_bytes:
            pending = self._queue[0]
            if pending.write.immediate != immediate:
                break
            try:
                moved = self._take_rows(pending, rows, max_rows, run.nbytes)
            except KvmeshError:
                # Nothing of this run is posted: the others of it wait again, and end with the link.
                for part in reversed(run.parts):
                    part.parts -= 1
                    self._queue.appendleft(part)
                raise
            pending.parts += 1
            run.parts.append(pending)
            run.nbytes += moved
            if pending.posted:
                self._queue.popleft()
        return rows, run

    def _take_rows(self, pending: Pending, rows: Rows, max_rows: int, nbytes: int) -> int:
        """Checked against both registrations: what is outside of them is never posted. Raises InvalidArgument."""
        write = pending.write
        source, target = self._sources[write.src_region], self._regions[write.dst_region]
        first = pending.next_row
        last = min(len(write.length), first + max_rows - len(rows) // ROW)
        limit = self._options.run_bytes - nbytes
        moved = 0
        row = first
        src_end, dst_end = source.nbytes, target.nbytes
        src_base, lkey, dst_base, rkey = source.address, source.lkey, target.address, target.rkey
        for src, dst, length in zip(
            write.src[first:last], write.dst[first:last], write.length[first:last], strict=True
        ):
            if moved >= limit:
                break
            if src < 0 or dst < 0 or length < 1 or src + length > src_end or dst + length > dst_end:
                raise refuse_row(src, dst, length)
            rows += (src_base + src, lkey, dst_base + dst, rkey, length)
            moved += length
            row += 1
        pending.next_row = row
        return moved

    # --- completing ----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        while True:
            found = self._cq.poll(POLL_BATCH)
            for done in found:
                self._completed(done)
            if self._fault:
                raise Unavailable(self._fault)
            if len(found) < POLL_BATCH:
                return

    def _completed(self, done: Done) -> None:
        lane = self._lanes[done.qp]
        if done.status and not self._fault:
            # The first is the cause; what is flushed after it has another status.
            self._fault = f"{_WHAT[done.kind]} on queue pair {done.qp} completed with status {done.status}"
        if done.kind == KIND_CLOSE:
            # In order on its queue pair: all that was posted before it is over too.
            lane.credits.completed(done.sequence)
            run = lane.runs.popleft()
            for pending in run.parts:
                pending.parts -= 1
                pending.error = pending.error or (self._fault if done.status else "")
                self._settle(pending)
        elif done.status:
            return
        elif done.kind == KIND_RECEIVE:
            lane.credits.returned(done.immediate)
            if not self._broken:
                lane.pair.post_receives(1)
        else:
            raise DataLoss(f"a completion of kind {done.kind}, which is never asked for")

    def _tear_down(self) -> None:
        """Queue pairs to ERR, what they held drained, then destroyed."""
        for lane in self._lanes:
            lane.pair.fail()
        until = time.monotonic() + self._options.drain_timeout_s
        while self.outstanding:
            if self._drain():
                continue
            remaining = until - time.monotonic()
            if remaining <= 0:
                log.warning("verbs: %d requests were not flushed in time; their queue pairs go now", self.outstanding)
                break
            self._cq.wait(remaining)
        for lane in self._lanes:
            lane.pair.close()
            lane.credits.flushed()

    def _drain(self) -> bool:
        """True where something has come."""
        try:
            found = self._cq.poll(POLL_BATCH)
        except self._device.api.error:
            return False
        for done in found:
            # What a faulty peer told does not matter any more.
            with contextlib.suppress(KvmeshError):
                self._completed(done)
        return bool(found)
