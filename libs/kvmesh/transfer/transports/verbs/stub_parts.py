"""The parts of a fake pyverbs that every kind of queue pair uses: device, registrations, completion queues.

Stricter than a device: what one would let pass or punish by a crash is written down in `StubWorld.violations`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvmesh.transfer.transports.verbs.shim import Api

SUCCESS, LOC_PROT, FLUSHED, REM_ACCESS, RETRY_EXCEEDED, RNR_EXCEEDED = 0, 4, 5, 10, 12, 13
RECEIVED = 129
IPV4_GID = "0000:0000:0000:0000:0000:ffff:7f00:0001"
REMOTE_WRITE = 2


class StubError(Exception):
    """What pyverbs' calls raise. error_code: an errno."""

    def __init__(self, text: str, error_code: int = -1) -> None:
        super().__init__(f"{text}. Errno: {error_code}" if error_code >= 0 else text)
        self.error_code = error_code


@dataclass(slots=True)
class StubSge:
    """A scatter entry."""

    addr: int = 0
    length: int = 0
    lkey: int = 0
    closed: bool = False
    world: StubWorld | None = None

    def close(self) -> None:
        """Once."""
        if self.closed and self.world is not None:
            self.world.violations.append("an SGE closed twice")
        self.closed = True


@dataclass(slots=True)
class StubCompletion:
    """A WC."""

    wr_id: int
    status: int
    opcode: int = 0
    imm_data: int = 0
    byte_len: int = 0
    src_qp: int = 0
    slid: int = 0


class StubPair:
    """What the parts know of a queue pair. free: places of its send queue; gone: its completions make polling fail."""

    queue: StubCq
    free: int
    gone: bool = False


@dataclass(slots=True, eq=False)
class StubWorld:
    """Everything that the fake devices of one test share. hold: nothing moves until `run`; move: copy bytes. Names of
    devices are for all ends of a test: one that is down is down at each."""

    hold: bool = False
    move: bool = True
    # Whether devices and their kernel take dma-bufs.
    dmabufs: bool = True
    # Devices whose port is down.
    down: set[str] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    keys: itertools.count[int] = field(default_factory=lambda: itertools.count(1000))
    regions: dict[int, StubMr] = field(default_factory=dict)
    # A mover and a loop may both drive it.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def pairs(self) -> Iterable[StubPair]:
        """Queue pairs that are not destroyed."""
        raise NotImplementedError

    def names_memory(self, lkey: int) -> bool:
        """Whether a posted request does."""
        raise NotImplementedError

    def memory(self, key: int, address: int, length: int) -> StubMr | None:
        """The registration that covers it."""
        region = self.regions.get(key)
        if region is None or address < region.base or address + length > region.base + region.length:
            return None
        return region

    @property
    def open_objects(self) -> int:
        """Queue pairs and registrations that are not closed."""
        return len(list(self.pairs())) + len(self.regions)

    def parts(self, context: Callable[[str], StubContext], devices: tuple[str, ...], pair: Any) -> Api:
        """A pyverbs. context: opens a device by name; pair: makes a QPEx."""

        def opened(name: str) -> StubContext:
            if name not in devices:
                raise StubError(f"no device {name}")
            return context(name)

        return Api(
            version="59",
            get_device_list=lambda: [SimpleNamespace(name=name.encode()) for name in devices],
            Context=opened,
            PD=lambda context: StubPd(context),
            MR=lambda pd, length, access, address: StubMr(pd, address, length, access),
            DmaBufMR=_dmabuf_mr,
            CompChannel=lambda context: StubChannel(),
            CQ=lambda context, entries, _, channel, vector: StubCq(self, entries, channel),
            QPEx=pair,
            QPInitAttrEx=_fields,
            QPCap=_fields,
            QPAttr=_fields,
            AHAttr=_fields,
            GlobalRoute=_fields,
            GID=lambda text: SimpleNamespace(gid=text),
            SGE=lambda addr, length, lkey: StubSge(addr, length, lkey, world=self),
            RecvWR=lambda wr_id, num_sge, sg, next_wr=None: SimpleNamespace(
                wr_id=wr_id, sge=sg[0], next_wr=next_wr, close=lambda: None
            ),
            enums=ENUMS,
            error=StubError,
            make_channel=_make_channel,
        )

    def copy(self, target: int, source: int, length: int, into: StubMr | None, out: StubMr | None) -> None:
        """Move bytes, as far as they have memory here."""
        if length and self.move and into is not None and out is not None and into.place and out.place:
            ctypes.memmove(into.place + target - into.base, out.place + source - out.base, length)


class StubContext:
    """A device with one port."""

    num_comp_vectors = 1

    def __init__(self, world: StubWorld, active: bool, max_cqe: int, name: str = "") -> None:
        self.world = world
        self.name = name
        self.objects = 0
        self._active = active
        self._max_cqe = max_cqe

    def query_device(self) -> Any:
        """Limits."""
        return SimpleNamespace(max_qp_wr=1 << 14, max_cqe=self._max_cqe)

    def query_port(self, number: int) -> Any:
        """Ethernet, 4096 bytes."""
        active = self._active and self.name not in self.world.down
        return SimpleNamespace(state=4 if active else 1, link_layer=2, gid_tbl_len=3, lid=0, active_mtu=5)

    def query_gid(self, port: int, index: int) -> Any:
        """Link-local, empty, IPv4."""
        texts = ("fe80:0000:0000:0000:0200:00ff:fe00:0000", ":".join(["0000"] * 8), IPV4_GID)
        return SimpleNamespace(gid=texts[index])

    def query_gid_type(self, port: int, index: int) -> int:
        """RoCE v2."""
        return 1

    def close(self) -> None:
        """Last of all."""
        if self.objects:
            self.world.violations.append("a device closed with queue pairs or registrations open")


class StubPd:
    """A protection domain; nothing to it."""

    def __init__(self, context: StubContext) -> None:
        self.context = context

    def close(self) -> None:
        """After the registrations."""
        if self.context.objects:
            self.context.world.violations.append("a protection domain closed with queue pairs or registrations open")


class StubMr:
    """A registration. base: what its first byte is in work requests; place: where that is in this process, 0 = nowhere.
    mapping: kept as long."""

    def __init__(
        self, pd: StubPd, base: int, length: int, access: int, place: int | None = None, mapping: object = None
    ) -> None:
        self.place = base if place is None else place
        self._mapping = mapping
        self.context = pd.context
        self.context.objects += 1
        self._world = world = pd.context.world
        self.base, self.length, self.access = base, length, access
        self.lkey = self.rkey = next(world.keys)
        world.regions[self.lkey] = self

    def close(self) -> None:
        """No posted request may name it."""
        if self._world.regions.pop(self.lkey, None) is None:
            self._world.violations.append("memory deregistered twice")
        self.context.objects -= 1
        if self._world.names_memory(self.lkey):
            self._world.violations.append("memory deregistered under a posted request")


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

    def __init__(self, world: StubWorld, entries: int, channel: StubChannel) -> None:
        self._world = world
        self._entries = entries
        self._channel = channel
        self._armed = False
        self._found: deque[tuple[StubCompletion, StubPair, int]] = deque()
        self.unacknowledged = 0
        self.open = True

    def put(self, completion: StubCompletion, pair: StubPair, slots: int) -> None:
        """A completion comes."""
        if not self.open:
            return
        if len(self._found) == self._entries:
            self._world.violations.append("a completion queue overflowed")
        self._found.append((completion, pair, slots))
        if self._armed:
            self._armed = False
            os.eventfd_write(self._channel.fd, 1)

    def poll(self, limit: int) -> tuple[int, list[StubCompletion]]:
        """As pyverbs."""
        found: list[StubCompletion] = []
        while self._found and len(found) < limit:
            completion, pair, slots = self._found.popleft()
            if pair.gone:
                raise StubError("a completion of a queue pair that is destroyed", 22)
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
            self._world.violations.append("a completion queue closed with events that were not acknowledged")
        if any(pair.queue is self for pair in self._world.pairs()):
            self._world.violations.append("a completion queue closed before its queue pairs")


ENUMS = SimpleNamespace(
    IBV_ACCESS_LOCAL_WRITE=1,
    IBV_ACCESS_REMOTE_WRITE=REMOTE_WRITE,
    IBV_PORT_ACTIVE=4,
    IBV_GID_TYPE_SYSFS_ROCE_V2=1,
    IBV_SEND_SIGNALED=2,
    IBV_QPT_RC=2,
    IBV_QPT_DRIVER=255,
    IBV_QP_INIT_ATTR_PD=1,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS=64,
    IBV_QP_EX_WITH_RDMA_WRITE=1,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM=2,
    IBV_QPS_RTS=3,
    IBV_QPS_ERR=6,
    IBV_QP_STATE=1,
    IBV_QP_SQ_PSN=1 << 16,
    IBV_QP_RNR_RETRY=1 << 11,
    IBV_WC_RECV_RDMA_WITH_IMM=RECEIVED,
)


def _dmabuf_mr(pd: StubPd, length: int, access: int, dmabuf: int, offset: int) -> StubMr:
    """Addressed by offset. A memfd serves as one, and has memory; what cannot be mapped has none."""
    if not pd.context.world.dmabufs:
        raise StubError("Failed to register a dma-buf MR", errno.EOPNOTSUPP)
    try:
        mapping = mmap.mmap(dmabuf, offset + length)
    except (OSError, ValueError):
        return StubMr(pd, offset, length, access, 0)
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + offset
    return StubMr(pd, offset, length, access, place, mapping)


def _make_channel(context: StubContext) -> tuple[StubChannel, int]:
    channel = StubChannel()
    return channel, channel.fd


def _fields(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)
