"""The whole of a sidecar but its process: composition, life, status."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from kvmesh.errors import FailedPrecondition, KvmeshError
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import Deadline
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.native.moves import library
from kvmesh.transfer.sends import SendEvent
from kvmesh.transfer.sidecar.door import EngineServer
from kvmesh.transfer.sidecar.engine import EngineSession
from kvmesh.transfer.sidecar.incoming import IncomingLinks
from kvmesh.transfer.sidecar.options import SidecarOptions, make_transport
from kvmesh.transfer.sidecar.outgoing import OutgoingLinks
from kvmesh.transfer.sidecar.threads import ThreadPlaces
from kvmesh.transfer.transports.base import Outbound, Transport

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
# Both processes of a pod are told to stop at the same moment: within this the engine says so too.
LEAVE_WORD_S = 2.0


class Sidecar:
    """Life: `start`, set `control_address`, `listen`, …, `drain`, `close`.

    on_engine(present): the engine came or went (readiness follows it).
    """

    def __init__(self, options: SidecarOptions, on_engine: Callable[[bool], None]) -> None:
        self.options = options
        self.incarnation = secrets.randbits(63) | 1
        self.control_address = ""
        self.draining = False
        self.session: EngineSession | None = None
        self.vacant = asyncio.Event()
        self.vacant.set()
        self.configured: dict[str, Transport] = {name: make_transport(name, options) for name in options.transports}
        # Only those that could be started.
        self.transports: dict[str, Transport] = {}
        self.mover = Mover(on_events=self._on_events, on_broken=self._on_broken, on_engine_fault=self._on_engine_fault)
        self.incoming = IncomingLinks(self)
        self.outgoing = OutgoingLinks(self)
        self._server = EngineServer(self)
        self._places = ThreadPlaces(options.sysfs, enabled=options.pin_threads)
        self._on_engine = on_engine
        # Why the present engine's ring cannot be read any more.
        self.fault = ""

    async def start(self) -> None:
        """Start transports and the mover. Raises FailedPrecondition where no transport can be used."""
        # Compiled now where it has to be, and beside the loop: later an engine would wait for it.
        await asyncio.to_thread(library)
        for name, transport in self.configured.items():
            try:
                await transport.start()
                self.transports[name] = transport
            except KvmeshError as error:
                log.warning("transport %s cannot be used: %s", name, error.message)
        if not self.transports:
            raise FailedPrecondition("no transport can be used")
        self.mover.start()
        self._places.settle(self.mover, self.transports.values(), None)

    async def listen(self) -> None:
        """Let engines in; `control_address` is known by now."""
        await self._server.start()

    # --- the engine's life ---------------------------------------------------------------------------------------

    def engine_joined(self, session: EngineSession) -> None:
        """An engine has registered."""
        self.session = session
        self.fault = ""
        self.vacant.clear()
        self._places.settle(self.mover, self.transports.values(), session.memory)
        self._on_engine(True)

    def engine_ending(self, session: EngineSession) -> None:
        """Its connection is over; nothing new is taken in for it."""
        session.ending = True
        self._on_engine(False)

    def engine_gone(self, session: EngineSession) -> None:
        """Everything of it is let go of: the next may come."""
        if self.session is session:
            self.session = None
            self.vacant.set()

    # --- from the mover ------------------------------------------------------------------------------------------

    def _on_events(self, events: list[SendEvent]) -> None:
        if self.session is not None:
            self.session.on_send_events(events)

    def _on_broken(self, outbound: Outbound, reason: str) -> None:
        self.outgoing.on_broken(outbound, reason)

    def _on_engine_fault(self, reason: str) -> None:
        log.error("the engine's ring cannot be read any more: %s", reason)
        self.fault = reason
        self._on_engine(False)

    # --- status and end ------------------------------------------------------------------------------------------

    def status(self) -> pb.GetStatusResponse:
        """For GetStatus."""
        response = pb.GetStatusResponse(sidecar_id=self.options.sidecar_id, incarnation=self.incarnation)
        for name, transport in self.configured.items():
            usable, why = transport.ready
            response.transports.add(name=name, usable=usable, reason=why)
            response.transports[-1].nics.extend(transport.nics())
            response.transports[-1].waiting = transport.waiting
        for link in self.incoming.links.values():
            response.links.add(
                peer_engine_id=link.hello.engine_id,
                peer_incarnation=link.hello.incarnation,
                direction="in",
                transport=link.transport.name,
                reason=link.reason,
                state=link.state,
                bytes=link.bytes,
                transfers=link.transfers,
                candidates=link.choice.candidates,
                nics=link.inbound.nics() if link.inbound is not None else (),
                waiting=link.transport.waiting,
            )
        for out in self.outgoing.all:
            used = self.transports.get(out.transport)
            response.links.add(
                peer_engine_id=out.engine_id,
                peer_incarnation=out.incarnation,
                direction="out",
                transport=out.transport,
                reason=out.reason,
                state=out.state,
                bytes=out.bytes,
                transfers=out.transfers,
                candidates=out.candidates,
                nics=out.outbound.nics() if out.outbound is not None else (),
                waiting=used.waiting if used is not None else "",
            )
        response.threads.extend(self._places.status())
        response.topology_notes.extend(self._places.notes)
        session = self.session
        if session is not None and not session.ending:
            response.engine_id = session.memory.engine_id
            response.engine_incarnation = session.memory.incarnation
            response.engine_connected = True
            response.slots_open = len(session.slots)
            slots, counters = session.slots.counters, session.counters
            response.counters.CopyFrom(
                pb.TransferCounters(
                    bytes_sent=counters.bytes_sent,
                    bytes_received=counters.bytes_received,
                    slots_completed=slots.completed,
                    slots_failed=slots.failed,
                    slots_expired=slots.expired,
                    stale_writes=slots.stale,
                    heartbeat_failures=counters.heartbeat_failures,
                    fences=counters.fences,
                )
            )
        return response

    async def drain(self, deadline: Deadline) -> None:
        """Serve an engine that is leaving too until it has left; with another take nothing new, and let what is under
        way end. Until the deadline."""
        word = Deadline.after(LEAVE_WORD_S)
        while not deadline.expired and (session := self.session) is not None:
            self.draining = word.expired and not session.leaving
            if self.draining and session.idle:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        self.draining = True

    async def close(self) -> None:
        """End everything. Idempotent."""
        self.draining = True
        await self._server.close()
        await self.outgoing.close()
        await self.incoming.close()
        for transport in self.configured.values():
            await transport.close()
        if self.mover.running:
            await self.mover.stop()
