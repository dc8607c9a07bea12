"""What a link needs of the two that it hangs between: an engine's session, and the sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.kv.layout import KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.sidecar.options import SidecarOptions
from kvmesh.transfer.slots import Event, Slot, SlotTable
from kvmesh.transfer.transports.base import EngineMemory, GrantedPages, Transport


@dataclass(slots=True)
class Counters:
    """Of one engine's life; slots have their own."""

    bytes_sent: int = 0
    bytes_received: int = 0
    heartbeat_failures: int = 0
    fences: int = 0


class Session(Protocol):
    """One engine's life, as links see it."""

    memory: EngineMemory
    slots: SlotTable
    counters: Counters
    ending: bool

    def apply(self, events: Sequence[Event]) -> None:
        """Carry out what the slot table says."""

    def expected(self, slot: int, generation: int, source: KvLayout) -> int | None:
        """Bytes that a writer with that layout must send; None: those that the slot was opened with."""

    def granted(self, slot: Slot) -> GrantedPages:
        """Where a slot's writes may land."""

    async def writer_joined(self, link_id: int, hello: pb.PeerHello, pidfd: int) -> None:
        """Another process gets this engine's memory: the engine must know before."""

    def writer_gone(self, link_id: int, reason: str) -> None:
        """And it has let go of it."""


class Host(Protocol):
    """The sidecar, as links see it."""

    options: SidecarOptions
    incarnation: int
    draining: bool
    # Those that could be started; all that the settings name, in their order.
    transports: dict[str, Transport]
    configured: dict[str, Transport]
    mover: Mover

    @property
    def session(self) -> Session | None:
        """That of the present engine."""
