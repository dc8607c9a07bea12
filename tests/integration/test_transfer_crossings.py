"""Messages that cross, and peers that do half of what they should: whatever the order, both ends come to an end.

A `Sidecar` in this process, so that a test decides what happens first; its peer is written by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvmesh.errors import DataLoss, InvalidArgument, KvmeshError, TransferFailed
from kvmesh.kv.fds import close_fds
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.telemetry import tracing
from kvmesh.transfer.descriptor import build_descriptor, layout_to_proto
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.link import SidecarLink
from kvmesh.transfer.sends import SendDone, SendDrained
from kvmesh.transfer.sidecar import Sidecar, SidecarOptions
from kvmesh.transfer.sidecar.outgoing import OutgoingLinks
from kvmesh.transfer.sidecar.outlink import OutLink, OutTransfer
from kvmesh.transfer.transports.shm import host_id
from kvmesh.transfer.wire import PROTOCOL, exchange, open_unix
from services.kvtransfer.service import KvTransferServicer
from transfer_kit import Engine, make_layout, soon

LEASE_S = 2.0
LAYOUT = make_layout()


class Here:
    """A sidecar in this process, with its control API on a port."""

    def __init__(self, folder: Path, *transports: str) -> None:
        self.socket = folder / "here.sock"
        options = SidecarOptions(
            sidecar_id="here",
            engine_socket=self.socket,
            open_channel=cast(Any, grpc.aio.insecure_channel),
            transports=transports or ("shm", "tcp"),
            heartbeat_s=0.05,
            lease_s=LEASE_S,
        )
        self.sidecar = Sidecar(options, on_engine=lambda present: None)
        self.server = grpc.aio.server()

    async def start(self) -> Here:
        await self.sidecar.start()
        kvtransfer_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(self.sidecar), self.server)
        self.sidecar.control_address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await self.sidecar.listen()
        return self

    async def close(self) -> None:
        await self.sidecar.close()
        await self.server.stop(None)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Here]:
    here = await Here(tmp_path).start()
    yield here
    await here.close()


@pytest.fixture
async def engine(here: Here) -> AsyncIterator[Engine]:
    engine = await Engine("e", cast(Any, here), LAYOUT).connect()
    yield engine
    await engine.close()


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for what no event tells of."""
    try:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None


# --- the source's control messages: abort against the end of the transfer ---------------------------------------------


class Desk:
    """The outgoing side of a sidecar with one transfer that is at its end; messages are kept, the mover is deaf."""

    def __init__(self) -> None:
        self.sent: list[pb.PeerRequest] = []
        self.stopped: list[int] = []
        mover = SimpleNamespace(stop_send=lambda number, reason, by_peer: self.stopped.append(number))
        options = SimpleNamespace(transports=("fake",))
        self.outgoing = OutgoingLinks(cast(Any, SimpleNamespace(mover=mover, transports={}, options=options)))
        self.link = OutLink(self.outgoing, cast(Any, None), ("d", 1, 1, "h:1"))
        self.link.state, self.link.transport = "up", "shm"
        self.link._outbox = cast(Any, SimpleNamespace(put=self.sent.append))
        self.transfer = OutTransfer(self.link, 9, 3, 5, "r", tracing.start_span("test"), running=True, accepted=True)
        self.link.current[pack(3, 5)] = self.transfer
        self.outgoing.transfers[9] = self.transfer

    def abort(self) -> None:
        self.link._abort(pb.AbortSlot(slot=3, generation=5, reason="not wanted"))

    def ends(self, *, done: bool, by_peer: bool = False, reason: str = "") -> None:
        send = SimpleNamespace(context=self.transfer, written=1, runs=1, by_peer=by_peer, reason=reason)
        self.outgoing.on_event((SendDone if done else SendDrained)(cast(Any, send)))

    @property
    def said(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.sent]


DRAINED = pb.PeerRequest(drained=pb.Drained(slot=3, generation=5))


async def test_abort_that_crosses_the_last_completion_is_answered() -> None:
    desk = Desk()
    # The mover has completed the last write; its event is on its way to the loop when the abort is read.
    desk.abort()
    assert desk.stopped == [9]
    assert desk.sent == []
    desk.ends(done=True)
    assert desk.sent == [DRAINED]
    # Twice asked, twice answered: the destination drops what is stale.
    desk.abort()
    assert desk.sent == [DRAINED, DRAINED]


async def test_abort_after_the_last_completion_is_answered() -> None:
    desk = Desk()
    desk.ends(done=True)
    assert desk.sent == []
    desk.abort()
    assert desk.sent == [DRAINED]


async def test_abort_that_crosses_our_own_failure_is_answered_once() -> None:
    desk = Desk()
    desk.abort()
    desk.ends(done=False, reason="a write failed")
    assert desk.said == ["failed"]
    desk = Desk()
    desk.abort()
    desk.ends(done=False, by_peer=True, reason="not wanted")
    assert desk.sent == [DRAINED]


async def test_a_broken_link_says_nothing_and_leaves_it_to_the_fence() -> None:
    desk = Desk()
    desk.link.outbound = cast(Any, SimpleNamespace(broken="cut"))
    desk.abort()
    desk.ends(done=False, by_peer=True, reason="cut")
    assert desk.sent == []
    assert not desk.link.current


@pytest.mark.parametrize("first", ["abort", "bind"])
async def test_abort_that_crosses_the_bind(first: str) -> None:
    """The reply and the abort are read in one go, before whoever waits for the bind has its turn."""
    desk = Desk()
    desk.outgoing.sidecar = cast(Any, SimpleNamespace(options=SimpleNamespace(connect_timeout_s=60)))
    transfer = OutTransfer(desk.link, 10, 4, 6, "r", tracing.start_span("test"))
    binding = asyncio.create_task(desk.link.bind(transfer, 100))
    await asyncio.sleep(0)
    abort = pb.AbortSlot(slot=4, generation=6, reason="not wanted")
    if first == "abort":
        desk.link._abort(abort)
    desk.link._binds[pack(4, 6)].set_result(None)
    if first == "bind":
        desk.link._abort(abort)
    with pytest.raises(TransferFailed, match="not wanted"):
        await binding
    assert desk.said == ["bind", "drained"]
    assert pack(4, 6) not in desk.link.current


async def test_notices_stay_until_they_are_heard() -> None:
    """A link may break before what it was given is read over there."""
    desk = Desk()
    session = SimpleNamespace(memory=SimpleNamespace(engine_id="s", incarnation=1))
    gone = OutLink(desk.outgoing, cast(Any, session), ("d", 1, 1, "h:1"))
    gone.link_id, gone.transport = 77, "shm"
    desk.outgoing._notices = cast(Any, SimpleNamespace(spawn=lambda task, **_: task.close()))
    desk.outgoing.tell_unmapped(gone)
    # The link's next attempt has a name of its own: the notice keeps the first.
    gone.link_id = 78
    notice = pb.Unmapped(engine_id="d", incarnation=1, link_id=77)
    assert desk.outgoing.untold("d", 1) == [notice]
    assert desk.outgoing.untold("d", 1) == [notice]
    assert desk.outgoing.untold("d", 2) == []
    desk.outgoing.heard([notice])
    assert desk.outgoing.untold("d", 1) == []


# --- a destination written by hand ------------------------------------------------------------------------------------


class Destination(kvtransfer_pb2_grpc.KvTransferServicer):
    """Lets a writer in to its data socket, and breaks off there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "there.shm"
        self.hellos = 0
        self.came = asyncio.Event()
        self.notices: asyncio.Queue[pb.Unmapped] = asyncio.Queue()
        self.engine = SimpleNamespace(
            engine_id="d",
            incarnation=3,
            sidecar_incarnation=4,
            layout=LAYOUT,
            tails=(),
            region_infos=[pb.RegionInfo(group="main", rank=0, nbytes=LAYOUT.region_bytes("main"), key=5)],
            control_address="",
        )

    async def Peer(self, requests: AsyncIterator[pb.PeerRequest], context: Any) -> None:  # type: ignore[override]
        hello = (await anext(requests)).hello
        if not hello.offers:
            await context.write(pb.PeerResponse(hello=pb.PeerHelloReply(protocol=PROTOCOL)))
            self.notices.put_nowait((await anext(requests)).unmapped)
            return
        self.hellos += 1
        reply = pb.PeerHelloReply(
            protocol=PROTOCOL,
            engine_id="d",
            incarnation=3,
            sidecar_incarnation=4,
            transport="shm",
            endpoint=str(self.path),
            token=b"t",
            link_id=70 + self.hellos,
            layout=layout_to_proto(LAYOUT),
            regions=self.engine.region_infos,
        )
        await context.write(pb.PeerResponse(hello=reply))
        await self.came.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def descriptor(self) -> pb.Descriptor:
        expected = LAYOUT.num_layers * LAYOUT.page_bytes("main")
        slot = SimpleNamespace(slot=1, generation=1, expected_bytes=expected, request_id="r")
        return build_descriptor(cast(Any, self.engine), slot, groups={"main": [4]}, first_block=0, num_tokens=16)


async def test_memory_that_may_have_come_is_told_of_though_the_stream_broke(engine: Engine, tmp_path: Path) -> None:
    """Else the destination waits for this process's exit: it passed its memory on and cannot know what became of it."""
    there = Destination(tmp_path)
    server = grpc.aio.server()
    kvtransfer_pb2_grpc.add_KvTransferServicer_to_server(there, server)
    there.engine.control_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        there.came.set()
        writer.close()

    listener = await asyncio.start_unix_server(let_in, there.path)
    with pytest.raises(KvmeshError):
        await soon(engine.client.start_transfer(there.descriptor(), {"main": [1]}, ready_pages=1))
    notice = cast(pb.Unmapped, await soon(there.notices.get()))
    assert (notice.engine_id, notice.incarnation, notice.link_id) == ("d", 3, 71)
    listener.close()
    await server.stop(None)


# --- a writer written by hand -----------------------------------------------------------------------------------------


class Writer:
    """A peer with an shm data connection; this process stands for its sidecar."""

    async def open(self, here: Here, target: Engine) -> Writer:
        client = target.client
        self.channel = grpc.aio.insecure_channel(here.sidecar.control_address)
        self.stub: Any = kvtransfer_pb2_grpc.KvTransferStub(self.channel)
        self.hello = pb.PeerHello(
            protocol=PROTOCOL,
            engine_id="w",
            incarnation=1,
            sidecar_id="w",
            sidecar_incarnation=1,
            destination_engine_id=client.engine_id,
            destination_incarnation=client.incarnation,
            destination_sidecar_incarnation=client.sidecar_incarnation,
            layout=layout_to_proto(LAYOUT),
            offers=[pb.TransportOffer(name="shm", host_id=host_id())],
        )
        self.call = self.stub.Peer()
        # A call takes one write at a time.
        self.writing = asyncio.Lock()
        await self.say(pb.PeerRequest(hello=self.hello))
        self.reply = (await self.call.read()).hello
        self.heart = asyncio.create_task(self._beat())
        self.sock = await open_unix(self.reply.endpoint, 60)
        hello = pb.DataHello(protocol=PROTOCOL, token=self.reply.token, link_id=self.reply.link_id, sidecar_id="w")
        pidfd = open_pidfd()
        body, fds = await exchange(self.sock, hello, [pidfd], max_fds=4, timeout_s=60)
        os.close(pidfd)
        assert pb.DataHelloReply.FromString(body).ok
        close_fds(fds)
        return self

    async def say(self, message: pb.PeerRequest) -> None:
        async with self.writing:
            await self.call.write(message)

    async def _beat(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self.say(pb.PeerRequest(heartbeat=pb.Heartbeat()))
                await asyncio.sleep(0.05)

    async def bind(self, slot: Any) -> None:
        bind = pb.BindSlot(slot=slot.slot, generation=slot.generation, bytes=slot.expected_bytes)
        await self.say(pb.PeerRequest(bind=bind))
        while (message := await self.call.read()).WhichOneof("body") != "bind":
            pass
        assert message.bind.ok

    async def notice(self) -> None:
        """Unmapped, on a stream of its own, taken by whoever serves the engine now."""
        hello = pb.PeerHello.FromString(self.hello.SerializeToString())
        del hello.offers[:]
        call = self.stub.Peer()
        await call.write(pb.PeerRequest(hello=hello))
        assert (await call.read()).hello.protocol == PROTOCOL
        unmapped = pb.Unmapped(
            engine_id=hello.destination_engine_id,
            incarnation=hello.destination_incarnation,
            link_id=self.reply.link_id,
        )
        await call.write(pb.PeerRequest(unmapped=unmapped))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    async def close(self) -> None:
        self.heart.cancel()
        self.call.cancel()
        self.sock.close()
        await self.channel.close()


async def test_a_writer_that_never_answers_an_abort_is_fenced(here: Here, engine: Engine) -> None:
    """It lives and beats, so no lease ends it; its slot must not drain for ever."""
    writer = await Writer().open(here, engine)
    slot = await engine.open([1, 2])
    await writer.bind(slot)
    await engine.client.close_slot(slot, "not wanted")
    await until(
        lambda: here.sidecar.session and [s.state.value for s in here.sidecar.session.slots] == ["draining"], ""
    )
    assert not slot.drained.done()
    # The link ends without its doing; shm's fence then waits for its word.
    await soon(writer.call.code())
    assert not slot.drained.done()
    await writer.notice()
    await soon(slot.drained)
    await until(lambda: not here.sidecar.incoming.links, "the link is still there")
    await writer.close()


async def test_an_engine_that_comes_back_to_the_same_sidecar_hears_of_its_old_writers(
    here: Here, tmp_path: Path
) -> None:
    engine = Engine("e", cast(Any, here), LAYOUT)
    link = SidecarLink(
        here.socket,
        engine_id="e",
        incarnation=1,
        layout=LAYOUT,
        regions=engine.regions,
        doorbell=engine.doorbell_region,
        ring=engine.ring_region,
    )
    link.start()
    engine.client = first = await link.wait_connected(60)
    writer = await Writer().open(here, engine)
    slot = await engine.open([1, 2])
    await writer.bind(slot)
    # Only the connection is lost, and the writer is slow to let go: longer than the session waits for it.
    assert first._frames is not None
    first._frames.raw.shutdown(socket.SHUT_RDWR)
    await until(lambda: link.client not in (None, first), "not registered again")
    engine.client = cast(Any, link.client)
    assert [state.state for state in here.sidecar.incoming.links.values()] == ["fencing"]
    assert not slot.drained.done()
    await writer.notice()
    await soon(slot.drained)
    with pytest.raises(TransferFailed):
        await slot.completed
    await writer.close()
    await link.close()
    await engine.close()


# --- an engine that is at fault ---------------------------------------------------------------------------------------


async def test_after_a_corrupt_ring_no_transfer_begins(here: Here, engine: Engine) -> None:
    """Its pages would never be heard of: the destination would wait for its whole time."""
    slot = await engine.open([1, 2])
    engine.ring_region.view()[:8] = 0xFF
    engine.client.notify_ring()
    await until(lambda: here.sidecar.fault, "the fault was not found")
    with pytest.raises(DataLoss, match="step ring is corrupt"):
        await soon(engine.client.start_transfer(engine.describe(slot, [1, 2]), {"main": [3, 4]}, ready_pages=0))
    await engine.client.close_slot(slot, "over")
    await soon(slot.drained)
    # The next life, with a ring of its own, is served.
    await engine.client.close()
    await until(lambda: here.sidecar.session is None, "the engine is still there")
    healthy = await Engine("e", cast(Any, here), LAYOUT, incarnation=2).connect()
    assert not here.sidecar.fault
    await healthy.close()


async def test_an_engine_whose_ring_is_too_small_leaves_no_descriptor_behind(here: Here) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    engine = Engine("e", cast(Any, here), LAYOUT)
    good, engine.ring_region = engine.ring_region, Region.create("ring", 64)
    counts = []
    for _ in range(4):
        with pytest.raises(InvalidArgument, match="step ring needs"):
            await engine.connect()
        counts.append(count())
    # The first may have opened something for good.
    assert counts[1:] == [counts[1]] * 3
    engine.ring_region.close()
    engine.ring_region = good
    await engine.connect()
    await engine.close()
