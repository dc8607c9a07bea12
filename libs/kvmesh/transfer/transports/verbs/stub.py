"""A fake of the part of pyverbs that the transport uses: one process, no device, stricter than any.

Queue pairs of a `StubNetwork` reach one another by number and move real bytes between registered addresses. What a
device would let pass or punish by a crash is written down in `violations`: a queue beyond its depth, a receive that is
not there, a completion queue that overflows, memory let go of under posted work, anything closed twice or too early.
With `hold` set nothing moves until `run`. `fail_after` makes a coming work request complete with a status.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvmesh.transfer.transports.verbs.shim import Api

SUCCESS, LOC_PROT, FLUSHED, REM_ACCESS, RETRY_EXCEEDED, RNR_EXCEEDED = 0, 4, 5, 10, 12, 13
RECEIVED = 129
_INIT, _RTS, _ERR = "init", "rts", "err"


class StubError(Exception):
    """What pyverbs' calls raise."""


@dataclass(slots=True)
class _Sge:
    addr: int = 0
    length: int = 0
    lkey: int = 0
    closed: bool = False
    network: StubNetwork | None = None

    def close(self) -> None:
        if self.closed and self.network is not None:
            self.network.violations.append("an SGE closed twice")
        self.closed = True


@dataclass(slots=True)
class _Completion:
    wr_id: int
    status: int
    opcode: int = 0
    imm_data: int = 0


@dataclass(slots=True)
class _Request:
    """A posted write. slots: places of the send queue that its polled completion frees."""

    wr_id: int
    signaled: bool
    rkey: int
    target: int
    imm: int | None
    addr: int = 0
    length: int = 0
    lkey: int = 0


@dataclass(slots=True, eq=False)
class StubNetwork:
    """Everything that the fake devices of one test share."""

    hold: bool = False
    fail_after: int | None = None
    fail_status: int = RETRY_EXCEEDED
    move: bool = True
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(100))
    _keys: itertools.count[int] = field(default_factory=lambda: itertools.count(1000))
    _pairs: dict[int, StubQp] = field(default_factory=dict)
    _regions: dict[int, StubMr] = field(default_factory=dict)
    _posted: deque[StubQp] = field(default_factory=deque)
    # A mover and a loop may both drive it.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def api(self, *, active: bool = True, devices: tuple[str, ...] = ("stub0",), max_cqe: int = 1 << 15) -> Api:
        """A pyverbs. active: of the port."""

        def context(name: str) -> StubContext:
            if name not in devices:
                raise StubError(f"no device {name}")
            return StubContext(self, active, max_cqe)

        return Api(
            version="stub",
            get_device_list=lambda: [SimpleNamespace(name=name.encode()) for name in devices],
            Context=context,
            PD=lambda context: StubPd(context),
            MR=lambda pd, length, access, address: StubMr(pd, address, length, access),
            DmaBufMR=lambda pd, length, access, dmabuf, offset: StubMr(pd, 0, length, access),
            CompChannel=lambda context: StubChannel(),
            CQ=lambda context, entries, _, channel, vector: StubCq(self, entries, channel),
            QPEx=lambda context, init, attributes: StubQp(context, init),
            QPInitAttrEx=lambda **fields: SimpleNamespace(**fields),
            QPCap=lambda **fields: SimpleNamespace(**fields),
            QPAttr=lambda **fields: SimpleNamespace(**fields),
            AHAttr=lambda **fields: SimpleNamespace(**fields),
            GlobalRoute=lambda **fields: SimpleNamespace(**fields),
            GID=lambda text: SimpleNamespace(gid=text),
            SGE=lambda addr, length, lkey: _Sge(addr, length, lkey, network=self),
            RecvWR=lambda wr_id, num_sge, sg: SimpleNamespace(wr_id=wr_id, sge=sg[0], close=lambda: None),
            enums=_ENUMS,
            error=StubError,
            make_channel=_make_channel,
        )

    def run(self, limit: int = 1 << 30) -> int:
        """Carry out up to `limit` posted requests, in an order that RC allows; returns how many."""
        done = 0
        with self.lock:
            while self._posted and done < limit:
                pair = self._posted.popleft()
                if pair.pending:
                    pair.carry_out(pair.pending.popleft())
                    done += 1
        return done

    def posted(self, pair: StubQp, count: int) -> None:
        """Requests were handed to a device."""
        with self.lock:
            self._posted.extend([pair] * count)
            if not self.hold:
                self.run()

    def kill(self, *pairs: StubQp) -> None:
        """Break these connections from outside."""
        for pair in pairs:
            pair.to_error()

    def memory(self, key: int, address: int, length: int) -> StubMr | None:
        """The registration that covers it."""
        region = self._regions.get(key)
        if region is None or address < region.base or address + length > region.base + region.length:
            return None
        return region

    @property
    def open_objects(self) -> int:
        """Queue pairs and registrations that are not closed."""
        return len(self._pairs) + len(self._regions)


class StubContext:
    """A device with one port."""

    num_comp_vectors = 1

    def __init__(self, network: StubNetwork, active: bool, max_cqe: int) -> None:
        self.network = network
        self.objects = 0
        self._active = active
        self._max_cqe = max_cqe

    def query_device(self) -> Any:
        """Limits."""
        return SimpleNamespace(max_qp_wr=1 << 14, max_cqe=self._max_cqe)

    def query_port(self, number: int) -> Any:
        """Ethernet, 4096 bytes."""
        return SimpleNamespace(state=4 if self._active else 1, link_layer=2, gid_tbl_len=3, lid=0, active_mtu=5)

    def query_gid(self, port: int, index: int) -> Any:
        """Link-local, empty, IPv4."""
        texts = ("fe80:0000:0000:0000:0200:00ff:fe00:0000", ":".join(["0000"] * 8), _IPV4_GID)
        return SimpleNamespace(gid=texts[index])

    def query_gid_type(self, port: int, index: int) -> int:
        """RoCE v2."""
        return 1

    def close(self) -> None:
        """Last of all."""
        if self.objects:
            self.network.violations.append("a device closed with queue pairs or registrations open")


class StubPd:
    """Nothing to it."""

    def __init__(self, context: StubContext) -> None:
        self.context = context

    def close(self) -> None:
        """After the registrations."""
        if self.context.objects:
            self.context.network.violations.append("a protection domain closed with queue pairs or registrations open")


class StubMr:
    """A registration of raw memory."""

    def __init__(self, pd: StubPd, base: int, length: int, access: int) -> None:
        self._context = pd.context
        self._context.objects += 1
        self._network = network = pd.context.network
        self.base, self.length, self.access = base, length, access
        self.lkey = self.rkey = next(network._keys)
        network._regions[self.lkey] = self

    def close(self) -> None:
        """No posted request may name it."""
        if self._network._regions.pop(self.lkey, None) is None:
            self._network.violations.append("memory deregistered twice")
        self._context.objects -= 1
        for pair in self._network._pairs.values():
            if any(request.lkey == self.lkey for request in pair.pending):
                self._network.violations.append("memory deregistered under a posted request")


class StubChannel:
    """A completion channel on an eventfd."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def get_cq_event(self, queue: StubCq) -> None:
        """Take one."""
        os.eventfd_read(self.fd)
        queue.unacknowledged += 1

    def close(self) -> None:
        """Last."""
        os.close(self.fd)


class StubCq:
    """A completion queue that must not overflow."""

    def __init__(self, network: StubNetwork, entries: int, channel: StubChannel) -> None:
        self._network = network
        self._entries = entries
        self._channel = channel
        self._armed = False
        self._found: deque[tuple[_Completion, StubQp, int]] = deque()
        self.unacknowledged = 0
        self.open = True

    def put(self, completion: _Completion, pair: StubQp, slots: int) -> None:
        """A completion comes."""
        if not self.open:
            return
        if len(self._found) == self._entries:
            self._network.violations.append("a completion queue overflowed")
        self._found.append((completion, pair, slots))
        if self._armed:
            self._armed = False
            os.eventfd_write(self._channel.fd, 1)

    def poll(self, limit: int) -> tuple[int, list[_Completion]]:
        """As pyverbs."""
        found: list[_Completion] = []
        while self._found and len(found) < limit:
            completion, pair, slots = self._found.popleft()
            pair.free += slots
            found.append(completion)
        return len(found), found

    def req_notify(self) -> None:
        """One event for the next completion."""
        self._armed = True

    def ack_events(self, count: int) -> None:
        """Without it a device's queue cannot be destroyed."""
        self.unacknowledged -= count

    def close(self) -> None:
        """After its queue pairs."""
        self.open = False
        if self.unacknowledged:
            self._network.violations.append("a completion queue closed with events that were not acknowledged")
        if any(pair.queue is self for pair in self._network._pairs.values()):
            self._network.violations.append("a completion queue closed before its queue pairs")


class StubQp:
    """A reliable connection with QPEx's calls."""

    def __init__(self, context: StubContext, init: Any) -> None:
        self._context = context
        self._context.objects += 1
        self._network = network = context.network
        self.queue: StubCq = init.scq
        self.free = self.depth = init.cap.max_send_wr
        self.max_receives = init.cap.max_recv_wr
        self.receives: deque[int] = deque()
        self.pending: deque[_Request] = deque()
        self.state = _INIT
        self.qp_num = next(network._numbers)
        self._peer = 0
        self._batch: list[_Request] = []
        self._silent = 0
        self.wr_id = self.wr_flags = 0
        network._pairs[self.qp_num] = self

    def to_rts(self, attributes: Any) -> None:
        """INIT → RTS."""
        if self.state != _INIT:
            raise StubError("not in INIT")
        self._peer = attributes.dest_qp_num
        self.state = _RTS

    def modify(self, attributes: Any, mask: int) -> None:
        """Only to ERR."""
        self.to_error()

    def post_recv(self, receive: Any) -> None:
        """One receive."""
        if len(self.receives) >= self.max_receives:
            self._network.violations.append("a receive queue overflowed")
        if self.state == _ERR:
            self.queue.put(_Completion(receive.wr_id, FLUSHED), self, 0)
        else:
            self.receives.append(receive.wr_id)

    def wr_start(self) -> None:
        """A batch begins."""
        self._batch = []

    def wr_rdma_write(self, rkey: int, target: int) -> None:
        """A plain write."""
        self._batch.append(_Request(self.wr_id, bool(self.wr_flags & 2), rkey, target, None))

    def wr_rdma_write_imm(self, rkey: int, target: int, imm: int) -> None:
        """A write that takes a receive. imm: host order."""
        self._batch.append(_Request(self.wr_id, bool(self.wr_flags & 2), rkey, target, imm))

    def wr_set_sge(self, sge: _Sge) -> None:
        """Copied at once, as the real one does."""
        request = self._batch[-1]
        request.addr, request.length, request.lkey = sge.addr, sge.length, sge.lkey

    def wr_complete(self) -> None:
        """Post the batch."""
        count = len(self._batch)
        if count > self.free:
            self._network.violations.append("a send queue overflowed")
            raise StubError("no room in the send queue")
        if self.state == _INIT:
            raise StubError("not connected")
        self.free -= count
        self._network.requests += count
        if self.state == _ERR:
            for request in self._batch:
                self.queue.put(_Completion(request.wr_id, FLUSHED), self, 1)
            return
        self.pending.extend(self._batch)
        self._network.posted(self, count)

    def carry_out(self, request: _Request) -> None:
        """One request reaches the other end, or fails."""
        network = self._network
        peer = network._pairs.get(self._peer)
        status = SUCCESS
        if network.fail_after is not None:
            network.fail_after -= 1
            if network.fail_after < 0:
                network.fail_after, status = None, network.fail_status
        if status == SUCCESS:
            status = self._try(request, peer)
        if status == SUCCESS:
            self._silent += 1
            if request.signaled:
                # Only a polled completion gives the places of the silent ones before it back.
                self.queue.put(_Completion(request.wr_id, SUCCESS), self, self._silent)
                self._silent = 0
            return
        self.queue.put(_Completion(request.wr_id, status), self, self._silent + 1)
        self._silent = 0
        self.to_error()
        if peer is not None and status == REM_ACCESS:
            peer.to_error()

    def _try(self, request: _Request, peer: StubQp | None) -> int:
        network = self._network
        if request.length and network.memory(request.lkey, request.addr, request.length) is None:
            return LOC_PROT
        if peer is None or peer.state != _RTS:
            return RETRY_EXCEEDED
        if request.length and network.memory(request.rkey, request.target, request.length) is None:
            return REM_ACCESS
        if request.imm is not None and not peer.receives:
            network.violations.append("a write with immediate found no receive")
            return RNR_EXCEEDED
        # A dma-buf is addressed from 0 and has no memory here.
        region = network.memory(request.rkey, request.target, request.length)
        if request.length and network.move and region is not None and region.base:
            ctypes.memmove(request.target, request.addr, request.length)
        if request.imm is not None:
            done = _Completion(peer.receives.popleft(), SUCCESS, RECEIVED, socket.htonl(request.imm))
            peer.queue.put(done, peer, 0)
        return SUCCESS

    def to_error(self) -> None:
        """Flush everything posted."""
        with self._network.lock:
            if self.state == _ERR:
                return
            self.state = _ERR
            for request in self.pending:
                self.queue.put(_Completion(request.wr_id, FLUSHED), self, 1)
            self.pending.clear()
            for wr_id in self.receives:
                self.queue.put(_Completion(wr_id, FLUSHED), self, 0)
            self.receives.clear()

    def close(self) -> None:
        """Destroy it; twice would be a crash."""
        if self._network._pairs.pop(self.qp_num, None) is None:
            self._network.violations.append("a queue pair destroyed twice")
        self._context.objects -= 1
        with self._network.lock:
            self.state = _ERR
            self.pending.clear()
            self.receives.clear()


_IPV4_GID = "0000:0000:0000:0000:0000:ffff:7f00:0001"
_ENUMS = SimpleNamespace(
    IBV_ACCESS_LOCAL_WRITE=1,
    IBV_ACCESS_REMOTE_WRITE=2,
    IBV_PORT_ACTIVE=4,
    IBV_GID_TYPE_SYSFS_ROCE_V2=1,
    IBV_SEND_SIGNALED=2,
    IBV_QPT_RC=2,
    IBV_QP_INIT_ATTR_PD=1,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS=64,
    IBV_QP_EX_WITH_RDMA_WRITE=1,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM=2,
    IBV_QPS_ERR=6,
    IBV_QP_STATE=1,
    IBV_WC_RECV_RDMA_WITH_IMM=RECEIVED,
)


def _make_channel(context: StubContext) -> tuple[StubChannel, int]:
    channel = StubChannel()
    return channel, channel.fd
