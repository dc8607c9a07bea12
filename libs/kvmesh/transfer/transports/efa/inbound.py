"""The destination's end of an efa link: it adds up bytes, posts receives again, and gives credits back.

Writes land in any order, and so do their completions: nothing here depends on which comes first.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from kvmesh.errors import DataLoss, Unavailable
from kvmesh.transfer.transports.base import Arrival, Expected
from kvmesh.transfer.transports.efa.device import EfaDevice, Peer
from kvmesh.transfer.transports.efa.qp import KIND_BITS, KIND_MASK, KIND_RECEIVE, KIND_WORD, SrdPair
from kvmesh.transfer.transports.efa.scratch import WORD_BYTES, Scratch
from kvmesh.transfer.transports.efa.window import WORDS_IN_FLIGHT
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.credits import ReceiveCredits
from kvmesh.transfer.transports.verbs.device import Memory
from kvmesh.transfer.transports.verbs.receiver import POLL_BATCH, RdmaInbound

log = logging.getLogger(__name__)


class EfaInbound(RdmaInbound):
    """Made with its queue pair ready and all receives posted, before the writer knows of it."""

    def __init__(self, device: EfaDevice, expected: Expected) -> None:
        super().__init__(device, expected)
        options = device.options
        self._efa = device
        self._credits = ReceiveCredits(options.receives, WORDS_IN_FLIGHT)
        self._enums = device.api.enums
        self._sequence = 0
        self._peer: Peer | None = None
        self._source = (-1, -1)
        self._reply = (0, 0, Memory(0, 0, 0, 0))
        self._scratch: Scratch | None = None
        # Completions of writes by others than the writer; they are not counted.
        self.foreign = 0
        self.pair: SrdPair | None = None
        try:
            self._scratch = Scratch(device)
            self.queue = CompletionQueue(device, options.receives + WORDS_IN_FLIGHT)
            self.pair = SrdPair(
                device,
                self.queue,
                send_depth=WORDS_IN_FLIGHT,
                receive_depth=options.receives,
                sink=self._scratch.sink,
                sink_lkey=self._scratch.lkey,
            )
            self.pair.post_receives(options.receives)
        except BaseException as error:
            self.destroy()
            if isinstance(error, device.api.error):
                raise Unavailable(f"{device.name} takes no receives: {error}") from None
            raise

    def connect(self, gid: bytes, qpn: int, qkey: int, words: Memory) -> None:
        """Let the writer's queue pair in: from now on our device knows its device. Raises Unavailable."""
        with self._lock:
            if not self._open:
                raise Unavailable("the link has ended")
            self._peer = self._efa.peer(gid)
            self._source = (qpn, self._peer.number)
            self._reply = (qpn, qkey, words)

    async def fence(self) -> None:
        self._stop_reading()
        with self._lock:
            if self._open:
                self._ended = self._ended or "fenced"
                assert self.pair is not None
                self.pair.fail()
                # What has landed is counted; what the device still has to tell goes with the queue pair.
                try:
                    self._take()
                except (Unavailable, DataLoss, self._device.api.error) as error:
                    log.debug("efa: while fencing: %s", error)
        self.destroy()

    # --- work ----------------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        assert self.queue is not None
        any_found = False
        fault = ""
        sums: dict[int, int] = {}
        try:
            while True:
                found = self.queue.take(POLL_BATCH)
                for wc in found:
                    if wc.status:
                        fault = fault or f"the queue pair failed with status {int(wc.status)}"
                    else:
                        self._completed(wc, sums)
                any_found |= bool(found)
                if found and not fault and not self._ended:
                    self._give_back()
                if len(found) < POLL_BATCH:
                    break
        finally:
            # Also of a link that is over: it has landed.
            self._arrivals.extend(Arrival(immediate, nbytes) for immediate, nbytes in sums.items())
        if fault:
            raise Unavailable(fault)
        return any_found

    def _completed(self, wc: Any, sums: dict[int, int]) -> None:
        kind = wc.wr_id & KIND_MASK
        if kind == KIND_WORD:
            self._credits.told()
            return
        if kind != KIND_RECEIVE or wc.opcode != self._enums.IBV_WC_RECV_RDMA_WITH_IMM:
            raise DataLoss(f"a completion of kind {kind}, opcode {wc.opcode}, which is never asked for")
        if (wc.src_qp, wc.slid) != self._source:
            self._stranger(wc.src_qp, wc.slid)
            return
        self._credits.consumed()
        # pyverbs hands the bytes through as they were on the wire.
        immediate = socket.ntohl(wc.imm_data)
        nbytes = wc.byte_len
        if nbytes:
            sums[immediate] = sums.get(immediate, 0) + nbytes

    def _stranger(self, qpn: int, handle: int) -> None:
        """Somebody else has guessed the key, or we are mistaken: it gets no credit, and its receive is posted again for
        the writer whose it was."""
        self.foreign += 1
        if self.foreign == 1:
            log.warning(
                "efa: %s: a write by queue pair %d of handle %d is not counted", self.expected.peer, qpn, handle
            )
        if self.pair is not None and not self._ended:
            self.pair.post_receives(1)

    def _give_back(self) -> None:
        """Post again the receives that have completed, and say so when it is due."""
        assert self.pair is not None
        missing = self._credits.missing
        if missing:
            self.pair.post_receives(missing)
            self._credits.reposted(missing)
        word = self._credits.due()
        if word is not None and self._peer is not None:
            assert self._scratch is not None
            qpn, qkey, words = self._reply
            self._sequence += 1
            row = [self._scratch.source, self._scratch.lkey, words.address, words.rkey, WORD_BYTES]
            self.pair.post_writes(self._peer, qpn, qkey, [(self._sequence << KIND_BITS | KIND_WORD, word, row)])
            self._credits.telling()

    def _free(self) -> None:
        if self.pair is not None:
            self.pair.close()
        if self.queue is not None:
            self.queue.close()
        if self._peer is not None:
            self._efa.release_peer(self._peer)
            self._peer = None
        if self._scratch is not None:
            self._scratch.close()
