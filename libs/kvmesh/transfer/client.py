"""The engine's side of its sidecar: one Unix socket, framed protobuf, descriptors of memory passed once.

STUB with the final signatures; the body follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb


class SlotResult(NamedTuple):
    """A completed slot: bytes counted, transport they came by, milliseconds from the writer's bind to the last byte."""

    bytes: int
    transport: str
    elapsed_ms: float


@dataclass(eq=False, slots=True)
class SlotHandle:
    """An expectation registered with the sidecar.

    completed: resolves with SlotResult, or raises TransferFailed (failed, expired, closed by us, sidecar lost).
    drained: resolves once no write can land in the slot's pages any more; it resolves in EVERY case, after
    `completed`, also for a completed slot. It never raises.
    """

    slot: int
    generation: int
    expected_bytes: int
    request_id: str
    sidecar_incarnation: int
    completed: asyncio.Future[SlotResult] = field(repr=False)
    drained: asyncio.Future[None] = field(repr=False)


@dataclass(eq=False, slots=True)
class TransferHandle:
    """A transfer that the sidecar sends. `done` resolves with the bytes written, every write completed; it raises
    TransferFailed once nothing is in flight any more (the source pages are then free to use in either case)."""

    transfer_id: int
    transport: str
    done: asyncio.Future[int] = field(repr=False)


class SidecarClient:
    """One connection to the sidecar, which is this engine's life there. Lives on one asyncio loop; `notify_ring` is the
    only method that other threads may call."""

    control_address: str
    sidecar_id: str
    sidecar_incarnation: int
    region_infos: list[pb.RegionInfo]
    transports: list[str]

    @classmethod
    async def connect(
        cls,
        path: str | Path,
        *,
        engine_id: str,
        incarnation: int,
        layout: KvLayout,
        regions: Mapping[str, Region],
        doorbell: Region,
        ring: Region,
        timeout_s: float,
        on_lost: Callable[[], None],
    ) -> SidecarClient:
        """Register this engine. Raises Unavailable (nobody there, busy), DeadlineExceeded, or what the sidecar refuses."""
        raise NotImplementedError

    async def open_slot(
        self,
        *,
        expected_bytes: int,
        groups: Mapping[str, Sequence[int]],
        request_id: str,
        ttl_s: float,
        traceparent: str = "",
    ) -> SlotHandle:
        """Register an expectation: pages of each group that will be written. Do this before the descriptor leaves."""
        raise NotImplementedError

    async def close_slot(self, handle: SlotHandle, reason: str) -> None:
        """Give a slot up: `completed` raises at once, `drained` resolves later. Idempotent."""
        raise NotImplementedError

    async def start_transfer(
        self,
        descriptor: pb.Descriptor,
        pages: Mapping[str, Sequence[int]],
        *,
        ready_pages: int,
        traceparent: str = "",
    ) -> TransferHandle:
        """Begin to send `pages` (pages[group][0] is block descriptor.first_block). The first `ready_pages` leave at once,
        all layers; the others with step records or `send_pages`. Raises KvmeshError when refused."""
        raise NotImplementedError

    def send_pages(self, handle: TransferHandle, first: int, count: int) -> None:
        """Pages [first, first + count) of the transfer's list are complete in all layers: send them."""
        raise NotImplementedError

    async def cancel_transfer(self, handle: TransferHandle, reason: str) -> None:
        """Stop sending; `handle.done` raises TransferFailed once drained. Idempotent."""
        raise NotImplementedError

    def notify_ring(self) -> None:
        """Wake the sidecar's watcher: call it after publishing a step record (any thread, no wait, never raises)."""
        raise NotImplementedError

    async def close(self) -> None:
        """End this engine's life at the sidecar. Idempotent; `on_lost` is not called."""
        raise NotImplementedError
