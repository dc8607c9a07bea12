"""SRD queue pairs: a link has one at each end, which is destroyed to fence it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from kvmesh.errors import Unavailable
from kvmesh.transfer.transports.efa.device import EfaDevice, Peer
from kvmesh.transfer.transports.efa.options import EfaOptions
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.native.rings import NativePair
from kvmesh.transfer.transports.verbs.rows import Rows, each

# What a work request is, in the low bits of its number; above them a writer's ticket.
KIND_WRITE = 0
KIND_RECEIVE = 1
KIND_WORD = 2
KIND_MASK = 3
KIND_BITS = 2
# EFA's work requests hold no more.
QPN_BITS = 16
QKEY_BITS = 31
# Receives that are posted by one call.
CHAIN = 16

Part = tuple[int, int, Rows]
"""Rows of one write of the mover: its ticket, its immediate, rows."""


class SrdPair:
    """Made ready to send and to receive: it has no other end, each request names one. Life: made → `fail` → `close`.

    The driver holds a lock from `wr_start` to `wr_complete` and takes it again when completions are polled: posting and
    polling of one pair are done by one thread, or under a lock. sink: registered memory that receives name; nothing is
    put there.
    """

    def __init__(
        self,
        device: EfaDevice,
        queue: CompletionQueue,
        *,
        send_depth: int,
        receive_depth: int,
        sink: int,
        sink_lkey: int,
    ) -> None:
        api, enums = device.api, device.api.enums
        self._device = device
        self._api = api
        self.qkey = secrets.randbelow((1 << QKEY_BITS) - 1) + 1
        self.open = True
        self._signaled = int(enums.IBV_SEND_SIGNALED)
        self._sge = api.SGE(0, 0, 0)
        self._sink = api.SGE(sink, 8, sink_lkey)
        self._receives: list[Any] = []
        for _ in range(min(CHAIN, receive_depth)):
            # pyverbs keeps no reference to the next one; the list does.
            behind = self._receives[-1] if self._receives else None
            self._receives.append(api.RecvWR(wr_id=KIND_RECEIVE, num_sge=1, sg=[self._sink], next_wr=behind))
        cap = api.QPCap(max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1)
        init = api.QPInitAttrEx(
            qp_type=enums.IBV_QPT_DRIVER,
            scq=queue.raw,
            rcq=queue.raw,
            cap=cap,
            sq_sig_all=0,
            pd=device.pd,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_WRITE | enums.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
        )
        # Its other fields are 0: SRD is kind 0, no flags.
        kind = device.efa.EfaQPInitAttr()
        kind.driver_qp_type = 0
        self._qp: Any = None
        try:
            self._qp = device.efa.SRDQPEx(device.context, init, kind)
            self._bring_up(device.options)
        except api.error as error:
            if self._qp is not None:
                self._qp.close()
            self._free()
            raise Unavailable(f"{device.name} gives no SRD queue pair: {error}") from None
        self.number = int(self._qp.qp_num)
        self._native = NativePair.of(api.native, self._qp, queue.native, self.number)
        self._handle: tuple[Any, int | None] = (None, None)

    def _bring_up(self, options: EfaOptions) -> None:
        """RESET → INIT → RTR → RTS, the last by hand: pyverbs does not name the RNR retries."""
        enums = self._api.enums
        attributes = self._api.QPAttr(port_num=self._device.port.number)
        attributes.qkey = self.qkey
        attributes.pkey_index = 0
        self._qp.to_rtr(attributes)
        attributes.qp_state = enums.IBV_QPS_RTS
        attributes.sq_psn = 0
        mask = enums.IBV_QP_STATE | enums.IBV_QP_SQ_PSN
        if self._device.retries_rnr:
            attributes.rnr_retry = options.rnr_retry
            mask |= enums.IBV_QP_RNR_RETRY
        self._qp.modify(attributes, mask)

    def post_receives(self, count: int) -> None:
        """Post so many, all alike, a chain at a time."""
        while count > 0:
            chained = min(count, len(self._receives))
            self._qp.post_recv(self._receives[chained - 1])
            count -= chained

    def post_writes(self, peer: Peer, qpn: int, qkey: int, parts: Sequence[Part]) -> None:
        """Writes with immediate, all signalled, in one call to the driver. The caller has checked them."""
        if self._native is not None:
            if self._handle[0] is not peer.handle:
                self._handle = (peer.handle, self._native.handle(peer.handle))
            if self._handle[1] is not None:
                code = self._native.post_writes(self._handle[1], qpn, qkey, self._signaled, parts)
                if code:
                    raise self._api.error("posting failed", code)
                return
        qp, sge = self._qp, self._sge
        write, address, set_sge, handle = qp.wr_rdma_write_imm, qp.wr_set_ud_addr, qp.wr_set_sge, peer.handle
        key = -1
        qp.wr_start()
        try:
            qp.wr_flags = self._signaled
            for number, immediate, rows in parts:
                qp.wr_id = number
                for src, lkey, dst, rkey, nbytes in each(rows):
                    write(rkey, dst, immediate)
                    address(handle, qpn, qkey)
                    sge.addr = src
                    sge.length = nbytes
                    if lkey != key:
                        key = sge.lkey = lkey
                    set_sge(sge)
        except BaseException:
            # The driver's lock is not to stay held.
            qp.wr_abort()
            raise
        qp.wr_complete()

    def fail(self) -> None:
        """To ERR: nothing more is sent or received. What was posted may be flushed now or never. Idempotent."""
        if self.open:
            enums = self._api.enums
            attributes = self._api.QPAttr(qp_state=enums.IBV_QPS_ERR)
            with contextlib.suppress(self._api.error):
                self._qp.modify(attributes, enums.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it: when this returns the device touches no memory for it any more. Its completions are not to be
        polled after. Idempotent."""
        if self.open:
            self._native = None
            self._qp.close()
            self.open = False
            self._free()

    def _free(self) -> None:
        # pyverbs leaks these unless they are closed, once.
        for receive in self._receives:
            receive.close()
        self._sink.close()
        self._sge.close()
