"""A fake of the part of pyverbs that the efa transport uses: SRD between devices of one process, stricter than any.

Order is drawn from a seed: of everything that is under way one is taken at random, be it a write that lands, a
completion that comes to the writer, or one that comes to the destination. What is wrong at the remote end makes the
write complete with the status that EFA's driver has for it, and does not stop the queue pair. What a device would
punish by a crash, a deadlock or lost writes is written down in `violations`.
"""

from __future__ import annotations

import errno
import itertools
import random
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvmesh.transfer.transports.efa.shim import EfaApi
from kvmesh.transfer.transports.verbs.stub_parts import (
    FLUSHED,
    LOC_PROT,
    RECEIVED,
    REM_ACCESS,
    REMOTE_WRITE,
    RNR_EXCEEDED,
    SUCCESS,
    StubCompletion,
    StubContext,
    StubCq,
    StubError,
    StubPair,
    StubPd,
    StubSge,
    StubWorld,
)

LOC_LEN, REM_OP, BAD_QPN, UNRESPONSIVE = 1, 11, 15, 20
CAP_RNR_RETRY, CAP_RDMA_WRITE = 2, 8
ALL_CAPS = CAP_RNR_RETRY | CAP_RDMA_WRITE
NO_HANDLE = 0xFFFF
_RESET, _RTR, _RTS, _ERR = "reset", "rtr", "rts", "err"
_STATE, _SQ_PSN, _RNR = 1, 1 << 16, 1 << 11


@dataclass(slots=True, eq=False)
class _Request:
    wr_id: int
    rkey: int
    target: int
    imm: int
    handle: StubAh | None = None
    qpn: int = 0
    qkey: int = 0
    addr: int = 0
    length: int = 0
    lkey: int = 0


@dataclass(slots=True, eq=False)
class _Event:
    """Something under way. A request that has not landed, or a completion that has not come."""

    pair: StubSrd
    request: _Request | None = None
    completion: StubCompletion | None = None
    slots: int = 0


@dataclass(slots=True, eq=False)
class _Host:
    """One device. handles: number and users by the other device's GID."""

    gid: str
    caps: int
    max_rdma: int
    max_pairs: int
    notifies: bool
    is_efa: bool
    pairs: dict[int, StubSrd] = field(default_factory=dict)
    handles: dict[str, list[int]] = field(default_factory=dict)

    def free_number(self) -> int:
        """The lowest, so that numbers come again at once."""
        return next(number for number in itertools.count(1) if number not in self.pairs)


@dataclass(slots=True, eq=False)
class EfaStubNetwork(StubWorld):
    """Devices that reach one another. flushes: whether ERR flushes what is posted, or only destroying ends it."""

    seed: int = 0
    flushes: bool = False
    fail_after: int | None = None
    fail_status: int = UNRESPONSIVE
    hosts: dict[str, _Host] = field(default_factory=dict)
    _events: list[_Event] = field(default_factory=list)
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def api(
        self,
        *,
        active: bool = True,
        devices: tuple[str, ...] = ("efa0",),
        max_cqe: int = 1 << 15,
        caps: int = ALL_CAPS,
        max_rdma: int = 1 << 30,
        max_pairs: int = 256,
        notifies: bool = True,
        efa: tuple[str, ...] | None = None,
        can_write: bool = True,
    ) -> EfaApi:
        """The pyverbs of another machine. efa: those of its devices that are; notifies: completion channels work."""
        mine: dict[str, _Host] = {}
        for name in devices:
            gid = f"fe80:0000:0000:0000:0000:0000:0000:{len(self.hosts) + 1:04x}"
            is_efa = efa is None or name in efa
            mine[name] = self.hosts[gid] = _Host(gid, caps, max_rdma, max_pairs, notifies, is_efa)

        def context(name: str) -> StubEfaContext:
            if name not in mine:
                raise StubError(f"no device {name}")
            return StubEfaContext(self, active, max_cqe, mine[name])

        def queue(context: StubEfaContext, entries: int, _: None, channel: Any, vector: int) -> StubCq:
            if not context.host.notifies:
                raise StubError("no notifications", errno.EOPNOTSUPP)
            return StubCq(self, entries, channel)

        verbs = self.parts(context, devices, None)
        object.__setattr__(verbs, "CQ", queue)
        return EfaApi(
            verbs=verbs,
            can_write=can_write,
            EfaContext=context,
            EfaAH=StubAh,
            EfaQPInitAttr=SimpleNamespace,
            SRDQPEx=StubSrd,
        )

    def pairs(self) -> Iterable[StubSrd]:
        return [pair for host in self.hosts.values() for pair in host.pairs.values()]

    def names_memory(self, lkey: int) -> bool:
        return any(event.request is not None and event.request.lkey == lkey for event in self._events)

    def names_handle(self, handle: StubAh) -> bool:
        """Whether a posted request does."""
        return any(event.request is not None and event.request.handle is handle for event in self._events)

    @property
    def open_objects(self) -> int:
        """Queue pairs, registrations and address handles that are not closed."""
        return len(list(self.pairs())) + len(self.regions) + sum(len(host.handles) for host in self.hosts.values())

    def add(self, *events: _Event) -> None:
        """They are under way."""
        self._events.extend(events)

    def run(self, limit: int = 1 << 30) -> int:
        """Let up to `limit` of what is under way happen, in random order; returns how many did."""
        done = 0
        with self.lock:
            while done < limit:
                able = [at for at, event in enumerate(self._events) if event.request is None or event.pair.sends]
                if not able:
                    break
                event = self._events.pop(self._random.choice(able))
                done += 1
                if event.request is not None:
                    self._land(event.pair, event.request)
                elif event.completion is not None:
                    event.pair.queue.put(event.completion, event.pair, event.slots)
        return done

    def drop(self, pair: StubSrd, *, flush: bool) -> None:
        """What is under way from or to a queue pair is not any more. flush: what has not landed completes."""
        with self.lock:
            kept = []
            for event in self._events:
                if event.pair is not pair or (flush and event.request is None):
                    kept.append(event)
                elif flush and event.request is not None:
                    pair.queue.put(StubCompletion(event.request.wr_id, FLUSHED), pair, 1)
            self._events = kept

    def _land(self, pair: StubSrd, request: _Request) -> None:
        status = SUCCESS
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after, status = None, self.fail_status
        if status == SUCCESS:
            status = self._try(pair, request)
        self.add(_Event(pair, completion=StubCompletion(request.wr_id, status, opcode=1), slots=1))

    def _try(self, pair: StubSrd, request: _Request) -> int:
        source = pair.host
        local = self.memory(request.lkey, request.addr, request.length)
        if local is None or local.context is not pair.context:
            return LOC_PROT
        if request.length > source.max_rdma:
            return LOC_LEN
        assert request.handle is not None
        host = self.hosts.get(request.handle.gid)
        if host is None:
            return UNRESPONSIVE
        peer = host.pairs.get(request.qpn)
        if peer is None or peer.state not in (_RTR, _RTS):
            return BAD_QPN
        if peer.qkey != request.qkey:
            # Dropped there; nobody answers.
            return UNRESPONSIVE
        if source.gid not in host.handles:
            return REM_OP
        region = self.memory(request.rkey, request.target, request.length)
        if region is None or region.context is not peer.context or not region.access & REMOTE_WRITE:
            return REM_ACCESS
        if not peer.receives:
            self.violations.append("a write with immediate found no receive")
            return RNR_EXCEEDED
        self.copy(request.target, request.addr, request.length, region, local)
        arrived = StubCompletion(
            peer.receives.popleft(),
            SUCCESS,
            opcode=RECEIVED,
            imm_data=socket.htonl(request.imm),
            byte_len=request.length,
            src_qp=pair.qp_num,
            slid=host.handles[source.gid][0],
        )
        self.add(_Event(peer, completion=arrived))
        return SUCCESS


class StubEfaContext(StubContext):
    """A device with one port that has one GID."""

    world: EfaStubNetwork

    def __init__(self, world: EfaStubNetwork, active: bool, max_cqe: int, host: _Host) -> None:
        super().__init__(world, active, max_cqe)
        self.host = host

    def query_efa_device(self) -> Any:
        """What it can do."""
        if not self.host.is_efa:
            raise StubError("Failed to query efa device", errno.EOPNOTSUPP)
        host = self.host
        return SimpleNamespace(max_sq_wr=4096, max_rq_wr=8192, device_caps=host.caps, max_rdma_size=host.max_rdma)

    def query_port(self, number: int) -> Any:
        """No link layer that verbs knows."""
        return SimpleNamespace(state=super().query_port(number).state, link_layer=0, gid_tbl_len=1, lid=0, active_mtu=5)

    def query_gid(self, port: int, index: int) -> Any:
        """Its own."""
        return SimpleNamespace(gid=self.host.gid)


class StubAh:
    """An address handle: the same number for the same device, as long as there is one."""

    def __init__(self, pd: StubPd, attr: Any) -> None:
        context = pd.context
        assert isinstance(context, StubEfaContext)
        self._context = context
        self.gid: str = attr.gr.dgid.gid
        handles = context.host.handles
        if self.gid not in handles:
            taken = {number for number, _ in handles.values()}
            handles[self.gid] = [next(number for number in itertools.count() if number not in taken), 0]
        handles[self.gid][1] += 1
        self.number = handles[self.gid][0]
        self._open = True
        context.objects += 1

    def query_efa_ah(self) -> Any:
        """Its number."""
        return SimpleNamespace(ahn=self.number)

    def close(self) -> None:
        """No posted request may name it."""
        world, handles = self._context.world, self._context.host.handles
        if not self._open:
            world.violations.append("an address handle closed twice")
            return
        if world.names_handle(self):
            world.violations.append("an address handle closed under a posted request")
        self._open = False
        self._context.objects -= 1
        handles[self.gid][1] -= 1
        if not handles[self.gid][1]:
            del handles[self.gid]


class StubSrd(StubPair):
    """An SRD queue pair with QPEx's calls."""

    def __init__(self, context: StubEfaContext, init: Any, kind: Any) -> None:
        self.context = context
        self.world = context.world
        self.host = host = context.host
        if kind.driver_qp_type != 0 or init.qp_type != 255:
            raise StubError("no SRD queue pair", errno.EOPNOTSUPP)
        if len(host.pairs) >= host.max_pairs:
            raise StubError("Failed to create SRD QPEx", errno.ENOMEM)
        context.objects += 1
        self.queue: StubCq = init.scq
        self.free = self.depth = init.cap.max_send_wr
        self.max_receives = init.cap.max_recv_wr
        self.receives: deque[int] = deque()
        self.state = _RESET
        self.qkey = 0
        self.qp_num = host.free_number()
        host.pairs[self.qp_num] = self
        self.wr_id = self.wr_flags = 0
        self._batch: list[_Request] | None = None
        self._error = 0

    @property
    def sends(self) -> bool:
        """Not stopped."""
        return self.state == _RTS

    def to_rtr(self, attributes: Any) -> None:
        """RESET → RTR."""
        self.qkey = attributes.qkey
        self.state = _RTR

    def modify(self, attributes: Any, mask: int) -> None:
        """To RTS or to ERR."""
        if attributes.qp_state == 6 and mask == _STATE:
            self._to_error()
        elif self.state != _RTR or mask & ~_RNR != _STATE | _SQ_PSN:
            raise StubError("Failed to modify QP", errno.EINVAL)
        elif mask & _RNR and not self.host.caps & CAP_RNR_RETRY:
            raise StubError("Failed to modify QP", errno.EOPNOTSUPP)
        else:
            self.state = _RTS

    def post_recv(self, receive: Any) -> None:
        """A chain of receives."""
        while receive is not None:
            if self.state in (_RESET, _ERR):
                raise StubError("Failed to post recv", errno.EINVAL)
            if len(self.receives) >= self.max_receives:
                self.world.violations.append("a receive queue overflowed")
                raise StubError("Failed to post recv", errno.ENOMEM)
            self.receives.append(receive.wr_id)
            receive = receive.next_wr

    def wr_start(self) -> None:
        """The driver takes its lock."""
        if self._batch is not None:
            self.world.violations.append("a batch within a batch: the driver would wait for itself")
        self._batch = []
        self._error = 0

    def wr_abort(self) -> None:
        """And lets it go."""
        self._batch = None

    def wr_rdma_write_imm(self, rkey: int, target: int, imm: int) -> None:
        """A write that takes a receive. imm: host order."""
        assert self._batch is not None
        if self.state != _RTS or self.wr_flags != 2:
            self._error = errno.EINVAL
        elif len(self._batch) == self.free:
            self.world.violations.append("a send queue overflowed")
            self._error = errno.ENOMEM
        self._batch.append(_Request(self.wr_id, rkey, target, imm))

    def wr_set_ud_addr(self, handle: StubAh, qpn: int, qkey: int) -> None:
        """Where to."""
        assert self._batch
        request = self._batch[-1]
        # No more bits than that get into the work request.
        request.handle, request.qpn, request.qkey = handle, qpn & 0xFFFF, qkey

    def wr_set_sge(self, sge: StubSge) -> None:
        """Copied at once, as the real one does."""
        assert self._batch
        request = self._batch[-1]
        request.addr, request.length, request.lkey = sge.addr, sge.length, sge.lkey

    def wr_complete(self) -> None:
        """Post the batch, all of it or nothing."""
        batch, self._batch = self._batch, None
        assert batch is not None
        if any(request.handle is None for request in batch):
            self.world.violations.append("a work request without an address")
            self._error = errno.EINVAL
        if self._error:
            raise StubError("ibv_wr_complete failed", self._error)
        self.free -= len(batch)
        with self.world.lock:
            self.world.requests += len(batch)
            self.world.add(*(_Event(self, request=request) for request in batch))
            if not self.world.hold:
                self.world.run()

    def _to_error(self) -> None:
        if self.state != _ERR:
            self.state = _ERR
            if self.world.flushes:
                self.world.drop(self, flush=True)
                for number in self.receives:
                    self.queue.put(StubCompletion(number, FLUSHED), self, 0)
                self.receives.clear()

    def close(self) -> None:
        """Destroy it; twice would be a crash."""
        if self.host.pairs.pop(self.qp_num, None) is not self:
            self.world.violations.append("a queue pair destroyed twice")
            return
        self.context.objects -= 1
        self.gone = True
        self.state = _ERR
        self.world.drop(self, flush=False)
