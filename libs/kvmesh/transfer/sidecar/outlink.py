"""One link on which this sidecar writes: the client side of one KvTransfer.Peer stream, and the transfers on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.trace import Span

from kvmesh.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvmeshError,
    NotFound,
    TransferFailed,
    Unavailable,
)
from kvmesh.kv.layout import KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.rpc import MeshChannel, raising
from kvmesh.telemetry import metrics, names
from kvmesh.transfer.descriptor import check_layouts_match, check_region_infos, layout_from_proto, layout_to_proto
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.sends import SendEvent
from kvmesh.transfer.sidecar.choice import bounded, one_line, reason_code
from kvmesh.transfer.sidecar.contracts import Host, Session
from kvmesh.transfer.sidecar.stream import Outbox, next_message, short
from kvmesh.transfer.tail import TailBuffer, tails_from_proto
from kvmesh.transfer.transports.base import Outbound
from kvmesh.transfer.wire import PROTOCOL

log = logging.getLogger(__name__)

LinkKey = tuple[str, int, int, str]
"""Destination engine, its life, the life of its sidecar, the sidecar's control address."""


def open_peer(channel: MeshChannel, timeout_s: float | None) -> Any:
    """A Peer call that is written to and read from by hand (the stubs' types know only the way with an iterator)."""
    peer: Any = kvtransfer_pb2_grpc.KvTransferStub(channel).Peer
    return peer() if timeout_s is None else peer(timeout=timeout_s)


@dataclass(slots=True, eq=False)
class OutTransfer:
    """One transfer on a link, from bind to its end."""

    link: OutLink
    transfer_id: int
    slot: int
    generation: int
    request_id: str
    span: Span
    started: float = field(default_factory=time.monotonic)
    running: bool = False
    accepted: bool = False
    aborted: str = ""
    ended: SendEvent | None = None

    @property
    def immediate(self) -> int:
        return pack(self.slot, self.generation)


class LinkOwner(Protocol):
    """Who keeps a link."""

    sidecar: Host

    def leave(self, link: OutLink) -> None:
        """A link is not to be used any more."""

    def ended(self, link: OutLink) -> None:
        """A link's task is at its end."""

    def tell_unmapped(self, link: OutLink) -> None:
        """Tell that engine that its memory is let go of, until somebody has heard it."""

    def untold(self, engine_id: str, incarnation: int) -> list[pb.Unmapped]:
        """Notices for an engine that nobody has taken yet."""

    def heard(self, notices: Iterable[pb.Unmapped]) -> None:
        """The destination has read them."""


class OutLink:
    """A link to one destination engine's life at one life of its sidecar."""

    def __init__(self, owner: LinkOwner, session: Session, key: LinkKey) -> None:
        self.owner = owner
        self.session = session
        self.key = key
        self.state = "connecting"
        self.transport = ""
        self.reason = ""
        self.candidates: list[pb.TransportCandidate] = []
        self.link_id = 0
        self.bytes = 0
        self.transfers = 0
        self.layout: KvLayout | None = None
        self.tails: tuple[TailBuffer, ...] = ()
        self.regions: list[pb.RegionInfo] = []
        self.outbound: Outbound | None = None
        self.current: dict[int, OutTransfer] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox: Outbox[pb.PeerRequest] | None = None
        self._binds: dict[int, asyncio.Future[None]] = {}
        self._carried: list[pb.Unmapped] = []
        self._ended = asyncio.Event()
        self._end_reason = ""
        self._finish = False

    @property
    def engine_id(self) -> str:
        return self.key[0]

    @property
    def incarnation(self) -> int:
        return self.key[1]

    def end(self, reason: str, *, finish: bool = False) -> None:
        """Make `run` stop. finish: the stream is in order and is told Unmapped before it is closed."""
        if not self._ended.is_set():
            self._end_reason = reason
            self._finish = finish
            self._ended.set()

    async def run(self) -> None:
        """Open, serve, and clean up. Failure to open is told through `ready`."""
        options = self.owner.sidecar.options
        channel: MeshChannel | None = None
        cause = "cancelled"
        failed: list[pb.TransportOffer] = []
        try:
            # May fail too: certificates that cannot be read, an address that is none.
            channel = options.open_channel(self.key[3])
            while not await self._attempt(channel, failed):
                pass
            cause = self._end_reason or "the destination ended the link"
        except KvmeshError as error:
            cause = error.message
            self._not_ready(error)
        except Exception as error:
            cause = short(error)
            self._not_ready(Unavailable(f"the link failed: {cause}"))
        finally:
            self._not_ready(Unavailable(cause))
            self.state = "fenced"
            self.owner.ended(self)
            if channel is not None:
                await channel.close()

    def _not_ready(self, error: KvmeshError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            # Nobody may be waiting any more.
            self.ready.exception()

    async def _attempt(self, channel: MeshChannel, failed: list[pb.TransportOffer]) -> bool:
        """One stream. False where its transport could not be opened and another may be tried."""
        options = self.owner.sidecar.options
        memory = self.session.memory
        call = open_peer(channel, None)
        try:
            with raising():
                hello = pb.PeerHello(
                    protocol=PROTOCOL,
                    engine_id=memory.engine_id,
                    incarnation=memory.incarnation,
                    sidecar_id=options.sidecar_id,
                    sidecar_incarnation=self.owner.sidecar.incarnation,
                    destination_engine_id=self.engine_id,
                    destination_incarnation=self.incarnation,
                    destination_sidecar_incarnation=self.key[2],
                    layout=layout_to_proto(memory.layout, memory.tails),
                    offers=[t.offer() for t in self.owner.sidecar.transports.values() if t.ready[0]],
                    failed=failed,
                    unusable=[
                        pb.TransportOffer(name=name, reason=why[:200])
                        for name, (usable, why) in ((n, t.ready) for n, t in self.owner.sidecar.configured.items())
                        if not usable
                    ],
                )
                reply = await self._hello(call, hello)
                self._take(reply)
                try:
                    transport = self.owner.sidecar.transports[reply.transport]
                    transport.reached(reply.link_id, self.key[3])
                    self.outbound = await transport.connect_over(
                        lambda hello: self._ask(call, hello), reply, options.sidecar_id, options.connect_timeout_s
                    )
                except KvmeshError as error:
                    log.warning("link to %s: %s cannot be opened: %s", self.engine_id, reply.transport, error.message)
                    failed.append(pb.TransportOffer(name=reply.transport, reason=error.message[:200]))
                    # Not on this stream: it may be broken, and ending it may overtake what was written last.
                    self.owner.tell_unmapped(self)
                    return False
                except BaseException:
                    # The destination may have passed its memory on to us already.
                    self.owner.tell_unmapped(self)
                    raise
                await self._serve(call)
                return True
        finally:
            call.cancel()

    async def _hello(self, call: Any, hello: pb.PeerHello) -> pb.PeerHelloReply:
        timeout_s = self.owner.sidecar.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(pb.PeerRequest(hello=hello))
                response = await anext(aiter(call), None)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.key[3]} did not answer the hello within {timeout_s:g} s") from None
        if response is None or response.WhichOneof("body") != "hello":
            raise Unavailable("the destination did not answer the hello")
        reply: pb.PeerHelloReply = response.hello
        return reply

    async def _ask(self, call: Any, hello: pb.DataHello) -> pb.DataHelloReply:
        """A data hello over the stream, before it is served."""
        timeout_s = self.owner.sidecar.options.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(pb.PeerRequest(data_hello=hello))
                async for response in call:
                    if response.WhichOneof("body") == "data_hello":
                        answer: pb.DataHelloReply = response.data_hello
                        return answer
                    if response.WhichOneof("body") != "heartbeat":
                        break
        except TimeoutError:
            raise DeadlineExceeded(f"{self.key[3]} did not answer the data hello within {timeout_s:g} s") from None
        raise Unavailable("the destination did not answer the data hello")

    def _take(self, reply: pb.PeerHelloReply) -> None:
        """Check the reply: nothing of it may be believed without."""
        if reply.protocol != PROTOCOL:
            raise FailedPrecondition(f"peer protocol {reply.protocol} is not spoken here (this is {PROTOCOL})")
        if (reply.engine_id, reply.incarnation, reply.sidecar_incarnation) != self.key[:3]:
            raise NotFound("another engine answered")
        if reply.transport not in self.owner.sidecar.transports:
            raise FailedPrecondition(f"the destination chose transport {reply.transport!r}, which was not offered")
        layout = layout_from_proto(reply.layout)
        check_layouts_match(self.session.memory.layout, layout)
        tails = tails_from_proto(reply.layout, layout)
        check_region_infos("the destination's hello", reply.regions, layout, tails)
        self.layout = layout
        self.tails = tails
        self.regions = list(reply.regions)
        self.link_id = reply.link_id
        self.transport = reply.transport
        self.reason = reply.reason[:2000]
        self.candidates = bounded(reply.candidates)

    def notice(self) -> pb.Unmapped:
        return pb.Unmapped(engine_id=self.engine_id, incarnation=self.incarnation, link_id=self.link_id)

    async def _serve(self, call: Any) -> None:
        assert self.outbound is not None
        mover = self.owner.sidecar.mover
        options = self.owner.sidecar.options
        try:
            await mover.add_link(self.outbound)
        except BaseException:
            # It may be driven all the same. The peer's memory is not to stay with us, and the peer is to know.
            await self._release("the link could not be taken up")
            self.owner.tell_unmapped(self)
            raise
        self._outbox = Outbox(
            call.write,
            lambda n: pb.PeerRequest(heartbeat=pb.Heartbeat(sequence=n)),
            options.heartbeat_s,
        )
        writer = asyncio.create_task(self._outbox.run())
        reader = asyncio.create_task(self._read(call))
        ended = asyncio.create_task(self._ended.wait())
        told = False
        self.state = "up"
        code = reason_code(self.candidates)
        metrics.gauge(names.TRANSFER_PEERS).labels(self.transport).inc()
        metrics.gauge(names.TRANSFER_LINKS).labels(self.transport, "out", code).inc()
        log.info(
            "link %x: writes to %s by %s: %s",
            self.link_id,
            self.engine_id,
            self.transport,
            one_line(self.candidates) or self.reason,
        )
        self._carried = self.owner.untold(self.engine_id, self.incarnation)
        for notice in self._carried:
            self._outbox.put(pb.PeerRequest(unmapped=notice))
        if not self.ready.done():
            self.ready.set_result(None)
        try:
            await asyncio.wait([writer, reader, ended], return_when=asyncio.FIRST_COMPLETED)
            if self._finish and not reader.done() and not writer.done():
                # In order: everything stops and drains, the peer hears each end, then that its memory is let go of.
                await self._release(self._end_reason)
                if not self.held:
                    self._outbox.put(pb.PeerRequest(unmapped=self.notice()))
                self._outbox.finish()
                await asyncio.wait([writer], timeout=options.lease_s)
                told = writer.done() and writer.exception() is None
                with contextlib.suppress(asyncio.InvalidStateError):
                    await call.done_writing()
            for task in (reader, writer):
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    self._end_reason = self._end_reason or short(error)
                    raise error
        finally:
            self.state = "fencing"
            # Whoever comes for this destination from now on gets a new link.
            self.owner.leave(self)
            writer.cancel()
            reader.cancel()
            ended.cancel()
            await asyncio.gather(writer, reader, ended, return_exceptions=True)
            metrics.gauge(names.TRANSFER_PEERS).labels(self.transport).dec()
            metrics.gauge(names.TRANSFER_LINKS).labels(self.transport, "out", code).dec()
            log.info("link %x: to %s ended: %s", self.link_id, self.engine_id, self._end_reason or "by the destination")
            await self._release(self._end_reason or "the destination is gone")
            if not told:
                self.owner.tell_unmapped(self)

    async def _release(self, reason: str) -> None:
        """Stop and drain the link's transfers, then let go of the peer's memory."""
        for future in self._binds.values():
            if not future.done():
                future.set_exception(Unavailable(reason))
        if self.outbound is not None:
            await self.owner.sidecar.mover.remove_link(self.outbound, reason)
            # Events of the drained transfers are on the loop already: let them be handled before anything follows.
            await asyncio.sleep(0)
            await self.outbound.released()

    @property
    def held(self) -> bool:
        """True while somebody may still have the peer's memory mapped, who has not said otherwise."""
        transport = self.owner.sidecar.transports.get(self.transport)
        return transport is not None and transport.holds(self.link_id)

    async def _read(self, call: Any) -> None:
        lease_s = self.owner.sidecar.options.lease_s
        stream = aiter(call)
        while (message := await next_message(stream, lease_s, self.engine_id)) is not None:
            kind = message.WhichOneof("body")
            if kind == "bind":
                # Answered in order: what was sent before the bind has been read.
                self.owner.heard(self._carried)
                self._carried = []
                future = self._binds.pop(pack(message.bind.slot, message.bind.generation), None)
                if future is not None and not future.done():
                    if message.bind.ok:
                        future.set_result(None)
                    else:
                        future.set_exception(TransferFailed(f"bind refused: {message.bind.reason[:500]}"))
            elif kind == "abort":
                self._abort(message.abort)
            elif kind != "heartbeat":
                raise InvalidArgument(f"a destination sent {kind or 'nothing that is known'}")

    def _abort(self, abort: pb.AbortSlot) -> None:
        reason = f"aborted by the destination: {abort.reason[:500]}"
        transfer = self.current.get(pack(abort.slot, abort.generation))
        if transfer is not None:
            transfer.aborted = reason
        if transfer is not None and transfer.running:
            self.owner.sidecar.mover.stop_send(transfer.transfer_id, reason, by_peer=True)
            return
        # Nothing of it is in flight: never started, or every write has completed.
        self.send(pb.PeerRequest(drained=pb.Drained(slot=abort.slot, generation=abort.generation)))

    def send(self, message: pb.PeerRequest) -> None:
        """Queue a control message; on a link that is gone the fence says it all."""
        if self._outbox is not None and self.state == "up":
            self._outbox.put(message)

    async def bind(self, transfer: OutTransfer, nbytes: int) -> None:
        """Take the slot. Raises TransferFailed (refused), DeadlineExceeded, Unavailable."""
        if self._outbox is None or self.state != "up":
            raise Unavailable("the link is gone")
        if transfer.immediate in self.current:
            raise FailedPrecondition(f"slot {transfer.slot} generation {transfer.generation} is in use on this link")
        self.current[transfer.immediate] = transfer
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._binds[transfer.immediate] = future
        timeout_s = self.owner.sidecar.options.connect_timeout_s
        bind = pb.BindSlot(
            slot=transfer.slot, generation=transfer.generation, bytes=nbytes, request_id=transfer.request_id
        )
        self._outbox.put(pb.PeerRequest(bind=bind))
        try:
            async with asyncio.timeout(timeout_s):
                await future
            if transfer.aborted:
                raise TransferFailed(transfer.aborted)
        except TimeoutError:
            # It may have been taken all the same: say that nothing will come.
            self.fail(transfer, "no answer to the bind")
            raise DeadlineExceeded(f"no answer to the bind within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.fail(transfer, "cancelled")
            raise
        except KvmeshError:
            self.current.pop(transfer.immediate, None)
            raise
        finally:
            self._binds.pop(transfer.immediate, None)

    def fail(self, transfer: OutTransfer, reason: str) -> None:
        """Tell the destination that this generation failed here and is drained."""
        self.current.pop(transfer.immediate, None)
        self.send(
            pb.PeerRequest(
                failed=pb.GenerationFailed(slot=transfer.slot, generation=transfer.generation, reason=reason[:500])
            )
        )
