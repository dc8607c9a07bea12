"""Queue pairs. One link has several, with one completion queue, at each end."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, NamedTuple

from kvmesh.errors import Unavailable
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.device import LINK_ETHERNET, Device, Memory, gid_text
from kvmesh.transfer.transports.verbs.native.rings import NativePair
from kvmesh.transfer.transports.verbs.rows import Rows, each

# What a work request is, in the low bits of its number.
KIND_CLOSE = 0
KIND_INNER = 1
KIND_RECEIVE = 2
KIND_WORD = 3
_KIND_BITS = 2
_QP_BITS = 6
_SHIFT = _KIND_BITS + _QP_BITS
MAX_RD_ATOMIC = 1
RNR_RETRY = 3
RNR_TIMER = 12
HOP_LIMIT = 64


def request_id(kind: int, qp: int, sequence: int) -> int:
    """64 bits: sequence | queue pair's place | kind."""
    return (sequence << _SHIFT | qp << _KIND_BITS | kind) & 0xFFFF_FFFF_FFFF_FFFF


class Done(NamedTuple):
    """A completion. status: ibv_wc_status, 0 is success. immediate: host order; of receives only."""

    kind: int
    qp: int
    sequence: int
    status: int
    opcode: int
    immediate: int


class Remote(NamedTuple):
    """The other end of one queue pair."""

    gid: bytes
    lid: int
    mtu: int
    number: int
    psn: int


class RunQueue(CompletionQueue):
    """Completions of runs, receives and words."""

    def poll(self, limit: int = 64) -> list[Done]:
        """Up to `limit`; see `take`."""
        return [_done(wc) for wc in self.take(limit)]


def _done(wc: Any) -> Done:
    number = wc.wr_id
    kind = number & ((1 << _KIND_BITS) - 1)
    status = int(wc.status)
    # pyverbs hands the bytes through as they were on the wire.
    immediate = socket.ntohl(wc.imm_data) if kind == KIND_RECEIVE and not status else 0
    return Done(kind, number >> _KIND_BITS & ((1 << _QP_BITS) - 1), number >> _SHIFT, status, int(wc.opcode), immediate)


class QueuePair:
    """A reliable connection. Life: INIT (made) → `connect` (RTS) → `fail` (ERR) → `close`.

    place: its index in the link. sink: registered memory that receives name; nothing is put there.
    """

    def __init__(
        self,
        device: Device,
        queue: RunQueue,
        *,
        place: int,
        psn: int,
        send_depth: int,
        receive_depth: int,
        sink: int,
        sink_lkey: int,
    ) -> None:
        api, enums = device.api, device.api.enums
        self._device = device
        self._api = api
        self.place = place
        self.psn = psn
        self.open = True
        self._signaled = int(enums.IBV_SEND_SIGNALED)
        self._sge = api.SGE(0, 0, 0)
        self._sink = api.SGE(sink, 8, sink_lkey)
        self._receive = api.RecvWR(wr_id=request_id(KIND_RECEIVE, place, 0), num_sge=1, sg=[self._sink])
        cap = api.QPCap(max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1)
        init = api.QPInitAttrEx(
            qp_type=enums.IBV_QPT_RC,
            scq=queue.raw,
            rcq=queue.raw,
            cap=cap,
            sq_sig_all=0,
            pd=device.pd,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_WRITE | enums.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
        )
        attributes = api.QPAttr(port_num=device.port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        try:
            # With attributes it comes back in INIT.
            self._qp = api.QPEx(device.context, init, attributes)
        except api.error as error:
            self._free()
            raise Unavailable(f"{device.name} gives no queue pair: {error}") from None
        self.number = int(self._qp.qp_num)
        self._native = NativePair.of(api.native, self._qp, queue.native, self.number)

    def connect(self, remote: Remote) -> None:
        """INIT → RTR → RTS. Raises Unavailable."""
        api, enums, port, options = self._api, self._api.enums, self._device.port, self._device.options
        attributes = api.QPAttr(port_num=port.number)
        # pyverbs wants the access flags on every way up.
        attributes.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        attributes.path_mtu = min(port.mtu, remote.mtu)
        attributes.dest_qp_num = remote.number
        attributes.rq_psn = remote.psn
        attributes.sq_psn = self.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = MAX_RD_ATOMIC
        attributes.min_rnr_timer = RNR_TIMER
        attributes.timeout = options.timeout_exponent
        attributes.retry_cnt = options.retry_count
        attributes.rnr_retry = RNR_RETRY
        routed = port.link_layer == LINK_ETHERNET or any(remote.gid)
        if routed:
            route = api.GlobalRoute(dgid=api.GID(gid_text(remote.gid)), sgid_index=port.gid_index, hop_limit=HOP_LIMIT)
            attributes.ah_attr = api.AHAttr(gr=route, is_global=1, port_num=port.number, dlid=remote.lid)
        else:
            attributes.ah_attr = api.AHAttr(is_global=0, port_num=port.number, dlid=remote.lid)
        try:
            self._qp.to_rts(attributes)
        except api.error as error:
            raise Unavailable(f"a queue pair cannot be connected: {error}") from None

    def post_receives(self, count: int) -> None:
        """Post so many, all alike."""
        for _ in range(count):
            self._qp.post_recv(self._receive)

    def post_run(self, run: int, rows: Rows, entry: int, mail: Memory, target: int, rkey: int, imm: int) -> None:
        """Plain writes, then the write-with-immediate of 8 bytes from `entry` to `target`; only that one is signalled
        (an error is told in any case). The batch is one call to the driver."""
        if self._native is not None:
            code = self._native.post_run(
                rows,
                request_id(KIND_INNER, self.place, run),
                request_id(KIND_CLOSE, self.place, run),
                self._signaled,
                entry,
                mail.lkey,
                target,
                rkey,
                imm,
            )
            if code:
                raise self._api.error("posting failed", code)
            return
        qp, sge = self._qp, self._sge
        write, set_sge = qp.wr_rdma_write, qp.wr_set_sge
        qp.wr_start()
        qp.wr_id = request_id(KIND_INNER, self.place, run)
        qp.wr_flags = 0
        key = -1
        for src, lkey, dst, remote_key, nbytes in each(rows):
            write(remote_key, dst)
            sge.addr = src
            sge.length = nbytes
            if lkey != key:
                key = sge.lkey = lkey
            set_sge(sge)
        self._closing(request_id(KIND_CLOSE, self.place, run), rkey, target, imm)
        sge.addr = entry
        sge.length = 8
        sge.lkey = mail.lkey
        qp.wr_set_sge(sge)
        qp.wr_complete()

    def post_word(self, sequence: int, word: int) -> None:
        """A write-with-immediate of no bytes: 32 bits for the other end."""
        qp, sge = self._qp, self._sge
        qp.wr_start()
        self._closing(request_id(KIND_WORD, self.place, sequence), 0, 0, word)
        sge.addr = sge.length = sge.lkey = 0
        qp.wr_set_sge(sge)
        qp.wr_complete()

    def fail(self) -> None:
        """To ERR: everything posted is flushed. Idempotent."""
        if self.open:
            enums = self._api.enums
            attributes = self._api.QPAttr(qp_state=enums.IBV_QPS_ERR)
            with contextlib.suppress(self._api.error):
                self._qp.modify(attributes, enums.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it: when this returns the device touches no memory for it any more. Idempotent."""
        if self.open:
            self._native = None
            # Where the driver refuses, it is not closed.
            self._qp.close()
            self.open = False
            self._free()

    def _closing(self, number: int, rkey: int, target: int, imm: int) -> None:
        qp = self._qp
        qp.wr_id = number
        qp.wr_flags = self._signaled
        qp.wr_rdma_write_imm(rkey, target, imm)

    def _free(self) -> None:
        # pyverbs leaks these unless they are closed, once.
        self._receive.close()
        self._sink.close()
        self._sge.close()
