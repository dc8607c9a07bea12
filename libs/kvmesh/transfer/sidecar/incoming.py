"""Links on which this sidecar's engine is written to: the server side of KvTransfer.Peer.

A link ends when its stream ends, its lease runs out, its data connection breaks, or the engine goes. Its slots then
fail at once; their pages come back when the writer is fenced, however long that takes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, NotFound, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks
from kvmesh.telemetry import metrics, names
from kvmesh.transfer.descriptor import MAX_ID_CHARS, check_layouts_match, layout_from_proto, layout_to_proto
from kvmesh.transfer.sidecar.choice import Choice, choose, one_line
from kvmesh.transfer.sidecar.contracts import Host, Session
from kvmesh.transfer.sidecar.stream import LeaseExpired, Outbox, first_of, next_message, short
from kvmesh.transfer.transports.base import Expected, Inbound, Transport
from kvmesh.transfer.wire import PROTOCOL

log = logging.getLogger(__name__)
MAX_OFFERS = 16
MAX_LINKS = 1024
MAX_NOTICES = 1024


@dataclass(slots=True, eq=False)
class InLink:
    """One writer's link. `link_id` is also its name in the slot table."""

    link_id: int
    session: Session
    hello: pb.PeerHello
    # The writer's.
    layout: KvLayout
    choice: Choice
    outbox: Outbox[pb.PeerResponse]
    state: str = "up"
    inbound: Inbound | None = None
    bytes: int = 0
    transfers: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fenced: asyncio.Event = field(default_factory=asyncio.Event)
    end_reason: str = ""

    @property
    def transport(self) -> Transport:
        return self.choice.transport

    @property
    def reason(self) -> str:
        return self.choice.reason

    @property
    def peer(self) -> str:
        return f"{self.hello.engine_id} by {self.hello.sidecar_id}"

    def end(self, reason: str) -> None:
        """Make the stream's handler return."""
        if not self.ended.is_set():
            self.end_reason = reason
            self.ended.set()


class IncomingLinks:
    """All writers of the present engine."""

    def __init__(self, sidecar: Host) -> None:
        self._sidecar = sidecar
        self._tasks = BackgroundTasks()
        self.links: dict[int, InLink] = {}

    async def serve(
        self, messages: AsyncIterator[pb.PeerRequest], write: Callable[[pb.PeerResponse], Awaitable[object]]
    ) -> None:
        """One Peer call. Raises KvmeshError for what is wrong with the peer."""
        options = self._sidecar.options
        first = await next_message(messages, options.lease_s, "a new peer")
        if first is None or first.WhichOneof("body") != "hello":
            raise InvalidArgument("the first message of a peer is its hello")
        session = self._check(first.hello)
        if not first.hello.offers:
            await self._notices(messages, write, session)
            return
        link = self._open(first.hello, session, write)
        reply = pb.PeerHelloReply(
            protocol=PROTOCOL,
            engine_id=session.memory.engine_id,
            incarnation=session.memory.incarnation,
            sidecar_id=options.sidecar_id,
            sidecar_incarnation=self._sidecar.incarnation,
            transport=link.transport.name,
            reason=link.reason,
            regions=session.memory.infos,
            layout=layout_to_proto(session.memory.layout, session.memory.tails),
            link_id=link.link_id,
            heartbeat_s=options.heartbeat_s,
            lease_s=options.lease_s,
            candidates=link.choice.candidates,
        )
        endpoint = link.transport.expect(
            Expected(
                link.link_id,
                link.peer,
                on_joined=lambda inbound, pidfd: self._joined(link, inbound, pidfd),
                on_ready=lambda: self._arrived(link),
                on_end=lambda reason: link.end(reason),
                source_ranks=first.hello.layout.tp,
                offer=next((offer for offer in first.hello.offers if offer.name == link.transport.name), None),
            )
        )
        reply.endpoint, reply.token = endpoint.address, endpoint.token
        if endpoint.verbs is not None:
            reply.verbs.CopyFrom(endpoint.verbs)
        if endpoint.efa is not None:
            reply.efa.CopyFrom(endpoint.efa)
        self.links[link.link_id] = link
        metrics.gauge(names.TRANSFER_PEERS).labels(link.transport.name).inc()
        metrics.gauge(names.TRANSFER_LINKS).labels(link.transport.name, "in", link.choice.code).inc()
        log.info(
            "link %x: %s writes by %s: %s",
            link.link_id,
            link.peer,
            link.transport.name,
            one_line(link.choice.candidates),
        )
        cause = "the stream was cancelled"
        try:
            link.outbox.put(pb.PeerResponse(hello=reply))
            await first_of(
                asyncio.create_task(link.outbox.run()),
                asyncio.create_task(self._read(link, messages)),
                asyncio.create_task(link.ended.wait()),
            )
            cause = link.end_reason or "the writer left"
        except Exception as error:
            cause = short(error)
            if isinstance(error, LeaseExpired):
                session.counters.heartbeat_failures += 1
                log.warning("link %x: %s", link.link_id, cause)
            raise
        finally:
            self._lost(link, cause)

    def _check(self, hello: pb.PeerHello) -> Session:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"peer protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        if max(len(hello.offers), len(hello.failed), len(hello.unusable)) > MAX_OFFERS:
            raise InvalidArgument(f"more than {MAX_OFFERS} transports are offered")
        for name in ("engine_id", "sidecar_id", "destination_engine_id"):
            if not 1 <= len(getattr(hello, name)) <= MAX_ID_CHARS:
                raise InvalidArgument(f"hello: {name} must have 1..{MAX_ID_CHARS} characters")
        session = self._sidecar.session
        if session is None or session.ending:
            raise FailedPrecondition("no engine is registered here")
        memory = session.memory
        if hello.destination_engine_id != memory.engine_id:
            # It may be registered elsewhere: where sidecars share a folder, engines change between them.
            raise FailedPrecondition(
                f"engine {memory.engine_id!r} is registered here, not {hello.destination_engine_id!r}"
            )
        if hello.destination_incarnation != memory.incarnation:
            raise NotFound(
                f"engine {hello.destination_engine_id!r} life {hello.destination_incarnation} is not registered here"
            )
        return session

    def _open(
        self, hello: pb.PeerHello, session: Session, write: Callable[[pb.PeerResponse], Awaitable[object]]
    ) -> InLink:
        if self._sidecar.draining:
            raise Unavailable("this sidecar is shutting down")
        if hello.destination_sidecar_incarnation != self._sidecar.incarnation:
            raise NotFound("this sidecar is a successor: it knows nothing of its predecessor's slots")
        if len(self.links) >= MAX_LINKS:
            raise Unavailable(f"{MAX_LINKS} links are open already")
        layout = layout_from_proto(hello.layout)
        check_layouts_match(layout, session.memory.layout)
        choice = choose(self._sidecar.configured, hello)
        outbox = Outbox(
            write, lambda n: pb.PeerResponse(heartbeat=pb.Heartbeat(sequence=n)), self._sidecar.options.heartbeat_s
        )
        return InLink(secrets.randbits(63) | 1, session, hello, layout, choice, outbox)

    async def _notices(
        self,
        messages: AsyncIterator[pb.PeerRequest],
        write: Callable[[pb.PeerResponse], Awaitable[object]],
        session: Session,
    ) -> None:
        """A stream that only tells of memory let go of."""
        await write(pb.PeerResponse(hello=pb.PeerHelloReply(protocol=PROTOCOL, reason="notices")))
        for _ in range(MAX_NOTICES):
            message = await next_message(messages, self._sidecar.options.lease_s, "a peer with notices")
            if message is None:
                return
            if message.WhichOneof("body") == "unmapped":
                self._unmapped(message.unmapped, session)
        raise InvalidArgument(f"more than {MAX_NOTICES} notices")

    def _unmapped(self, notice: pb.Unmapped, session: Session) -> None:
        if (notice.engine_id, notice.incarnation) != (session.memory.engine_id, session.memory.incarnation):
            return
        link = self.links.get(notice.link_id)
        if link is None:
            # A predecessor's link: the engine knows whether it waits for it.
            session.writer_gone(notice.link_id, "unmapped")
            return
        if link.inbound is not None:
            link.inbound.unmapped()
        else:
            # It has given up before its data connection came in: from now on that is not let in any more.
            link.transport.forget(notice.link_id)
        if link.session is not session:
            # Of this engine's last connection, whose end the fence tells to nobody.
            session.writer_gone(notice.link_id, "unmapped")

    async def _read(self, link: InLink, messages: AsyncIterator[pb.PeerRequest]) -> None:
        session = link.session
        while (message := await next_message(messages, self._sidecar.options.lease_s, link.peer)) is not None:
            kind = message.WhichOneof("body")
            if kind == "bind":
                self._bind(link, message.bind)
            elif kind == "drained":
                self._poll(link)
                session.apply(session.slots.drained(link.link_id, message.drained.slot, message.drained.generation))
            elif kind == "failed":
                failed = message.failed
                reason = failed.reason[:500] or "the writer failed"
                self._poll(link)
                session.apply(session.slots.writer_failed(link.link_id, failed.slot, failed.generation, reason))
            elif kind == "unmapped":
                self._unmapped(message.unmapped, session)
            elif kind == "data_hello":
                await self._data_hello(link, message.data_hello)
            elif kind != "heartbeat":
                raise InvalidArgument(f"a peer sent {kind or 'nothing that is known'}")

    def _bind(self, link: InLink, bind: pb.BindSlot) -> None:
        reply = pb.BindReply(slot=bind.slot, generation=bind.generation)
        session = link.session
        try:
            if link.inbound is None:
                raise FailedPrecondition("the data connection is not open yet")
            expected = session.expected(bind.slot, bind.generation, link.layout)
            slot = session.slots.bind(
                bind.slot, bind.generation, bind.bytes, link.link_id, now=time.monotonic(), expected=expected
            )
            link.inbound.grant(slot.immediate, session.granted(slot))
            link.transfers += 1
            reply.ok = True
        except KvmeshError as error:
            reply.reason = f"{error.reason}: {error.message}"
            log.warning("link %x: bind refused: %s", link.link_id, error.message)
        link.outbox.put(pb.PeerResponse(bind=reply))

    async def _data_hello(self, link: InLink, hello: pb.DataHello) -> None:
        if hello.link_id != link.link_id:
            raise InvalidArgument("a data hello for another link")
        link.outbox.put(pb.PeerResponse(data_hello=await link.transport.join(hello)))

    async def _joined(self, link: InLink, inbound: Inbound, pidfd: int | None) -> None:
        link.inbound = inbound
        if link.ended.is_set() or link.state != "up":
            raise Unavailable("the link has ended")
        if pidfd is not None:
            await link.session.writer_joined(link.link_id, link.hello, pidfd)

    def _poll(self, link: InLink) -> None:
        """Count what has arrived before a message that ends a generation is believed."""
        if link.inbound is not None:
            self._arrived(link)

    def _arrived(self, link: InLink) -> None:
        assert link.inbound is not None
        now = time.monotonic()
        slots = link.session.slots
        for arrival in link.inbound.poll():
            before = slots.counters.stale
            events = slots.arrived(link.link_id, arrival.immediate, arrival.nbytes, now=now)
            if slots.counters.stale > before:
                metrics.counter(names.TRANSFER_STALE).labels(link.transport.name).inc()
            else:
                link.bytes += arrival.nbytes
                link.session.counters.bytes_received += arrival.nbytes
                metrics.counter(names.TRANSFER_BYTES).labels(link.transport.name, "in").inc(arrival.nbytes)
            link.session.apply(events)

    def _lost(self, link: InLink, reason: str) -> None:
        """The stream is over: fail its slots now, give their pages back when the writer is fenced."""
        link.end(reason)
        link.state = "fencing"
        link.transport.forget(link.link_id)
        metrics.gauge(names.TRANSFER_PEERS).labels(link.transport.name).dec()
        metrics.gauge(names.TRANSFER_LINKS).labels(link.transport.name, "in", link.choice.code).dec()
        self._poll(link)
        log.info("link %x: %s ended: %s", link.link_id, link.peer, reason)
        failed = link.session.slots.peer_lost(link.link_id, reason)
        cause = "engine" if link.session.ending else "link" if failed else "idle"
        metrics.counter(names.PEER_FENCED).labels(cause).inc()
        link.session.apply(failed)
        self._tasks.spawn(self._fence(link), name="fence", essential=False)

    async def _fence(self, link: InLink) -> None:
        if link.inbound is not None:
            await link.inbound.fence()
            # What landed before the end is no news any more, but it is counted.
            self._poll(link)
        link.state = "fenced"
        link.session.counters.fences += 1
        link.session.apply(link.session.slots.fenced(link.link_id))
        link.session.writer_gone(link.link_id, "fenced")
        self.links.pop(link.link_id, None)
        link.fenced.set()

    async def end_all(self, session: Session, reason: str, timeout_s: float) -> None:
        """End the links of an engine that is gone, and wait for their fences. A writer that does not answer in time is
        left to itself: nobody will ever use that memory again."""
        links = [link for link in self.links.values() if link.session is session]
        for link in links:
            link.end(reason)
        if not links:
            return
        waits = [asyncio.create_task(link.fenced.wait()) for link in links]
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            log.warning("%d writer(s) of a dead engine have not let go of its memory yet", len(late))

    async def close(self) -> None:
        """Stop waiting for fences."""
        await self._tasks.close()
