"""A fake of the part of pyverbs that the transport uses: one process, no device, stricter than any.

Queue pairs of a `StubNetwork` reach one another by number and move real bytes between registered addresses. What a
device would let pass or punish by a crash is written down in `violations`: a queue beyond its depth, a receive that is
not there, a completion queue that overflows, memory let go of under posted work, anything closed twice or too early.
With `hold` set nothing moves until `run`. `fail_after` makes a coming work request complete with a status.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvmesh.transfer.transports.verbs.shim import Api
from kvmesh.transfer.transports.verbs.stub_parts import (
    FLUSHED,
    LOC_PROT,
    RECEIVED,
    REM_ACCESS,
    RETRY_EXCEEDED,
    RNR_EXCEEDED,
    SUCCESS,
    StubCompletion,
    StubContext,
    StubCq,
    StubError,
    StubPair,
    StubSge,
    StubWorld,
)

__all__ = ["RECEIVED", "REM_ACCESS", "RETRY_EXCEEDED", "StubError", "StubNetwork", "StubQp"]
_INIT, _RTS, _ERR = "init", "rts", "err"


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
class StubNetwork(StubWorld):
    """Reliable connections between the fake devices of one test."""

    fail_after: int | None = None
    fail_status: int = RETRY_EXCEEDED
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(100))
    _pairs: dict[int, StubQp] = field(default_factory=dict)
    _posted: deque[StubQp] = field(default_factory=deque)

    def api(self, *, active: bool = True, devices: tuple[str, ...] = ("stub0",), max_cqe: int = 1 << 15) -> Api:
        """A pyverbs. active: of the port."""
        return self.parts(
            lambda name: StubContext(self, active, max_cqe, name),
            devices,
            lambda context, init, attributes: StubQp(context, init),
        )

    def pairs(self) -> Iterable[StubQp]:
        return self._pairs.values()

    def names_memory(self, lkey: int) -> bool:
        return any(request.lkey == lkey for pair in self._pairs.values() for request in pair.pending)

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


class StubQp(StubPair):
    """A reliable connection with QPEx's calls."""

    def __init__(self, context: StubContext, init: Any) -> None:
        self._context = context
        self._context.objects += 1
        assert isinstance(context.world, StubNetwork)
        self._network = network = context.world
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
            self.queue.put(StubCompletion(receive.wr_id, FLUSHED), self, 0)
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

    def wr_set_sge(self, sge: StubSge) -> None:
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
                self.queue.put(StubCompletion(request.wr_id, FLUSHED), self, 1)
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
                self.queue.put(StubCompletion(request.wr_id, SUCCESS), self, self._silent)
                self._silent = 0
            return
        self.queue.put(StubCompletion(request.wr_id, status), self, self._silent + 1)
        self._silent = 0
        self.to_error()
        if peer is not None and status == REM_ACCESS:
            peer.to_error()

    def _try(self, request: _Request, peer: StubQp | None) -> int:
        network = self._network
        if request.length and network.memory(request.lkey, request.addr, request.length) is None:
            return LOC_PROT
        if peer is None or peer.state != _RTS or network.down & {self._context.name, peer._context.name}:
            return RETRY_EXCEEDED
        if request.length and network.memory(request.rkey, request.target, request.length) is None:
            return REM_ACCESS
        if request.imm is not None and not peer.receives:
            network.violations.append("a write with immediate found no receive")
            return RNR_EXCEEDED
        network.copy(
            request.target,
            request.addr,
            request.length,
            network.memory(request.rkey, request.target, request.length),
            network.memory(request.lkey, request.addr, request.length),
        )
        if request.imm is not None:
            done = StubCompletion(peer.receives.popleft(), SUCCESS, RECEIVED, socket.htonl(request.imm))
            peer.queue.put(done, peer, 0)
        return SUCCESS

    def to_error(self) -> None:
        """Flush everything posted."""
        with self._network.lock:
            if self.state == _ERR:
                return
            self.state = _ERR
            for request in self.pending:
                self.queue.put(StubCompletion(request.wr_id, FLUSHED), self, 1)
            self.pending.clear()
            for wr_id in self.receives:
                self.queue.put(StubCompletion(wr_id, FLUSHED), self, 0)
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
