"""All links on which this sidecar writes: opening them, starting transfers, ending them, and the notices after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.errors import (
    DeadlineExceeded,
    KvmeshError,
    NotFound,
)
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks, raising
from kvmesh.telemetry import metrics, names, tracing
from kvmesh.transfer.sends import Send, SendDone, SendEvent
from kvmesh.transfer.sidecar.contracts import Host, Session
from kvmesh.transfer.sidecar.outlink import LinkKey, OutLink, OutTransfer, open_peer
from kvmesh.transfer.sidecar.stream import error_type, short
from kvmesh.transfer.transports.base import Outbound
from kvmesh.transfer.wire import PROTOCOL

log = logging.getLogger(__name__)
NOTICE_BACKOFF_S = (0.1, 10.0)
# A destination that does not come back in a day has no pages that wait for us.
NOTICE_LIMIT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Notice:
    """That a link's memory is let go of. `address`: where its destination was."""

    message: pb.Unmapped
    address: str
    engine_id: str
    incarnation: int


class OutgoingLinks:
    """All destinations of the present engine."""

    def __init__(self, sidecar: Host) -> None:
        self.sidecar = sidecar
        self.links: dict[LinkKey, OutLink] = {}
        self.transfers: dict[int, OutTransfer] = {}
        self._tasks = BackgroundTasks()
        self._notices = BackgroundTasks()
        self._running: dict[OutLink, asyncio.Task[None]] = {}
        self._untold: dict[int, _Notice] = {}
        for transport in sidecar.options.transports:
            metrics.at_zero(names.TRANSFERS, transport, ("done", "aborted", "failed"))
            metrics.at_zero(names.TRANSFER_BYTES, transport, ("in", "out"))
            metrics.at_zero(names.TRANSFER_STALE, transport)
            metrics.at_zero(names.TRANSFER_PEERS, transport)
        metrics.at_zero(names.TRANSFER_LINKS, list(sidecar.options.transports)[:1], ("in", "out"), "first")
        metrics.at_zero(names.TRANSFER_SLOTS, "open")
        metrics.at_zero(names.TRANSFER_LEASES, ("writer", "peer"))
        metrics.at_zero(names.PEER_FENCED, ("engine", "idle", "link"))
        metrics.at_zero(names.HEARTBEATS_MISSED, "kvtransfer")

    async def link(self, session: Session, descriptor: pb.Descriptor) -> OutLink:
        """The link that reaches this descriptor's destination, opened where there is none. Raises KvmeshError."""
        key = (
            descriptor.engine_id,
            descriptor.incarnation,
            descriptor.sidecar_incarnation,
            descriptor.control_address,
        )
        link = self.links.get(key)
        if link is None:
            link = OutLink(self, session, key)
            self.links[key] = link
            self._running[link] = self._tasks.spawn(link.run(), name="link", essential=False)
        timeout_s = 2 * self.sidecar.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(link.ready)
        except TimeoutError:
            raise DeadlineExceeded(f"no link to {descriptor.control_address} within {timeout_s:g} s") from None
        return link

    def leave(self, link: OutLink) -> None:
        """A link is not to be used any more."""
        if self.links.get(link.key) is link:
            del self.links[link.key]

    def ended(self, link: OutLink) -> None:
        """A link's task is at its end."""
        self.leave(link)
        self._running.pop(link, None)

    @property
    def all(self) -> list[OutLink]:
        """Every link that is not wholly over."""
        return list(self._running)

    async def start(self, session: Session, request: pb.StartTransfer, send: Send, link: OutLink) -> OutTransfer:
        """Bind the slot and hand the transfer to the mover. Raises KvmeshError; nothing is left behind then."""
        descriptor = request.descriptor
        span = tracing.start_span(
            names.SPAN_TRANSFER_SEND,
            parent=request.traceparent or descriptor.traceparent,
            attributes={
                names.ATTR_TRANSFER_ID: f"{send.transfer_id:x}",
                names.ATTR_TRANSPORT: link.transport,
                names.ATTR_SLOT: descriptor.slot,
                names.ATTR_GENERATION: descriptor.generation,
                names.ATTR_REQUEST_ID: descriptor.request_id,
            },
        )
        transfer = OutTransfer(
            link, send.transfer_id, descriptor.slot, descriptor.generation, descriptor.request_id, span
        )
        send.context = transfer
        try:
            await link.bind(transfer, send.expected)
            self.transfers[send.transfer_id] = transfer
            transfer.running = True
            send.outbound.announce(send.immediate, send.transfer_id, request)
            try:
                await self.sidecar.mover.start_send(send, request.ready_pages)
            except KvmeshError as error:
                # Refused before anything was posted.
                self.transfers.pop(send.transfer_id, None)
                link.fail(transfer, error.message)
                raise
            except BaseException:
                # It may be under way: its end is told when the mover has drained it.
                self.sidecar.mover.stop_send(send.transfer_id, "not accepted")
                raise
        except BaseException as error:
            tracing.mark_failed(span, type(error).__name__)
            span.end()
            raise
        link.transfers += 1
        return transfer

    def on_event(self, event: SendEvent) -> OutTransfer | None:
        """A transfer has ended at the mover: tell the destination. Returns it, for the engine to be told."""
        transfer = event.send.context
        assert isinstance(transfer, OutTransfer)
        if self.transfers.pop(transfer.transfer_id, None) is None:
            return None
        link = transfer.link
        outcome = "done"
        if isinstance(event, SendDone):
            link.current.pop(transfer.immediate, None)
            if transfer.aborted:
                # The last write completed before the mover heard of the abort: the answer is still owed.
                link.send(pb.PeerRequest(drained=pb.Drained(slot=transfer.slot, generation=transfer.generation)))
        else:
            outcome = "aborted" if event.send.by_peer else "failed"
            if link.outbound is not None and link.outbound.broken:
                # Bytes may still be on their way over there: only the fence may end this generation.
                link.current.pop(transfer.immediate, None)
            elif event.send.by_peer:
                link.current.pop(transfer.immediate, None)
                link.send(pb.PeerRequest(drained=pb.Drained(slot=transfer.slot, generation=transfer.generation)))
            else:
                link.fail(transfer, event.send.reason)
            # Why a destination aborted is its own to tell.
            tracing.mark_failed(transfer.span, "CANCELLED" if event.send.by_peer else error_type(event.send.reason))
        link.bytes += event.send.written
        metrics.counter(names.TRANSFER_BYTES).labels(link.transport, "out").inc(event.send.written)
        metrics.counter(names.TRANSFER_WRITES).labels(link.transport).inc(event.send.runs)
        metrics.counter(names.TRANSFERS).labels(link.transport, outcome).inc()
        transfer.span.set_attribute(names.ATTR_TRANSFER_BYTES, event.send.written)
        transfer.span.end()
        return transfer

    def on_broken(self, outbound: Outbound, reason: str) -> None:
        """The mover found a data connection broken."""
        for link in self._running:
            if link.outbound is outbound:
                link.end(reason)

    def tell_unmapped(self, link: OutLink) -> None:
        """Tell whoever serves that engine now that its memory is let go of, until somebody has heard it."""
        if link.link_id and link.transport not in ("tcp", "verbs", "efa") and not link.held:
            self.tell_notice(link.session, link.notice(), link.key[3])

    def tell_notice(self, session: Session, message: pb.Unmapped, address: str) -> None:
        """As `tell_unmapped`. address: where its destination was."""
        notice = _Notice(message, address, session.memory.engine_id, session.memory.incarnation)
        under_way = message.link_id in self._untold
        self._untold[message.link_id] = notice
        if under_way:
            return
        self._notices.spawn(self._tell(notice), name="notice", essential=False)

    @property
    def notices(self) -> int:
        """Of memory let go of, that nobody has taken yet."""
        return len(self._untold)

    def untold(self, engine_id: str, incarnation: int) -> list[pb.Unmapped]:
        """Notices for an engine that nobody has taken yet. A new link to it carries them: its sidecar may have another
        address by now. They stay until `heard`."""
        messages = [notice.message for notice in self._untold.values()]
        return [x for x in messages if (x.engine_id, x.incarnation) == (engine_id, incarnation)]

    def heard(self, notices: Iterable[pb.Unmapped]) -> None:
        """The destination has read them."""
        for notice in notices:
            self._untold.pop(notice.link_id, None)

    async def _tell(self, notice: _Notice) -> None:
        low, high = NOTICE_BACKOFF_S
        until = time.monotonic() + NOTICE_LIMIT_S
        link_id, engine_id = notice.message.link_id, notice.message.engine_id
        hello = pb.PeerHello(
            protocol=PROTOCOL,
            engine_id=notice.engine_id,
            incarnation=notice.incarnation,
            sidecar_id=self.sidecar.options.sidecar_id,
            sidecar_incarnation=self.sidecar.incarnation,
            destination_engine_id=engine_id,
            destination_incarnation=notice.message.incarnation,
        )
        while time.monotonic() < until and link_id in self._untold:
            try:
                if await self._tell_once(notice, hello):
                    break
            except NotFound:
                # Another life of that engine: the memory is gone with its owner.
                break
            except Exception as error:
                # Whatever it is: pages over there wait for this word.
                log.debug("unmapped notice to %s: %s", engine_id, short(error))
            await asyncio.sleep(low)
            low = min(low * 2, high)
        else:
            if link_id in self._untold:
                log.warning("nobody took the unmapped notice for %s", engine_id)
        self._untold.pop(link_id, None)

    async def _tell_once(self, notice: _Notice, hello: pb.PeerHello) -> bool:
        """Whether it was read."""
        channel = self.sidecar.options.open_channel(notice.address)
        try:
            call = open_peer(channel, self.sidecar.options.connect_timeout_s)
            try:
                with raising():
                    await call.write(pb.PeerRequest(hello=hello))
                    if await anext(aiter(call), None) is None:
                        return False
                    await call.write(pb.PeerRequest(unmapped=notice.message))
                    await call.done_writing()
                    return await anext(aiter(call), None) is None
            finally:
                call.cancel()
        finally:
            await channel.close()

    async def end_all(self, session: Session, reason: str, timeout_s: float) -> None:
        """Stop everything of an engine, let go of all peers' memory, end the links."""
        running = [(link, task) for link, task in self._running.items() if link.session is session]
        for link, _ in running:
            link.end(reason, finish=True)
        if not running:
            return
        _, late = await asyncio.wait([task for _, task in running], timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=timeout_s)

    async def close(self) -> None:
        """End the tasks."""
        await self._tasks.close()
        await self._notices.close()
