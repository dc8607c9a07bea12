"""A sidecar pair in one process: same interface as `SidecarClient`, pages copied between regions, faults on command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.worker.context import Identity
from kvmesh.engine.worker.memory import KvMemory
from kvmesh.errors import TransferFailed, Unavailable
from kvmesh.kv.layout import group_view
from kvmesh.kv.ring import Doorbell, StepRing
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.handles import SlotHandle, SlotResult, TransferHandle
from kvmesh.transfer.tail import TailBuffer


@dataclass(eq=False)
class FakeSlot:
    """Destination side of one expectation."""

    handle: SlotHandle
    client: FakeSidecar
    received: int = 0
    closed: bool = False
    writer: FakeTransfer | None = None

    def write(self, nbytes: int) -> None:
        self.received += nbytes
        if self.received == self.handle.expected_bytes and not self.closed and not self.handle.completed.done():
            self.handle.completed.set_result(SlotResult(self.received, self.client.lands_by, 1.0))
            self.handle.drained.set_result(None)

    def fail(self, reason: str) -> None:
        if not self.handle.completed.done():
            self.handle.completed.set_exception(TransferFailed(reason))
            self.handle.completed.exception()
        self.closed = True


@dataclass(eq=False)
class FakeTransfer:
    """Source side of one transfer."""

    handle: TransferHandle
    slot: FakeSlot
    source: FakeSidecar
    descriptor: pb.Descriptor
    pages: Mapping[str, Sequence[int]]
    sent: int = 0
    stopped: bool = False
    asked: int = 0

    def copy(self, first: int, count: int) -> None:
        """Pages [first, +count) of every group, all layers."""
        if self.stopped:
            return
        nbytes = 0
        for group in self.descriptor.groups:
            name = group.group
            source = self.source.memory
            src = group_view(source.shared_regions[name].buf, source.shared_layout, name)
            target = self.slot.client.memory
            dst = group_view(target.shared_regions[name].buf, target.shared_layout, name)
            for i in range(first, first + count):
                dst[:, group.pages[i]] = src[:, self.pages[name][i]]
                nbytes += src.shape[0] * src.shape[2]
        self.sent += nbytes
        self.slot.write(nbytes)
        if self.sent == self.descriptor.expected_bytes and not self.handle.done.done():
            self.handle.done.set_result(self.sent)

    def ask_stop(self, reason: str) -> None:
        """Write nothing more; drained now, or when the source is let."""
        self.stopped = True
        self.asked += 1
        if self.source.hold_stops:
            self.source.waiting.append(lambda: self.stop(reason))
        else:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        self.stopped = True
        if not self.handle.done.done():
            self.handle.done.set_exception(TransferFailed(reason))
            self.handle.done.exception()
        self.slot.fail(reason)
        self.slot.client.drained(self.slot)


@dataclass(eq=False)
class FakeSidecar:
    """One engine's client. Faults: `hold_writes` (nothing arrives while set), `hold_drains`, `refuse_start`."""

    fabric: Fabric
    engine_id: str
    incarnation: int
    memory: KvMemory
    control_address: str = ""
    sidecar_id: str = "fake"
    sidecar_incarnation: int = 1
    region_infos: list[pb.RegionInfo] = field(default_factory=list)
    transports: list[str] = field(default_factory=lambda: ["fake"])
    lands_by: str = "fake"
    hold_writes: bool = False
    hold_drains: bool = False
    hold_stops: bool = False
    refuse_start: str = ""
    refuse_open: str = ""
    opened: int = 0
    slots: dict[int, FakeSlot] = field(default_factory=dict)
    transfers: dict[int, FakeTransfer] = field(default_factory=dict)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    given_up: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = self.memory.shared_layout
        self.tails: tuple[TailBuffer, ...] = ()
        self.control_address = f"127.0.0.1:{10_000 + len(self.fabric.clients)}"
        self.region_infos = [
            pb.RegionInfo(group=name, rank=0, nbytes=region.nbytes, key=7)
            for name, region in self.memory.shared_regions.items()
        ]
        self._loop = asyncio.get_running_loop()
        self._ring = StepRing(self.memory.ring_region.buf)
        self._doorbell = Doorbell(self.memory.doorbell_region.buf)
        self._reader: asyncio.Task[None] | None = None
        self._notified = asyncio.Event()
        self.open_gate, self.start_gate = asyncio.Event(), asyncio.Event()
        self.open_gate.set()
        self.start_gate.set()
        self.fabric.clients[self.control_address] = self

    async def open_slot(self, **asked: Any) -> SlotHandle:
        # The sidecar has the message: that the caller gives up changes nothing there.
        return await asyncio.shield(asyncio.ensure_future(self._open_slot(**asked)))

    async def _open_slot(
        self,
        *,
        expected_bytes: int,
        groups: Mapping[str, Sequence[int]],
        request_id: str,
        ttl_s: float,
        traceparent: str = "",
        num_tokens: int = 0,
    ) -> SlotHandle:
        await self.open_gate.wait()
        if self.refuse_open:
            raise Unavailable(self.refuse_open)
        self.opened += 1
        self.traceparents.append(traceparent)
        loop = asyncio.get_running_loop()
        handle = SlotHandle(self.opened % 4096, self.opened, expected_bytes, request_id, 1, loop.create_future(),
                            loop.create_future())  # fmt: skip
        self.slots[handle.slot] = FakeSlot(handle, self)
        return handle

    async def close_slot(self, handle: SlotHandle, reason: str) -> None:
        slot = self.slots[handle.slot]
        slot.fail(reason)
        if slot.writer is not None:
            slot.writer.ask_stop(reason)
        else:
            self.drained(slot)

    def drained(self, slot: FakeSlot) -> None:
        def settle() -> None:
            if not slot.handle.drained.done():
                slot.handle.drained.set_result(None)

        if self.hold_drains:
            self.waiting.append(settle)
        else:
            settle()

    def let_drain(self) -> None:
        self.hold_drains = False
        for settle in self.waiting:
            settle()
        self.waiting.clear()

    async def start_transfer(self, *args: Any, **asked: Any) -> TransferHandle:
        return await asyncio.shield(asyncio.ensure_future(self._start_transfer(*args, **asked)))

    async def _start_transfer(
        self,
        descriptor: pb.Descriptor,
        pages: Mapping[str, Sequence[int]],
        *,
        ready_pages: int,
        traceparent: str = "",
    ) -> TransferHandle:
        await self.start_gate.wait()
        if self.refuse_start:
            raise Unavailable(self.refuse_start)
        slot = self.fabric.clients[descriptor.control_address].slots[descriptor.slot]
        assert slot.handle.generation == descriptor.generation
        if slot.closed:
            raise TransferFailed("the slot is closed")
        self.fabric.serial += 1
        self.traceparents += [traceparent, descriptor.traceparent]
        handle = TransferHandle(self.fabric.serial, "fake", asyncio.get_running_loop().create_future())
        transfer = FakeTransfer(handle, slot, self, descriptor, pages)
        slot.writer = transfer
        self.transfers[handle.transfer_id] = transfer
        if ready_pages:
            self._write(transfer, 0, ready_pages)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_ring())
        return handle

    def give_up_start(self, descriptor: pb.Descriptor, reason: str) -> None:
        """Heard; the answer comes when the gate opens."""
        self.given_up.append((descriptor.slot, descriptor.generation))

    async def cancel_transfer(self, handle: TransferHandle, reason: str) -> None:
        self.transfers[handle.transfer_id].ask_stop(reason)

    def _write(self, transfer: FakeTransfer, first: int, count: int) -> None:
        if self.hold_writes:
            self.waiting.append(lambda: transfer.copy(first, count))
        else:
            transfer.copy(first, count)

    def let_write(self) -> None:
        self.hold_writes = False
        waiting, self.waiting = self.waiting, []
        for write in waiting:
            write()

    def notify_ring(self) -> None:
        self._loop.call_soon_threadsafe(self._notified.set)

    async def _read_ring(self) -> None:
        while True:
            await self._notified.wait()
            self._notified.clear()
            while (record := self._ring.consume()) is not None:
                while self._doorbell.value < record.first_value + record.num_layers - 1:
                    await asyncio.sleep(0.001)
                for entry in record.entries:
                    transfer = self.transfers.get(entry.transfer_id)
                    if transfer is not None:
                        self._write(transfer, entry.first_page, entry.num_pages)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        for slot in self.slots.values():
            slot.fail("the sidecar is gone")
            self.drained(slot)
        for transfer in self.transfers.values():
            if not transfer.handle.done.done():
                transfer.stop("the sidecar is gone")
        self._ring.close()
        self._doorbell.close()


@dataclass(eq=False)
class Fabric:
    """All fake sidecars of a test."""

    clients: dict[str, FakeSidecar] = field(default_factory=dict)
    serial: int = 100


class FakeLink:
    """Stands for `SidecarLink`."""

    def __init__(self, fabric: Fabric, identity: Identity, memory: KvMemory, on_state: Callable[[bool], Any]) -> None:
        self._make = lambda: FakeSidecar(fabric, identity.worker_id, identity.incarnation, memory)
        self._on_state = on_state
        self.sidecar: FakeSidecar | None = None
        self.client: FakeSidecar | None = None

    def start(self) -> None:
        self.client = self.sidecar = self._make()
        self._on_state(True)

    async def lose(self) -> None:
        """The sidecar dies."""
        client, self.client = self.client, None
        if client is not None:
            await client.close()
        self._on_state(False)

    def notify_ring(self) -> None:
        if self.client is not None:
            self.client.notify_ring()

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.close()
