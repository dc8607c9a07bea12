"""What an engine holds of its slots and transfers at the sidecar."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple


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
