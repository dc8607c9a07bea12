"""KV that travels through pages in host memory, where the sidecar's transports do not reach the GPU's.

The sidecar knows the staging pages alone: its layout has as many pages as there are of them, and descriptors and page
lists name them. A transfer's pages get staging pages one to one. The source copies a layer's pages to staging and rings
the doorbell behind that copy; the destination copies what has landed to the device before the sequence joins.

Torch-free: bytes are moved by two backends of `kvmesh.engine.nvlink`, which write to host memory as they would to a
peer's, and to the doorbell as to a peer's counter. On CPU (`HostBackend`) this serves for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmesh.engine.failures import first_line
from kvmesh.engine.nvlink.backend import Backend, Batch, GroupRows
from kvmesh.engine.nvlink.steps import places_of
from kvmesh.errors import DeadlineExceeded, Internal, KvmeshError, TooLarge, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.pool import PagePool
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell, StepRecord

log = logging.getLogger(__name__)

# Between two looks at a copy: it takes milliseconds, and whoever waits is no step.
LOOK_S = (0.0002, 0.002)


class QueuedBell(Doorbell):
    """The doorbell as the engine core counts it: rings that are queued. What the sidecar sees follows on the stream."""

    def __init__(self) -> None:
        super().__init__(bytearray(DOORBELL_BYTES))

    def advance(self, value: int) -> None:
        """Rings up to this value are spoken for."""
        self._cell[0] = max(value, self._cell[0])


@dataclass(eq=False, slots=True)
class Lease:
    """Staging pages of one transfer: pages[i] stands for device_pages[i], in every layer and group."""

    serial: int
    pages: list[int]
    device_pages: list[int]
    transfer_id: int | None = None
    # Nothing more is copied from the device.
    closed: bool = False
    # Copies were queued, on that stream.
    out: bool = False
    into: bool = False
    returned: bool = False


@dataclass(eq=False, slots=True)
class _Waiter:
    serial: int
    need: int
    granted: asyncio.Future[list[int]] = field(repr=False)


class Staging:
    """Pages are taken and given back on the event loop; `step` and its layers are the engine thread's. A `StepPoster`
    that rings by itself: the runner must not. A step without a record rings nothing: the next record's values begin
    behind it.

    device, host: where the regions of each group begin, as the backends' kernels address them; bell: the doorbell's
    counter likewise. out and into: a stream for each direction, so that what lands does not wait for a step.
    """

    def __init__(
        self,
        layout: KvLayout,
        staged: KvLayout,
        *,
        device: Mapping[str, int],
        host: Mapping[str, int],
        bell: int,
        out: Backend,
        into: Backend,
    ) -> None:
        self.layout = layout
        self.staged = staged
        self.pool = PagePool(staged.num_pages)
        self.bell = QueuedBell()
        self._places = places_of(layout)
        self._device = dict(device)
        self._host = dict(host)
        self._address = np.array([bell], dtype=np.int64)
        self._out = out
        self._into = into
        self._serials = itertools.count(1)
        self._waiters: deque[_Waiter] = deque()
        # Guards what both threads use: leases' flags, transfers, and the stream out of the device.
        self._lock = threading.Lock()
        self._transfers: dict[int, Lease] = {}
        # Called where a stream has failed: no copy will ever end.
        self.on_failed: Callable[[str], None] | None = None

    # -- pages, on the event loop

    async def take(self, device_pages: Sequence[int], timeout_s: float) -> Lease:
        """Staging pages for these, first come, first served. Raises TooLarge for more than there are at all,
        DeadlineExceeded."""
        need = len(device_pages)
        if need > self.pool.total:
            raise TooLarge(
                f"{need} pages do not fit the {self.pool.total} of host memory: raise staging_pages",
                details={"field": "staging_pages"},
            )
        waiter = _Waiter(next(self._serials), need, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(timeout_s):
                return Lease(waiter.serial, await waiter.granted, list(device_pages))
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.pool.release(waiter.serial)
            self._grant()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no {need} pages of host memory became free in time") from None
            raise

    def expose(self, lease: Lease, *, for_write: bool) -> None:
        """The sidecar, or a peer, may use the pages from now on, until `give_back`."""
        self.pool.expose(lease.serial, lease.serial, lease.pages, for_write=for_write)

    def draining(self, lease: Lease) -> None:
        """Given up; they may still be used. Idempotent."""
        if not lease.returned:
            self.pool.drain(lease.serial, lease.serial)

    async def give_back(self, lease: Lease) -> None:
        """Nobody else uses the pages, or will: free once no copy does either. Idempotent, also while it waits.

        Where a device has failed that is never known: its pages stay away, as the engine does.
        """
        with self._lock:
            lease.closed = True
            if lease.transfer_id is not None:
                self._transfers.pop(lease.transfer_id, None)
            with self._telling():
                marks = [(b, b.mark()) for b, used in ((self._out, lease.out), (self._into, lease.into)) if used]
        for backend, mark in marks:
            await self._reached(backend, mark)
        if not lease.returned:
            lease.returned = True
            self.pool.settle(lease.serial, lease.serial)
            self.pool.release(lease.serial)
            self._grant()

    def _grant(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.granted.done():
                pages = self.pool.allocate(waiter.serial, waiter.need)
                if pages is None:
                    return
                waiter.granted.set_result(pages)
            self._waiters.popleft()

    # -- whole transfers, on the event loop

    async def fill(self, lease: Lease, count: int) -> None:
        """Source: the first `count` pages hold their KV already; returns when it is in staging, all layers."""
        if count:
            with self._lock:
                lease.out = True
                mark = self._copy(self._out, lease, count, to_device=False)
            await self._reached(self._out, mark)

    async def land(self, lease: Lease) -> None:
        """Destination: every byte is in staging; returns when it is on the device, all layers.

        Waits for the copy on the host: a step that waited on the device would hold the whole batch up.
        """
        with self._lock:
            lease.into = True
            mark = self._copy(self._into, lease, len(lease.pages), to_device=True)
        await self._reached(self._into, mark)

    def start(self, lease: Lease, transfer_id: int) -> None:
        """Source: steps that name this transfer copy its pages. Before the core hears of it."""
        with self._lock:
            lease.transfer_id = transfer_id
            self._transfers[transfer_id] = lease

    def _copy(self, backend: Backend, lease: Lease, count: int, *, to_device: bool) -> object:
        with self._telling():
            return self._queue(backend, lease, count, to_device=to_device)

    def _queue(self, backend: Backend, lease: Lease, count: int, *, to_device: bool) -> object:
        pairs = [(lease, 0, count)]
        groups = [self._rows(group.name, pairs, to_device=to_device) for group in self.layout.groups]
        nothing = np.empty(0, dtype=np.int64)
        prepared = backend.prepare(Batch(groups, nothing, np.empty((len(groups), 0), dtype=np.int64)))
        if not to_device:
            # What the prefix cache holds may have been queued a moment ago.
            backend.after_compute()
        for number, group in enumerate(self.layout.groups):
            backend.launch(prepared, number, 0, group.num_layers, number)
        return backend.mark()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What a stream does not take, or tell: the device has failed."""
        try:
            yield
        except KvmeshError:
            raise
        except Exception as error:
            if self.on_failed is not None:
                self.on_failed(f"staging: a stream has failed: {first_line(error)}")
            raise Unavailable(f"a stream between GPU and host has failed: {first_line(error)}") from error

    async def _reached(self, backend: Backend, mark: object) -> None:
        """Until everything before the mark is done."""
        started = time.monotonic()
        while True:
            with self._telling():
                if backend.reached(mark):
                    return
            # An eighth of what it has taken so far.
            await asyncio.sleep(min(max((time.monotonic() - started) / 8, LOOK_S[0]), LOOK_S[1]))

    def _rows(self, group: str, claims: Sequence[tuple[Lease, int, int]], *, to_device: bool) -> GroupRows | None:
        """A row a page, for layer 0 of the group; `claims` are (lease, first page, pages)."""
        here: list[int] = []
        there: list[int] = []
        for lease, first, count in claims:
            here += lease.device_pages[first : first + count]
            there += lease.pages[first : first + count]
        if not here:
            return None
        size = self.layout.page_bytes(group)
        device = self._device[group] + np.array(here, dtype=np.int64) * size
        host = self._host[group] + np.array(there, dtype=np.int64) * size
        strides = (self.layout.layer_stride(group), self.staged.layer_stride(group))
        src, dst = (host, device) if to_device else (device, host)
        dst_stride, src_stride = strides if to_device else strides[::-1]
        lengths, dst_strides = (np.full(len(here), value, dtype=np.int64) for value in (size, dst_stride))
        return GroupRows(src, dst, lengths, dst_strides, src_stride)

    # -- steps, on the engine's thread

    def step(self, record: StepRecord) -> StagedStep:
        """Begin a step: its layers' pages are copied and the doorbell rung behind them, whatever becomes of them."""
        if record.num_layers != len(self._places):
            raise Internal(f"a step of {record.num_layers} layers, the model has {len(self._places)}")
        claims = []
        with self._lock:
            for entry in record.entries:
                lease = self._transfers.get(entry.transfer_id)
                if lease is not None:
                    claims.append((lease, entry.first_page, entry.num_pages))
        self.bell.advance(record.first_value + record.num_layers - 1)
        return StagedStep(self, record.first_value, claims)

    def close(self) -> None:
        """End both streams; nothing is under way."""
        self._out.close()
        self._into.close()


class StagedStep:
    """`StepPost`: each layer once, in order, when its KV is queued on the engine's stream (on CPU: is in the pages)."""

    def __init__(self, staging: Staging, first_value: int, claims: list[tuple[Lease, int, int]]) -> None:
        self._staging = staging
        self._first = first_value
        self._claims = claims
        self._live = 0
        self._prepared: object = None
        self._prepared_at = 0

    def layer(self, number: int) -> None:
        """Queue the copy and the ring behind it; returns at once."""
        staging = self._staging
        place = staging._places[number]
        with staging._lock:
            live = [claim for claim in self._claims if not claim[0].closed]
            if self._prepared is None or len(live) != self._live:
                groups = [staging._rows(group.name, live, to_device=False) for group in staging.layout.groups]
                values = np.arange(self._first + number, self._first + len(staging._places), dtype=np.int64)
                self._prepared = staging._out.prepare(Batch(groups, staging._address, values.reshape(-1, 1)))
                self._prepared_at = number
                self._live = len(live)
            for lease, _, _ in live:
                lease.out = True
            staging._out.after_compute()
            staging._out.launch(self._prepared, place.position, place.index, 1, number - self._prepared_at)
