"""One engine's life at its sidecar: its memory, its slots, its transfers. `door.py` lets engines in."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from opentelemetry.trace import Span

from kvmesh.errors import Cancelled, DataLoss, Internal, InvalidArgument, KvmeshError, TooLarge, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks
from kvmesh.telemetry import about, metrics, names, tracing
from kvmesh.transfer.descriptor import (
    MAX_ID_CHARS,
    DescriptorLimits,
    check_address,
    check_descriptor,
    check_layouts_match,
    groups_from_proto,
    layout_from_proto,
    slot_bytes,
)
from kvmesh.transfer.immediate import GENERATIONS, pack
from kvmesh.transfer.sends import Send, SendDone, SendEvent, SendTable, TailCopy, check_lists
from kvmesh.transfer.sidecar.contracts import Counters, Host
from kvmesh.transfer.sidecar.incoming import IncomingLinks, InLink
from kvmesh.transfer.sidecar.outgoing import OutgoingLinks
from kvmesh.transfer.sidecar.outlink import OutTransfer
from kvmesh.transfer.sidecar.stream import error_type
from kvmesh.transfer.slots import AskDrain, Completed, Drained, Event, Failed, Slot, SlotState, SlotTable
from kvmesh.transfer.tail import rows_from_proto, tail_bytes, tails_from_proto
from kvmesh.transfer.transports.base import EngineMemory, GrantedPages
from kvmesh.transfer.wire import FrameSocket

log = logging.getLogger(__name__)

WRITER_TOLD_TIMEOUT_S = 5.0
MAX_TTL_MS = 24 * 3600 * 1000
MAX_STARTING = 1024
# That an engine's own writer has let go of memory: one a link.
MAX_NOTICES_OUT = 4096
# A write that has begun runs to its end before a writer says Drained: longer than any takes.
DRAIN_LEASES = 2


@dataclass(slots=True, eq=False)
class SlotContext:
    """What the sidecar keeps with a slot."""

    groups: dict[str, list[int]]
    # Rows of tail buffers, by name.
    tails: dict[str, int]
    # Wanted from the lists' first on, None for all that they hold.
    num_tokens: int | None
    request_id: str
    span: Span


@dataclass(slots=True, eq=False)
class _Start:
    """A StartTransfer that has no answer yet. given_up: why the engine does not want it any more."""

    task: asyncio.Task[None] | None = None
    entered: bool = False
    send: Send | None = None
    given_up: str = ""

    @property
    def begun(self) -> bool:
        """Whether the mover may have begun to read its pages."""
        return self.send is not None and isinstance(self.send.context, OutTransfer) and self.send.context.running


class SessionHost(Host, Protocol):
    """The sidecar, as a session sees it."""

    fault: str
    incoming: IncomingLinks
    outgoing: OutgoingLinks


class EngineSession:
    """One engine's life. Lives on the loop."""

    def __init__(self, sidecar: SessionHost, frames: FrameSocket, memory: EngineMemory, sends: SendTable) -> None:
        self.sidecar = sidecar
        self.memory = memory
        self.sends = sends
        self.slots = SlotTable(sidecar.options.max_slots, first_generation=secrets.randbelow(GENERATIONS))
        self.counters = Counters()
        self.ending = False
        # It has said that it finishes what it has, and goes.
        self.leaving = False
        self._region_names = {info.group for info in memory.infos}
        self._frames = frames
        self._tasks = BackgroundTasks()
        self._expiry: asyncio.TimerHandle | None = None
        self._starting = 0
        self._starts: dict[int, _Start] = {}
        # High bits differ between sidecars: a ring may still hold records for a predecessor's transfers.
        self._next_transfer = secrets.randbits(31) << 32
        if memory.poster is not None:
            memory.poster.on_released = self._peer_released

    # --- from the engine -----------------------------------------------------------------------------------------

    def on_frame(self, body: bytes) -> None:
        """One message. Raises KvmeshError for what ends the connection; refuses by name what does not."""
        message = pb.EngineMessage.FromString(body)
        kind = message.WhichOneof("body")
        try:
            if kind == "open_slot":
                self._open_slot(message.call_id, message.open_slot)
            elif kind == "close_slot":
                close = message.close_slot
                self.apply(self.slots.close(close.slot, close.generation, close.reason[:500] or "closed"))
            elif kind == "start_transfer":
                if self._starting >= MAX_STARTING:
                    raise Unavailable(f"{MAX_STARTING} transfers are being started already")
                self._starting += 1
                start = self._starts[message.call_id] = _Start()
                start.task = self._tasks.spawn(
                    self._start_transfer(message.call_id, message.start_transfer, start), name="start", essential=False
                )
            elif kind == "send_pages":
                pages = message.send_pages
                self.sidecar.mover.pages_ready(pages.transfer_id, pages.first, pages.count)
            elif kind == "send_tail":
                self.sidecar.mover.tail_ready(message.send_tail.transfer_id)
            elif kind == "cancel_transfer":
                cancel = message.cancel_transfer
                self.sidecar.mover.stop_send(cancel.transfer_id, cancel.reason[:500] or "cancelled")
            elif kind == "cancel_start":
                self._cancel_start(message.cancel_start)
            elif kind == "leaving":
                self.leaving = True
            elif kind == "ring":
                self.sidecar.mover.wake()
            elif kind in ("peer_mapped", "post_ended", "peer_released") and self.memory.poster is not None:
                self.memory.poster.on_message(message)
            else:
                raise InvalidArgument(f"an engine sent {kind or 'nothing that is known'}")
        except KvmeshError as error:
            if not message.call_id:
                raise
            self._refuse(message.call_id, error)

    def _refuse(self, call_id: int, error: KvmeshError) -> None:
        log.warning("refused: %s", error.message)
        refused = pb.Refused(reason=error.reason, message=error.message[:1000])
        self.tell(pb.SidecarMessage(call_id=call_id, refused=refused))

    def tell(self, message: pb.SidecarMessage, fds: Sequence[int] = ()) -> None:
        """Send to the engine."""
        self._frames.send(message, fds)

    def _open_slot(self, call_id: int, request: pb.OpenSlot) -> None:
        if not call_id:
            raise InvalidArgument("open_slot needs a call_id")
        if len(request.request_id) > MAX_ID_CHARS:
            raise InvalidArgument(f"open_slot: request_id is longer than {MAX_ID_CHARS} characters")
        if not 1 <= request.ttl_ms <= MAX_TTL_MS:
            raise InvalidArgument(f"open_slot: ttl_ms must be in 1..{MAX_TTL_MS}, got {request.ttl_ms}")
        if self.sidecar.draining or self.ending:
            raise Unavailable("this sidecar is shutting down")
        memory = self.memory
        groups = groups_from_proto(request.groups, memory.layout, DescriptorLimits().max_pages)
        most = max((len(pages) for pages in groups.values()), default=0)
        if request.num_tokens and memory.layout.pages_for(request.num_tokens) != most:
            raise InvalidArgument(f"open_slot: num_tokens {request.num_tokens} do not need {most} pages")
        tails = rows_from_proto(request.tails, memory.tails)
        need = slot_bytes(memory.layout, groups) + tail_bytes(memory.layout, memory.tails, tails)
        if request.expected_bytes != need:
            raise InvalidArgument(f"open_slot: expected_bytes {request.expected_bytes}, the page lists give {need}")
        span = tracing.start_span(
            names.SPAN_TRANSFER_RECEIVE,
            parent=request.traceparent,
            attributes={names.ATTR_REQUEST_ID: request.request_id},
        )
        context = SlotContext(groups, tails, request.num_tokens or None, request.request_id, span)
        try:
            slot = self.slots.open(need, now=time.monotonic(), ttl_s=request.ttl_ms / 1000, context=context)
        except KvmeshError as error:
            tracing.mark_failed(span, type(error).__name__)
            span.end()
            raise
        span.set_attribute(names.ATTR_SLOT, slot.slot)
        span.set_attribute(names.ATTR_GENERATION, slot.generation)
        metrics.gauge(names.TRANSFER_SLOTS).labels("open").set(len(self.slots))
        self.tell(
            pb.SidecarMessage(call_id=call_id, slot_opened=pb.SlotOpened(slot=slot.slot, generation=slot.generation))
        )
        self._schedule_expiry()

    def _cancel_start(self, cancel: pb.CancelStart) -> None:
        start = self._starts.get(cancel.call_id)
        if start is None or start.given_up:
            return
        start.given_up = cancel.reason[:500] or "given up by the engine"
        # A task that is cancelled before its first step never runs, and would answer nothing. And once the mover has
        # begun, it must say when it has stopped reading.
        if start.entered and not start.begun and start.task is not None:
            start.task.cancel()

    async def _start_transfer(self, call_id: int, request: pb.StartTransfer, start: _Start) -> None:
        start.entered = True
        try:
            if start.given_up:
                raise Cancelled(start.given_up)
            transfer = await self._started(request, start)
            self.tell(
                pb.SidecarMessage(
                    call_id=call_id,
                    transfer_accepted=pb.TransferAccepted(
                        transfer_id=transfer.transfer_id, transport=transfer.link.transport
                    ),
                )
            )
            transfer.accepted = True
            if transfer.ended is not None:
                self._tell_end(transfer, transfer.ended)
            elif start.given_up:
                self.sidecar.mover.stop_send(transfer.transfer_id, start.given_up)
        except KvmeshError as error:
            self._refuse(call_id, error)
        except asyncio.CancelledError:
            if self.ending or not start.given_up:
                raise
            # Nothing of its pages is in use: it was not with the mover yet.
            self._refuse(call_id, Cancelled(start.given_up))
        except Exception as error:
            # The engine keeps its pages until it has an answer.
            log.exception("a transfer could not be started")
            self._refuse(call_id, Internal(f"{type(error).__name__}: {error}"))
        finally:
            self._starting -= 1
            if self._starts.get(call_id) is start:
                del self._starts[call_id]

    async def _started(self, request: pb.StartTransfer, start: _Start) -> OutTransfer:
        descriptor = request.descriptor
        if self.sidecar.draining or self.ending:
            raise Unavailable("this sidecar is shutting down")
        if self.sidecar.fault:
            # Nothing would ever be heard of its pages.
            raise DataLoss(self.sidecar.fault)
        check_descriptor(descriptor)
        layout = self.memory.layout
        target = layout_from_proto(descriptor.layout)
        check_layouts_match(layout, target)
        src_pages = groups_from_proto(request.pages, layout, DescriptorLimits().max_pages)
        dst_pages = {entry.group: list(entry.pages) for entry in descriptor.groups}
        kept = {entry.group: list(entry.kept) for entry in request.pages if entry.kept}
        first, end = descriptor.first_block * target.page_size, descriptor.num_tokens
        check_lists(layout, target, src_pages, dst_pages, first, end, kept)
        tails = self._tail_copies(request)
        link = await self.sidecar.outgoing.link(self, descriptor)
        assert link.outbound is not None
        keys = {(region.group, region.rank): region.key for region in descriptor.regions}
        if keys != {(region.group, region.rank): region.key for region in link.regions}:
            raise InvalidArgument("descriptor: its region keys are not those of the destination's engine")
        if target != link.layout or tails_from_proto(descriptor.layout, target) != link.tails:
            raise InvalidArgument("descriptor: its layout is not that of the destination's engine")
        expected = slot_bytes(target, dst_pages, layout, end - first)
        self._next_transfer += 1
        send = Send(
            transfer_id=self._next_transfer,
            immediate=pack(descriptor.slot, descriptor.generation),
            outbound=link.outbound,
            src_layout=layout,
            dst_layout=target,
            src_pages=src_pages,
            dst_pages=dst_pages,
            src_region={(info.group, info.rank): i for i, info in enumerate(self.memory.infos)},
            dst_region={(info.group, info.rank): i for i, info in enumerate(link.regions)},
            expected=expected + target.tp * sum(copy.row_bytes for copy in tails.values()),
            first_token=first,
            end_token=end,
            kept=kept,
            tails=tails,
        )
        start.send = send
        return await self.sidecar.outgoing.start(self, request, send, link)

    def _tail_copies(self, request: pb.StartTransfer) -> dict[str, TailCopy]:
        """Rows of both ends. Raises InvalidArgument where they do not go together."""
        mine = {tail.name: tail for tail in self.memory.tails}
        theirs = {tail.name: tail.row_bytes for tail in request.descriptor.layout.tails}
        src_rows = rows_from_proto(request.tails, self.memory.tails)
        dst_rows = {row.name: row.row for row in request.descriptor.tails}
        if src_rows.keys() != dst_rows.keys():
            raise InvalidArgument(
                f"start_transfer: tails {sorted(src_rows)} are given, the descriptor wants {sorted(dst_rows)}"
            )
        for name in src_rows:
            if mine[name].row_bytes != theirs[name]:
                raise InvalidArgument(
                    f"tail {name!r}: a row has {mine[name].row_bytes} bytes here, {theirs[name]} at the destination"
                )
        return {name: TailCopy(row, dst_rows[name], mine[name].row_bytes) for name, row in src_rows.items()}

    # --- to the engine -------------------------------------------------------------------------------------------

    def on_send_events(self, events: list[SendEvent]) -> None:
        """Transfers have ended at the mover."""
        for event in events:
            transfer = self.sidecar.outgoing.on_event(event)
            if transfer is None:
                continue
            self.counters.bytes_sent += event.send.written
            if transfer.accepted:
                self._tell_end(transfer, event)
            else:
                transfer.ended = event

    def _tell_end(self, transfer: OutTransfer, event: SendEvent) -> None:
        message = pb.SidecarMessage()
        if isinstance(event, SendDone):
            message.transfer_done.transfer_id = transfer.transfer_id
            message.transfer_done.bytes = event.send.written
            message.transfer_done.transport = transfer.link.transport
        else:
            message.transfer_failed.transfer_id = transfer.transfer_id
            message.transfer_failed.reason = event.send.reason[:1000]
        self.tell(message)

    def apply(self, events: Sequence[Event]) -> None:
        """Carry out what the slot table says."""
        for event in events:
            slot = event.slot
            link = self.sidecar.incoming.links.get(slot.peer) if isinstance(slot.peer, int) else None
            if isinstance(event, AskDrain):
                if link is not None:
                    abort = pb.AbortSlot(slot=slot.slot, generation=slot.generation, reason=slot.reason[:500])
                    link.outbox.put(pb.PeerResponse(abort=abort))
                    wait_s = DRAIN_LEASES * self.sidecar.options.lease_s
                    asyncio.get_running_loop().call_later(wait_s, self._undrained, slot, link, wait_s)
                continue
            if link is not None and link.inbound is not None:
                link.inbound.revoke(slot.immediate)
            transport = link.transport.name if link is not None else "none"
            if isinstance(event, Completed):
                self._complete(slot, transport, event.elapsed_s)
            elif isinstance(event, Failed):
                self._fail(slot, transport)
            elif isinstance(event, Drained):
                self.tell(pb.SidecarMessage(slot_drained=pb.SlotDrained(slot=slot.slot, generation=slot.generation)))
        if events:
            metrics.gauge(names.TRANSFER_SLOTS).labels("open").set(len(self.slots))
            self._schedule_expiry()

    def _undrained(self, slot: Slot, link: InLink, wait_s: float) -> None:
        """A writer that lives and does not answer an abort is as good as lost: its link ends, and the fence decides."""
        if self.slots.get(slot.slot, slot.generation) is slot and link.state == "up":
            log.error("slot %d generation %d was not drained in %g s", slot.slot, slot.generation, wait_s)
            link.end(f"no answer to an abort within {wait_s:g} s")

    def _complete(self, slot: Slot, transport: str, elapsed_s: float) -> None:
        self.tell(
            pb.SidecarMessage(
                slot_complete=pb.SlotComplete(
                    slot=slot.slot,
                    generation=slot.generation,
                    bytes=slot.received,
                    transport=transport,
                    elapsed_ms=elapsed_s * 1000,
                )
            )
        )
        metrics.histogram(names.TRANSFER_TIME).labels(transport).observe(elapsed_s)
        self._end_span(slot, transport, "")

    def _fail(self, slot: Slot, transport: str) -> None:
        assert isinstance(slot.context, SlotContext)
        told = about.about(slot.context.request_id, slot.context.span)
        log.warning("slot %d generation %d failed: %s", slot.slot, slot.generation, slot.reason, extra=told)
        self.tell(
            pb.SidecarMessage(
                slot_failed=pb.SlotFailed(slot=slot.slot, generation=slot.generation, reason=slot.reason[:1000])
            )
        )
        self._end_span(slot, transport, error_type(slot.reason))

    def _end_span(self, slot: Slot, transport: str, error: str) -> None:
        assert isinstance(slot.context, SlotContext)
        span = slot.context.span
        span.set_attribute(names.ATTR_TRANSPORT, transport)
        span.set_attribute(names.ATTR_TRANSFER_BYTES, slot.received)
        if error:
            tracing.mark_failed(span, error)
        span.end()

    def expected(self, slot: int, generation: int, source: KvLayout) -> int | None:
        """Bytes that a writer with that layout must send; None: those that the slot was opened with. Raises
        InvalidArgument."""
        current = self.slots.get(slot, generation)
        layout = self.memory.layout
        if current is None or source.page_size == layout.page_size:
            return None
        context = current.context
        assert isinstance(context, SlotContext)
        if len({len(pages) for pages in context.groups.values()}) > 1:
            raise InvalidArgument("not implemented: kept pages between pages of unequal size")
        count = slot_bytes(layout, context.groups, source, context.num_tokens)
        return count + tail_bytes(layout, self.memory.tails, context.tails)

    def granted(self, slot: Slot) -> GrantedPages:
        """Where a slot's writes may land."""
        assert isinstance(slot.context, SlotContext)
        pages = slot.context.groups | {name: [row] for name, row in slot.context.tails.items()}
        sorted_pages = {name: np.asarray(sorted(pages.get(name, ())), dtype=np.int64) for name in self._region_names}
        return GrantedPages({i: sorted_pages[info.group] for i, info in enumerate(self.memory.infos)})

    async def writer_joined(self, link_id: int, hello: pb.PeerHello, pidfd: int) -> None:
        """Another process gets this engine's memory: the engine must know before."""
        try:
            joined = pb.WriterJoined(link_id=link_id, sidecar_id=hello.sidecar_id, engine_id=hello.engine_id)
            self.tell(pb.SidecarMessage(writer_joined=joined), [pidfd])
        finally:
            os.close(pidfd)
        await self._frames.flush(WRITER_TOLD_TIMEOUT_S)

    def _peer_released(self, released: pb.PeerReleased) -> None:
        """Our engine has let go of memory that no link waits for any more: tell its destination. Raises InvalidArgument
        for what no engine says, TooLarge for more than it can have held."""
        if not released.link_id or not 1 <= len(released.engine_id) <= MAX_ID_CHARS:
            raise InvalidArgument(f"peer_released: a link and an engine_id of 1..{MAX_ID_CHARS} characters are needed")
        check_address("peer_released", released.control_address)
        if self.sidecar.outgoing.notices >= MAX_NOTICES_OUT:
            raise TooLarge(f"more than {MAX_NOTICES_OUT} notices of memory let go of are under way")
        unmapped = pb.Unmapped(engine_id=released.engine_id, incarnation=released.incarnation, link_id=released.link_id)
        self.sidecar.outgoing.tell_notice(self, unmapped, released.control_address)

    def writer_gone(self, link_id: int, reason: str) -> None:
        """And it has let go of it."""
        self.tell(pb.SidecarMessage(writer_gone=pb.WriterGone(link_id=link_id, reason=reason)))

    # --- time ----------------------------------------------------------------------------------------------------

    def _schedule_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        at = self.slots.next_expiry()
        if at is not None and not self.ending:
            self._expiry = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.apply(self.slots.expire(time.monotonic()))
        self._schedule_expiry()

    @property
    def idle(self) -> bool:
        """No slot open, no transfer under way."""
        return not len(self.slots) and not self.sidecar.outgoing.transfers and not self._starting

    async def end(self, reason: str) -> None:
        """The engine is gone: stop, drain and let go of everything that was its."""
        self.ending = True
        if self._expiry is not None:
            self._expiry.cancel()
        if self.memory.poster is not None:
            self.memory.poster.lost()
        sidecar = self.sidecar
        log.info("engine %s is gone (%s)", self.memory.engine_id, reason)
        await sidecar.outgoing.end_all(self, "the source's engine is gone", sidecar.options.lease_s)
        await sidecar.incoming.end_all(self, "the destination's engine is gone", sidecar.options.lease_s)
        await self._tasks.close()
        for slot in self.slots:
            # Whoever could write there is fenced, or holds memory that nobody reads any more.
            if slot.state is not SlotState.DRAINING:
                self._end_span(slot, "none", "EngineGone")
        for transport in sidecar.transports.values():
            transport.deregister()
        await sidecar.mover.detach()
        for region in self.memory.regions:
            region.close()
        if self.memory.owner is not None:
            self.memory.owner.close()
        self._frames.close()
