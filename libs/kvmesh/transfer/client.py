"""The engine's side of its sidecar: one Unix socket, framed protobuf, descriptors of memory passed once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError

from kvmesh.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    KvmeshError,
    NotFound,
    TransferFailed,
    Unavailable,
)
from kvmesh.kv.fds import close_fds
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.pidfd import check_pidfd, open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import groups_to_proto, layout_to_proto
from kvmesh.transfer.handles import SlotHandle, SlotResult, TransferHandle
from kvmesh.transfer.hello import refusal, region_fds, region_infos
from kvmesh.transfer.orphans import Writers
from kvmesh.transfer.posting import MAX_PASSED_FDS, POSTER_MESSAGES, Poster
from kvmesh.transfer.tail import TailBuffer, check_tails, region_sizes, rows_to_proto
from kvmesh.transfer.wire import MAX_HELLO_BYTES, PROTOCOL, FrameSocket, open_unix

log = logging.getLogger(__name__)

# A sidecar's own limits (link, bind) are shorter: this one is for a sidecar that hangs.
CALL_TIMEOUT_S = 30.0
# What a poster gets to drain its writes and to unmap, when an engine leaves in order.
LEAVE_TIMEOUT_S = 5.0
# Linux 6.5; Python has no name for it yet.
_SO_PEERPIDFD = 77


def _start_key(descriptor: pb.Descriptor) -> tuple[str, int, int, int]:
    """What a transfer writes to: there is one at a time."""
    return descriptor.engine_id, descriptor.incarnation, descriptor.slot, descriptor.generation


class SidecarClient:
    """One connection to the sidecar, which is this engine's life there. Lives on one asyncio loop; `notify_ring` is the
    only method that other threads may call."""

    def __init__(
        self,
        *,
        engine_id: str,
        incarnation: int,
        layout: KvLayout,
        tails: Sequence[TailBuffer] = (),
        on_lost: Callable[[], None],
    ) -> None:
        """Use `connect`."""
        check_tails(layout, tails)
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.layout = layout
        self.tails = tuple(tails)
        self.control_address = ""
        self.sidecar_id = ""
        self.sidecar_incarnation = 0
        self.region_infos: list[pb.RegionInfo] = []
        self.transports: list[str] = []
        # Whether it may be passed dma-bufs with regions.
        self.takes_dmabufs = False
        self._knows_leaving = False
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._frames: FrameSocket | None = None
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: dict[int, asyncio.Future[pb.SidecarMessage]] = {}
        # Those after which the sidecar may read our pages.
        self._page_calls: dict[int, asyncio.Future[pb.SidecarMessage]] = {}
        # Starts that have no answer yet, by their call_id.
        self._starts: dict[int, tuple[str, int, int, int]] = {}
        self._answers: dict[int, Callable[[pb.SidecarMessage], None]] = {}
        self._call_ids = itertools.count(1)
        self._slots: dict[tuple[int, int], SlotHandle] = {}
        self._transfers: dict[int, TransferHandle] = {}
        self._writers: Writers = Writers()
        self._own_writers = True
        self._poster: Poster | None = None
        self._sidecar = 0
        self._closed = False

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
        tails: Sequence[TailBuffer] = (),
        writers: Writers | None = None,
        poster: Poster | None = None,
    ) -> SidecarClient:
        """Register this engine, as the leader of its ranks. `regions`: one per layer group and tail buffer, of rank 0;
        where layout.tp > 1 the other ranks join by `RankMember`, and this waits for them. `writers` outlasts this
        sidecar: `SidecarLink` passes it. Raises Unavailable (nobody there), DeadlineExceeded, or what the sidecar
        refuses."""
        client = cls(engine_id=engine_id, incarnation=incarnation, layout=layout, tails=tails, on_lost=on_lost)
        client._poster = poster
        if writers is not None:
            client._writers.close()
            client._writers = writers
            client._own_writers = False
        try:
            async with asyncio.timeout(timeout_s):
                await client._register(path, regions, doorbell, ring, timeout_s)
        except TimeoutError:
            client._shut()
            raise DeadlineExceeded(f"the sidecar did not register this engine within {timeout_s:g} s") from None
        except BaseException:
            client._shut()
            raise
        return client

    async def _register(
        self, path: str | Path, regions: Mapping[str, Region], doorbell: Region, ring: Region, timeout_s: float
    ) -> None:
        names = list(region_sizes(self.layout, self.tails))
        if set(names) != set(regions):
            raise InvalidArgument(f"regions are given for {sorted(regions)}, the layout has {names}")
        hello = pb.EngineHello(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            layout=layout_to_proto(self.layout, self.tails),
            regions=region_infos(regions, names, rank=0),
            posts=self._poster.transports if self._poster is not None else (),
            doorbell_bytes=doorbell.nbytes,
            ring_bytes=ring.nbytes,
            protocol=PROTOCOL,
            orphan_links=self._writers.links,
        )
        sock = await open_unix(path, timeout_s)
        self._frames = FrameSocket(
            sock, on_frame=self._on_frame, on_closed=self._on_closed, max_frame=MAX_HELLO_BYTES, max_fds=MAX_PASSED_FDS
        )
        own: list[int] = []

        def on_welcome(message: pb.SidecarMessage) -> None:
            # At once: the next message may have a descriptor too.
            if message.hello.pidfd and self._frames is not None:
                own.append(_checked(self._frames.take_fds(1)[0]))

        pidfd = open_pidfd()
        try:
            fds = [pidfd, doorbell.fd, ring.fd, self._eventfd, *region_fds(regions, names)]
            answer = await self._call(pb.EngineMessage(hello=hello), fds, limit_s=timeout_s, on_answer=on_welcome)
        except BaseException:
            close_fds(own)
            raise
        finally:
            os.close(pidfd)
        # A transfer that is handed to a poster has page lists as long as those that were sent.
        self._frames.restrict(max_fds=MAX_PASSED_FDS)
        self._sidecar = self._writers.sidecar_joined(own.pop() if own else _peer_pidfd(sock), os.fspath(path))
        wanted = {(name, rank) for name in names for rank in range(self.layout.tp)}
        if answer.WhichOneof("body") != "hello" or {(r.group, r.rank) for r in answer.hello.regions} != wanted:
            raise DataLoss("the sidecar answered the hello with something else")
        self.sidecar_id = answer.hello.sidecar_id
        self.sidecar_incarnation = answer.hello.incarnation
        self.control_address = answer.hello.control_address
        self.transports = list(answer.hello.transports)
        self.takes_dmabufs = answer.hello.dmabufs
        self._knows_leaving = answer.hello.leaving
        self.region_infos = list(answer.hello.regions)
        if self._poster is not None:
            self._poster.connected(self._send)

    @property
    def connected(self) -> bool:
        """False once the sidecar is lost or `close` was called."""
        return not self._closed

    # --- destination ---------------------------------------------------------------------------------------------

    async def open_slot(
        self,
        *,
        expected_bytes: int,
        groups: Mapping[str, Sequence[int]],
        request_id: str,
        ttl_s: float,
        traceparent: str = "",
        num_tokens: int = 0,
        tails: Mapping[str, int] | None = None,
    ) -> SlotHandle:
        """Register an expectation: pages of each group that will be written. Do this before the descriptor leaves.

        expected_bytes: by `slot_bytes`, and `tail_bytes` for tails. num_tokens: wanted from the lists' first on (0: all
        that they hold); a writer whose pages have another size sends exactly these. tails: a row of each tail buffer.
        Raises Overloaded (no slot free), InvalidArgument, Unavailable.
        """
        request = pb.OpenSlot(
            expected_bytes=expected_bytes,
            request_id=request_id,
            traceparent=traceparent,
            ttl_ms=max(1, int(ttl_s * 1000)),
            groups=groups_to_proto(groups),
            num_tokens=num_tokens,
            tails=rows_to_proto(tails or {}),
        )
        made: list[SlotHandle] = []

        def on_answer(message: pb.SidecarMessage) -> None:
            # Before any event of the slot can be read, and also where the caller has been cancelled meanwhile.
            if message.WhichOneof("body") == "slot_opened":
                opened = message.slot_opened
                handle = SlotHandle(
                    opened.slot,
                    opened.generation,
                    expected_bytes,
                    request_id,
                    self.sidecar_incarnation,
                    self._loop.create_future(),
                    self._loop.create_future(),
                )
                # An outcome that nobody awaits is no error.
                handle.completed.add_done_callback(_seen)
                self._slots[opened.slot, opened.generation] = handle
                made.append(handle)

        try:
            await self._call(pb.EngineMessage(open_slot=request), on_answer=on_answer, undo=self._undo_slot)
        except asyncio.CancelledError:
            if made:
                self._close(made[0], "the caller was cancelled")
            raise
        if not made:
            raise DataLoss("the sidecar answered open_slot with something else")
        return made[0]

    async def close_slot(self, handle: SlotHandle, reason: str) -> None:
        """Give a slot up: `completed` raises at once, `drained` resolves later. Idempotent."""
        self._close(handle, reason)

    def _close(self, handle: SlotHandle, reason: str) -> None:
        if self._slots.get((handle.slot, handle.generation)) is not handle:
            return
        if not handle.completed.done():
            handle.completed.set_exception(TransferFailed(f"closed: {reason}"))
        close = pb.CloseSlot(slot=handle.slot, generation=handle.generation, reason=reason)
        self._send(pb.EngineMessage(close_slot=close))

    # --- source --------------------------------------------------------------------------------------------------

    async def start_transfer(
        self,
        descriptor: pb.Descriptor,
        pages: Mapping[str, Sequence[int]],
        *,
        ready_pages: int,
        traceparent: str = "",
        kept: Mapping[str, Sequence[int]] | None = None,
        tails: Mapping[str, int] | None = None,
    ) -> TransferHandle:
        """Begin to send `pages`: this engine's that hold the descriptor's tokens; `source_pages` tells how many. The
        first `ready_pages` leave at once, all layers; the others with step records or `send_pages`. kept: of these
        groups only these positions in `pages` are sent, with the last claim. tails: a row of each tail buffer that the
        descriptor names; they leave with `send_tail`. Raises KvmeshError when refused; nothing of
        the pages is in use then. Cancelled, it cancels the transfer, but may leave its pages in use: who wants to know
        when they are not calls `give_up_start` instead, and waits.

        No time limit: a sidecar that does not answer may have begun to read the pages. Where it is lost before its
        answer, this raises once it has exited or taken this engine in anew, as `TransferHandle.done` does."""
        request = pb.StartTransfer(
            descriptor=descriptor,
            pages=groups_to_proto(pages, kept or {}),
            ready_pages=ready_pages,
            traceparent=traceparent,
            tails=rows_to_proto(tails or {}),
        )
        made: list[TransferHandle] = []
        sent: list[int] = []

        def on_sent(call_id: int) -> None:
            sent.append(call_id)
            self._starts[call_id] = _start_key(descriptor)

        def on_answer(message: pb.SidecarMessage) -> None:
            if message.WhichOneof("body") == "transfer_accepted":
                accepted = message.transfer_accepted
                handle = TransferHandle(accepted.transfer_id, accepted.transport, self._loop.create_future())
                handle.done.add_done_callback(_seen)
                self._transfers[handle.transfer_id] = handle
                made.append(handle)

        try:
            await self._call(
                pb.EngineMessage(start_transfer=request),
                on_answer=on_answer,
                undo=self._undo_transfer,
                uses_pages=True,
                on_sent=on_sent,
            )
        except asyncio.CancelledError:
            if made:
                await self.cancel_transfer(made[0], "the caller was cancelled")
            else:
                self._cancel_starts(sent, "the caller was cancelled")
            raise
        finally:
            for call_id in sent:
                del self._starts[call_id]
        if not made:
            raise DataLoss("the sidecar answered start_transfer with something else")
        return made[0]

    def give_up_start(self, descriptor: pb.Descriptor, reason: str) -> None:
        """Ask for a soon answer to a `start_transfer` of this descriptor, which is not wanted any more: it then raises
        Cancelled (its pages are not in use), or returns a transfer that is being cancelled, `done` of which tells when
        they are not. Nothing where there is none, or where it has its answer."""
        key = _start_key(descriptor)
        self._cancel_starts([call_id for call_id, mine in self._starts.items() if mine == key], reason)

    def _cancel_starts(self, call_ids: Iterable[int], reason: str) -> None:
        for call_id in call_ids:
            self._send(pb.EngineMessage(cancel_start=pb.CancelStart(call_id=call_id, reason=reason)))

    def send_pages(self, handle: TransferHandle, first: int, count: int) -> None:
        """Pages [first, first + count) of the transfer's list are complete in all layers: send them."""
        if self._poster is not None and handle.transport in self._poster.transports:
            self._poster.pages_ready(handle.transfer_id, first, count)
            return
        pages = pb.SendPages(transfer_id=handle.transfer_id, first=first, count=count)
        self._send(pb.EngineMessage(send_pages=pages))

    def send_tail(self, handle: TransferHandle) -> None:
        """The transfer's tail rows are written: send them. Once."""
        if self._poster is not None and handle.transport in self._poster.transports:
            self._poster.tail_ready(handle.transfer_id)
            return
        self._send(pb.EngineMessage(send_tail=pb.SendTail(transfer_id=handle.transfer_id)))

    async def cancel_transfer(self, handle: TransferHandle, reason: str) -> None:
        """Stop sending; `handle.done` raises TransferFailed once drained. Idempotent."""
        if handle.transfer_id in self._transfers:
            cancel = pb.CancelTransfer(transfer_id=handle.transfer_id, reason=reason)
            self._send(pb.EngineMessage(cancel_transfer=cancel))

    def notify_ring(self) -> None:
        """Wake the sidecar's watcher: call it after publishing a step record, and after each layer where latency
        matters (any thread, one system call, never waits, never raises)."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._eventfd, 1)

    # --- life ----------------------------------------------------------------------------------------------------

    def leaving(self) -> None:
        """Tell the sidecar that this engine finishes what it has and goes: told to stop too, it stays until then."""
        if self._knows_leaving:
            self._send(pb.EngineMessage(leaving=pb.EngineLeaving()))

    async def close(self) -> None:
        """End this engine's life at the sidecar: everything open fails. Idempotent; `on_lost` is not called."""
        if self._poster is not None and not self._closed:
            await self._poster.leave(LEAVE_TIMEOUT_S)
        if not self._closed:
            self._end(Unavailable("this engine has left its sidecar"))

    def _shut(self) -> None:
        self._closed = True
        if self._frames is not None:
            self._frames.close()
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    def _end(self, error: KvmeshError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        if self._poster is not None:
            self._poster.lost()
        # It may still read our pages, and send what it finds there; and so may our own poster.
        ends = [partial(_refuse, future, error) for future in self._page_calls.values()]
        ends += [partial(_reject, transfer.done, error.message) for transfer in self._transfers.values()]
        self._page_calls.clear()
        self._transfers.clear()
        for end in ends:
            self._when_drained(partial(self._writers.when_gone, end, only=self._sidecar))
        slots, self._slots = self._slots, {}
        for handle in slots.values():
            if not handle.completed.done():
                handle.completed.set_exception(TransferFailed(error.message))
            self._writers.when_gone(partial(_resolve, handle.drained))
        self._shut()

    def _on_closed(self, error: KvmeshError | None) -> None:
        if self._closed:
            return
        self._end(Unavailable(f"the sidecar is lost: {error.message if error is not None else 'end of file'}"))
        self._on_lost()

    # --- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: pb.EngineMessage, fds: Sequence[int] = ()) -> None:
        if self._frames is not None and not self._closed:
            self._frames.send(message, fds)

    async def _call(
        self,
        message: pb.EngineMessage,
        fds: Sequence[int] = (),
        *,
        on_answer: Callable[[pb.SidecarMessage], None] | None = None,
        undo: Callable[[pb.SidecarMessage], None] | None = None,
        uses_pages: bool = False,
        limit_s: float = 0.0,
        on_sent: Callable[[int], None] | None = None,
    ) -> pb.SidecarMessage:
        """One request and its answer. `undo` gets an answer that comes when nobody waits any more. uses_pages: it does
        not fail while the sidecar may still act on it. limit_s: instead of CALL_TIMEOUT_S. on_sent gets the call_id."""
        if self._closed:
            raise Unavailable("the sidecar is lost")
        limit_s = limit_s or CALL_TIMEOUT_S
        call_id = next(self._call_ids)
        message.call_id = call_id
        future: asyncio.Future[pb.SidecarMessage] = self._loop.create_future()

        def settle(answer: pb.SidecarMessage) -> None:
            if future.done():
                if undo is not None:
                    undo(answer)
            else:
                if on_answer is not None:
                    on_answer(answer)
                future.set_result(answer)

        self._answers[call_id] = settle
        calls = self._page_calls if uses_pages else self._calls
        calls[call_id] = future
        try:
            self._send(message, fds)
            if on_sent is not None:
                on_sent(call_id)
            async with asyncio.timeout(None if uses_pages else limit_s):
                answer = await future
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from the sidecar within {limit_s:g} s") from None
        finally:
            calls.pop(call_id, None)
        if answer.WhichOneof("body") == "refused":
            raise refusal(answer.refused)
        return answer

    def _undo_slot(self, answer: pb.SidecarMessage) -> None:
        if answer.WhichOneof("body") == "slot_opened":
            opened = answer.slot_opened
            close = pb.CloseSlot(slot=opened.slot, generation=opened.generation, reason="the caller was cancelled")
            self._send(pb.EngineMessage(close_slot=close))

    def _undo_transfer(self, answer: pb.SidecarMessage) -> None:
        if answer.WhichOneof("body") == "transfer_accepted":
            cancel = pb.CancelTransfer(
                transfer_id=answer.transfer_accepted.transfer_id, reason="the caller was cancelled"
            )
            self._send(pb.EngineMessage(cancel_transfer=cancel))

    def _on_frame(self, body: bytes) -> None:
        try:
            message = pb.SidecarMessage.FromString(body)
        except DecodeError:
            raise DataLoss("the sidecar sent something that is no message") from None
        if message.call_id:
            settle = self._answers.pop(message.call_id, None)
            if settle is not None:
                settle(message)
            return
        kind = message.WhichOneof("body")
        if kind == "slot_complete":
            self._slot_complete(message.slot_complete)
        elif kind == "slot_failed":
            failed = message.slot_failed
            handle = self._slots.get((failed.slot, failed.generation))
            if handle is not None and not handle.completed.done():
                handle.completed.set_exception(TransferFailed(failed.reason))
        elif kind == "slot_drained":
            drained = message.slot_drained
            handle = self._slots.pop((drained.slot, drained.generation), None)
            if handle is not None:
                if not handle.completed.done():
                    handle.completed.set_exception(TransferFailed("drained"))
                _resolve(handle.drained)
        elif kind == "transfer_done":
            transfer = self._transfers.pop(message.transfer_done.transfer_id, None)
            if transfer is not None and not transfer.done.done():
                transfer.done.set_result(message.transfer_done.bytes)
        elif kind == "transfer_failed":
            transfer = self._transfers.pop(message.transfer_failed.transfer_id, None)
            if transfer is not None:
                self._when_drained(
                    partial(_reject, transfer.done, message.transfer_failed.reason), transfer.transfer_id
                )
        elif kind == "writer_joined":
            self._writer_joined(message.writer_joined.link_id)
        elif kind == "writer_gone":
            self._writers.gone(message.writer_gone.link_id)
        elif kind in POSTER_MESSAGES and self._poster is not None:
            assert self._frames is not None
            self._poster.take(message, self._frames.take_fds)

    def _when_drained(self, done: Callable[[], None], transfer_id: int | None = None) -> None:
        """Call `done` when the poster writes nothing of that transfer (None: of any) any more."""
        if self._poster is not None:
            self._poster.when_drained(done, transfer_id)
        else:
            done()

    def _slot_complete(self, complete: pb.SlotComplete) -> None:
        handle = self._slots.pop((complete.slot, complete.generation), None)
        if handle is None:
            return
        if not handle.completed.done():
            handle.completed.set_result(SlotResult(complete.bytes, complete.transport, complete.elapsed_ms))
        # Closed by us while the last bytes landed: nothing can land any more either way.
        _resolve(handle.drained)

    def _writer_joined(self, link_id: int) -> None:
        assert self._frames is not None
        (pidfd,) = self._frames.take_fds(1)
        self._writers.joined(link_id, _checked(pidfd))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _refuse(future: asyncio.Future[pb.SidecarMessage], error: KvmeshError) -> None:
    if not future.done():
        future.set_exception(error)


def _reject(future: asyncio.Future[int], reason: str) -> None:
    if not future.done():
        future.set_exception(TransferFailed(reason))


def _checked(pidfd: int) -> int:
    """The same. Raises InvalidArgument, and closes it, where it is none."""
    try:
        check_pidfd(pidfd)
    except InvalidArgument:
        close_fds([pidfd])
        raise
    return pidfd


def _peer_pidfd(sock: socket.socket) -> int:
    """A pidfd of the process that listens there, of a sidecar that passes none. Raises NotFound where it is gone or out
    of sight."""
    try:
        # Also across PID namespaces.
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if pid <= 0:
            raise NotFound("the sidecar's process is out of sight, and this kernel has no SO_PEERPIDFD") from None
        return open_pidfd(pid)


def _seen(future: asyncio.Future[SlotResult] | asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()
