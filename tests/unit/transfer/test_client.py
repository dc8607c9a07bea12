"""The engine's end, against a sidecar written by hand: what is asked for when nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.errors import Cancelled, DeadlineExceeded, FailedPrecondition, KvmeshError, NotFound, Unavailable
from kvmesh.kv.fds import close_fds
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer import client as client_module
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.link import SidecarLink
from kvmesh.transfer.orphans import Writers
from kvmesh.transfer.posting import Poster
from kvmesh.transfer.wire import MAX_HELLO_BYTES, FrameSocket
from test_orphans import sleeper
from test_sends import LAYOUT


class Sidecar:
    """Answers hellos and nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        self.server.setblocking(False)
        self.frames: list[FrameSocket] = []
        # Descriptors that come along with its hello.
        self.passes: list[int] = []
        self.asked: asyncio.Queue[pb.EngineMessage] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.server, self._accept)

    def _accept(self) -> None:
        sock, _ = self.server.accept()
        frames = FrameSocket(sock, on_frame=lambda body: self._serve(frames, body), on_closed=lambda _: None, max_fds=8)
        self.frames.append(frames)

    def _serve(self, frames: FrameSocket, body: bytes) -> None:
        message = pb.EngineMessage.FromString(body)
        if message.WhichOneof("body") == "hello":
            close_fds(frames.take_fds(4 + len(message.hello.regions)))
            hello = pb.SidecarHello(sidecar_id="s", incarnation=1, control_address="h:1", regions=message.hello.regions)
            hello.pidfd = bool(self.passes)
            frames.send(pb.SidecarMessage(call_id=message.call_id, hello=hello), self.passes)
        else:
            self.asked.put_nowait(message)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.server)
        self.server.close()
        for frames in self.frames:
            frames.close()


class Rig:
    def __init__(self, folder: Path) -> None:
        self.sidecar = Sidecar(folder / "s.sock")
        self.writers = Writers()
        self.regions = {group.name: Region.create(group.name, LAYOUT.region_bytes(group)) for group in LAYOUT.groups}
        self.doorbell = Region.create("doorbell", 4096)
        self.ring = Region.create("ring", 4096)
        self.clients: list[SidecarClient] = []

    async def connect(self, poster: Poster | None = None) -> SidecarClient:
        client = await SidecarClient.connect(
            self.sidecar.path,
            engine_id="e",
            incarnation=1,
            layout=LAYOUT,
            regions=self.regions,
            doorbell=self.doorbell,
            ring=self.ring,
            timeout_s=5,
            on_lost=lambda: None,
            writers=self.writers,
            poster=poster,
        )
        self.clients.append(client)
        return client

    async def asked(self) -> pb.EngineMessage:
        async with asyncio.timeout(60):
            return await self.sidecar.asked.get()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for client in rig.clients:
        await client.close()
    rig.writers.close()
    rig.sidecar.close()
    for region in (*rig.regions.values(), rig.doorbell, rig.ring):
        region.close()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_start_without_an_answer_keeps_its_pages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that hangs may have begun to read them: failing the call would hand them to the next request."""
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.02)
    client = await rig.connect()
    start = asyncio.ensure_future(client.start_transfer(pb.Descriptor(), {"full": [1]}, ready_pages=1))
    asked = await rig.asked()
    with pytest.raises(DeadlineExceeded):
        await client.open_slot(expected_bytes=1, groups={"full": [1]}, request_id="r", ttl_s=1)
    assert not start.done()
    accepted = pb.TransferAccepted(transfer_id=7, transport="shm")
    rig.sidecar.frames[-1].send(pb.SidecarMessage(call_id=asked.call_id, transfer_accepted=accepted))
    async with asyncio.timeout(60):
        assert (await start).transfer_id == 7


async def test_a_start_on_a_lost_connection_fails_when_the_sidecar_has_let_go(rig: Rig) -> None:
    client = await rig.connect()
    start = asyncio.ensure_future(client.start_transfer(pb.Descriptor(), {"full": [1]}, ready_pages=1))
    await rig.asked()
    opening = asyncio.ensure_future(client.open_slot(expected_bytes=1, groups={"full": [1]}, request_id="r", ttl_s=1))
    await rig.asked()
    rig.sidecar.frames[-1].close()
    # The slot's pages were never named to anybody.
    with pytest.raises(Unavailable):
        await opening
    await turns()
    # The process over there lives (it is this one): a lost connection is no proof that it has stopped reading.
    assert not start.done()
    await rig.connect()
    with pytest.raises(Unavailable, match="the sidecar is lost"):
        async with asyncio.timeout(60):
            await start


async def test_a_sidecar_out_of_sight_passes_its_own_pidfd(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another PID namespace, under a kernel before 6.5, nothing else names its process."""

    def unseen(_: socket.socket) -> int:
        raise NotFound("out of sight")

    monkeypatch.setattr(client_module, "_peer_pidfd", unseen)
    with pytest.raises(NotFound):
        await rig.connect()
    process = sleeper()
    pidfd = open_pidfd(process.pid)
    rig.sidecar.passes = [pidfd]
    client = await rig.connect()
    gone = asyncio.Event()
    rig.writers.when_gone(gone.set, only=client._sidecar)
    await turns()
    assert not gone.is_set()
    process.kill()
    async with asyncio.timeout(60):
        await gone.wait()
    process.wait()
    os.close(pidfd)


async def test_a_welcome_with_another_descriptor_is_refused(rig: Rig) -> None:
    rig.sidecar.passes = [rig.ring.fd]
    with pytest.raises(KvmeshError, match="no pidfd"):
        await rig.connect()


async def test_a_cancelled_start_cancels_what_is_accepted_later(rig: Rig) -> None:
    client = await rig.connect()
    start = asyncio.ensure_future(client.start_transfer(pb.Descriptor(), {"full": [1]}, ready_pages=1))
    asked = await rig.asked()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert (await rig.asked()).cancel_start.call_id == asked.call_id
    accepted = pb.TransferAccepted(transfer_id=7, transport="shm")
    rig.sidecar.frames[-1].send(pb.SidecarMessage(call_id=asked.call_id, transfer_accepted=accepted))
    assert (await rig.asked()).cancel_transfer.transfer_id == 7


async def test_a_start_that_is_given_up_waits_for_its_answer(rig: Rig) -> None:
    client = await rig.connect()
    descriptors = [pb.Descriptor(engine_id="d", slot=slot, generation=3) for slot in range(3)]
    starts = [asyncio.ensure_future(client.start_transfer(item, {"full": [1]}, ready_pages=1)) for item in descriptors]
    asked = [await rig.asked() for _ in starts]
    client.give_up_start(descriptors[1], "not wanted")
    cancel = (await rig.asked()).cancel_start
    assert (cancel.call_id, cancel.reason) == (asked[1].call_id, "not wanted")
    await turns()
    assert not any(start.done() for start in starts)
    refused = pb.Refused(reason="CANCELLED", message="not wanted")
    rig.sidecar.frames[-1].send(pb.SidecarMessage(call_id=asked[1].call_id, refused=refused))
    with pytest.raises(Cancelled, match="not wanted"):
        async with asyncio.timeout(60):
            await starts[1]
    # Answered, or never there: nothing is sent.
    client.give_up_start(descriptors[1], "again")
    client.give_up_start(pb.Descriptor(engine_id="other"), "again")
    client.give_up_start(descriptors[2], "this one")
    assert (await rig.asked()).cancel_start.call_id == asked[2].call_id
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)


async def test_the_link_tries_again_after_an_error_of_the_system(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = SidecarClient.connect
    failures: list[Exception] = [OSError(errno.EMFILE, "Too many open files"), Unavailable("not yet")]

    async def failing(*args: object, **kwargs: object) -> SidecarClient:
        if failures:
            raise failures.pop(0)
        return await connect(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(SidecarClient, "connect", failing)
    link = SidecarLink(
        rig.sidecar.path,
        engine_id="e",
        incarnation=1,
        layout=LAYOUT,
        regions=rig.regions,
        doorbell=rig.doorbell,
        ring=rig.ring,
    )
    link.start()
    try:
        assert (await link.wait_connected(5)).connected
    finally:
        with contextlib.suppress(KvmeshError, OSError):
            await link.close()


async def test_a_start_that_is_asked_twice_is_given_up_by_its_own_number(rig: Rig) -> None:
    """The second is refused, and takes nothing of the first away; nor does its caller's end."""
    client = await rig.connect()
    descriptor = pb.Descriptor(engine_id="d", slot=1, generation=3)
    starts = [asyncio.ensure_future(client.start_transfer(descriptor, {"full": [1]}, ready_pages=1)) for _ in range(3)]
    asked = [(await rig.asked()).call_id for _ in starts]
    refused = pb.Refused(reason="FAILED_PRECONDITION", message="in use")
    rig.sidecar.frames[-1].send(pb.SidecarMessage(call_id=asked[1], refused=refused))
    with pytest.raises(FailedPrecondition):
        async with asyncio.timeout(60):
            await starts[1]
    starts[2].cancel()
    assert (await rig.asked()).cancel_start.call_id == asked[2]
    client.give_up_start(descriptor, "not wanted")
    cancel = (await rig.asked()).cancel_start
    assert (cancel.call_id, cancel.reason) == (asked[0], "not wanted")
    starts[0].cancel()
    assert (await rig.asked()).cancel_start.call_id == asked[0]


class _Poster:
    """Keeps what it is told."""

    transports = ("nvlink",)

    def __init__(self) -> None:
        self.taken: asyncio.Queue[pb.SidecarMessage] = asyncio.Queue()

    def connected(self, tell: Callable[[pb.EngineMessage], None]) -> None:
        pass

    def take(self, message: pb.SidecarMessage, take_fds: Callable[[int], list[int]]) -> None:
        self.taken.put_nowait(message)

    def pages_ready(self, transfer_id: int, first: int, count: int) -> None:
        pass

    def tail_ready(self, transfer_id: int) -> None:
        pass

    def when_drained(self, done: Callable[[], None], transfer_id: int | None = None) -> None:
        done()

    def lost(self) -> None:
        pass

    async def leave(self, timeout_s: float) -> None:
        pass


async def test_a_long_transfer_comes_back_to_its_poster_whole(rig: Rig) -> None:
    """What may be sent to the sidecar, a prompt of a million pages, is as long when it is handed over."""
    poster = _Poster()
    await rig.connect(poster)
    pages = pb.GroupPages(group="main", pages=range(1 << 20, 3 << 19))
    post = pb.PostTransfer(transfer_id=1, request=pb.StartTransfer(pages=[pages]))
    message = pb.SidecarMessage(post_transfer=post)
    assert message.ByteSize() > MAX_HELLO_BYTES
    rig.sidecar.frames[0].send(message)
    async with asyncio.timeout(60):
        assert await poster.taken.get() == message
