"""The writer's end of an efa link: every row is one write with immediate, signalled, in any order.

Nothing is posted that is not paid for in credits; nothing that failed is posted again.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvmesh.errors import DataLoss, KvmeshError, Unavailable
from kvmesh.transfer.transports.efa.device import EfaDevice, Peer
from kvmesh.transfer.transports.efa.qp import KIND_BITS, KIND_MASK, KIND_RECEIVE, KIND_WRITE, Part, SrdPair
from kvmesh.transfer.transports.efa.scratch import Scratch
from kvmesh.transfer.transports.efa.window import SendWindow
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.device import Memory
from kvmesh.transfer.transports.verbs.rows import ROW, Rows
from kvmesh.transfer.transports.verbs.writer import POLL_BATCH, Pending, RdmaOutbound, refuse_row

log = logging.getLogger(__name__)


class Target(NamedTuple):
    """The destination's queue pair, and what it lets this link write to."""

    qpn: int
    qkey: int
    receives: int
    regions: Sequence[Memory]


class EfaOutbound(RdmaOutbound):
    """Takes the queue, the queue pair, the scratch and the peer's handle over. sources: this engine's regions."""

    def __init__(
        self,
        device: EfaDevice,
        queue: CompletionQueue,
        pair: SrdPair,
        scratch: Scratch,
        peer: Peer,
        sources: Sequence[Memory],
        target: Target,
    ) -> None:
        options = device.options
        super().__init__(device, queue, sources, target.regions, spins=options.spins)
        self._efa = device
        self._cq = queue
        self.pair = pair
        self._scratch = scratch
        self._peer = peer
        self._target = target
        self._source = (target.qpn, peer.number)
        self._batch = options.batch
        self._max_write = device.max_write
        self._enums = device.api.enums
        self.window = SendWindow(options.send_depth, target.receives)
        self._flying: dict[int, Pending] = {}
        self._ticket = 0

    @property
    def outstanding(self) -> int:
        return self.window.outstanding

    def _may_post(self) -> bool:
        return self.window.room > 0

    # --- posting -------------------------------------------------------------------------------------------------

    def _fill(self, budget: int) -> None:
        while self._queue and budget > 0:
            room = min(self.window.room, self._batch)
            if not room:
                return
            parts: list[Part] = []
            count = 0
            while self._queue and count < room and budget > 0:
                pending = self._queue[0]
                rows, moved = self._rows(pending, room - count, budget)
                budget -= moved
                added = len(rows) // ROW
                count += added
                if not pending.ticket:
                    self._ticket += 1
                    pending.ticket = self._ticket
                    self._flying[pending.ticket] = pending
                pending.parts += added
                parts.append((pending.ticket << KIND_BITS | KIND_WRITE, pending.write.immediate, rows))
                if pending.posted:
                    self._queue.popleft()
            self.window.take(count)
            self.pair.post_writes(self._peer, self._target.qpn, self._target.qkey, parts)

    def _rows(self, pending: Pending, limit: int, budget: int) -> tuple[Rows, int]:
        """The next rows of a write, cut at the device's largest; checked against both registrations. Raises
        InvalidArgument."""
        write, largest = pending.write, self._max_write
        source, target = self._sources[write.src_region], self._regions[write.dst_region]
        src_base, lkey, dst_base, rkey = source.address, source.lkey, target.address, target.rkey
        src_end, dst_end = source.nbytes, target.nbytes
        rows: Rows = []
        moved = 0
        row, done = pending.next_row, pending.row_done
        last = len(write.length)
        while row < last and len(rows) < limit * ROW and moved < budget:
            src, dst, length = write.src[row], write.dst[row], write.length[row]
            if src < 0 or dst < 0 or length < 1 or src + length > src_end or dst + length > dst_end:
                raise refuse_row(src, dst, length)
            size = length - done
            if size > largest:
                size = largest
            rows += (src_base + src + done, lkey, dst_base + dst + done, rkey, size)
            moved += size
            done += size
            if done == length:
                row += 1
                done = 0
        pending.next_row, pending.row_done = row, done
        return rows, moved

    def flush(self, immediate: int) -> None:
        super().flush(immediate)
        # One of which everything that was posted has completed ends there.
        for ticket in [ticket for ticket, pending in self._flying.items() if pending.ended]:
            del self._flying[ticket]

    # --- completing ----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        while True:
            found = self._cq.take(POLL_BATCH)
            self._take(found)
            if self._fault:
                raise Unavailable(self._fault)
            if len(found) < POLL_BATCH:
                return

    def _take(self, found: Sequence[Any]) -> None:
        """Completions. There is one per page, in no order: those of a write are counted, and then looked at once."""
        done: dict[int, int] = {}
        for wc in found:
            number = wc.wr_id
            if number & KIND_MASK == KIND_WRITE:
                done[number] = done.get(number, 0) + 1
                if wc.status:
                    self._failed(number, int(wc.status))
            elif wc.status:
                self._fault = self._fault or f"a receive completed with status {int(wc.status)}"
            elif number & KIND_MASK == KIND_RECEIVE:
                self._word(wc)
            else:
                raise DataLoss(f"a completion of kind {number & KIND_MASK}, which is never asked for")
        for number, count in done.items():
            self._done(number >> KIND_BITS, count)

    def _failed(self, number: int, status: int) -> None:
        # The first is the cause; what is flushed after it has another status.
        self._fault = self._fault or f"a write completed with status {status}"
        pending = self._flying.get(number >> KIND_BITS)
        if pending is not None:
            pending.error = pending.error or self._fault

    def _done(self, ticket: int, count: int) -> None:
        pending = self._flying.get(ticket)
        if pending is None or pending.parts < count:
            raise DataLoss(f"a write completed that is not in flight ({ticket})")
        self.window.completed(count)
        pending.parts -= count
        if not pending.parts:
            self._settle(pending)
            if pending.ended:
                del self._flying[pending.ticket]

    def _word(self, wc: Any) -> None:
        if not self._broken:
            self.pair.post_receives(1)
        if (wc.src_qp, wc.slid) != self._source:
            log.warning("efa: a word by a stranger is not believed")
            return
        if wc.opcode != self._enums.IBV_WC_RECV_RDMA_WITH_IMM:
            raise DataLoss(f"the destination sent opcode {wc.opcode}")
        self.window.returned(socket.ntohl(wc.imm_data))

    # --- ending --------------------------------------------------------------------------------------------------

    def _tear_down(self) -> None:
        """An error does not stop a queue pair of this kind, so it is stopped; what has completed is taken; then it is
        destroyed, which needs nothing to be flushed."""
        self.pair.fail()
        try:
            while found := self._cq.take(POLL_BATCH):
                self._take(found)
        except (KvmeshError, self._device.api.error) as error:
            log.debug("efa: while ending a link: %s", error)
        self.pair.close()
        self.window.abandon()

    def _abandon(self) -> Iterable[Pending]:
        found = list(self._flying.values())
        self._flying.clear()
        return found

    def _free(self) -> None:
        self._cq.close()
        self._efa.release_peer(self._peer)
        self._scratch.close()
