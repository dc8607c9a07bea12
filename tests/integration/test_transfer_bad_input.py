"""Whatever comes in by any door is refused by name, and the transfer that is under way meanwhile ends whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, NotFound, TransferFailed
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.rpc import from_rpc_error
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.transports.tcp import ACK, HEAD, REFUSED
from kvmesh.transfer.wire import PROTOCOL, exchange, open_unix, pack_frame
from transfer_kit import Engine, SidecarProcess, make_layout, soon

SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]
FLAGS = ("--heartbeat-s=0.2", "--lease-s=4")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SidecarProcess]]:
    folder = tmp_path_factory.mktemp("sidecars")
    made = [SidecarProcess("src", folder, *FLAGS), SidecarProcess("dst", folder, "--transports=tcp,shm", *FLAGS)]
    yield made
    for process in made:
        process.stop()


class Scene:
    """A transfer that is half way while something bad happens."""

    def __init__(self, source: Engine, target: Engine) -> None:
        self.source = source
        self.target = target

    async def begin(self) -> None:
        self.slot = await self.target.open(DST)
        descriptor = self.target.describe(self.slot, DST)
        self.transfer = await soon(self.source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=1))

    async def end(self) -> None:
        self.source.step(self.transfer, 1, 5)
        await soon(self.slot.completed)
        await soon(self.transfer.done)
        np.testing.assert_array_equal(self.target.pages[:, DST], self.source.pages[:, SRC])
        assert not self.target.lost.is_set()
        assert not self.source.lost.is_set()


@pytest.fixture
async def scene(processes: list[SidecarProcess]) -> AsyncIterator[Scene]:
    await asyncio.gather(*(process.start() for process in processes if not process.alive))
    source = await Engine("p", processes[0], make_layout()).connect()
    target = await Engine("d", processes[1], make_layout()).connect()
    source.fill(1)
    scene = Scene(source, target)
    await scene.begin()
    yield scene
    await scene.end()
    await source.close()
    await target.close()


async def answer(sock: socket.socket, data: bytes) -> bytes:
    """Send bytes, then read until the peer closes."""
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    received = b""
    async with asyncio.timeout(60):
        try:
            await loop.sock_sendall(sock, data)
            while chunk := await loop.sock_recv(sock, 65536):
                received += chunk
        except ConnectionError:
            pass
    sock.close()
    return received


def refusal(data: bytes) -> str:
    """The reason in a framed Refused or DataHelloReply."""
    (length,) = struct.unpack_from("<I", data)
    body = data[4 : 4 + length]
    with contextlib.suppress(DecodeError):
        message = pb.SidecarMessage.FromString(body)
        if message.WhichOneof("body") == "refused":
            return message.refused.message
    return pb.DataHelloReply.FromString(body).reason


GARBAGE = random.Random(1).randbytes(2000)


async def test_garbage_on_the_control_port(scene: Scene) -> None:
    sock = socket.create_connection(("127.0.0.1", scene.target.sidecar.port))
    await answer(sock, GARBAGE + b"\r\n\r\n" * 50)


async def test_garbage_on_the_engine_socket(scene: Scene) -> None:
    path = scene.target.sidecar.socket
    huge = await answer(await open_unix(path, 60), struct.pack("<I", 0xFFFFFFFF) + GARBAGE)
    assert "a frame of 4294967295 bytes" in refusal(huge)
    nonsense = await answer(await open_unix(path, 60), struct.pack("<I", 100) + b"\xff" * 100)
    assert "does not hold the message" in refusal(nonsense)
    other = await answer(await open_unix(path, 60), pack_frame(pb.EngineMessage(close_slot=pb.CloseSlot())))
    assert "first message of an engine is its hello" in refusal(other)
    bare = await answer(await open_unix(path, 60), pack_frame(pb.EngineMessage(hello=pb.EngineHello(protocol=1))))
    assert "4 descriptors belong to this message, 0 came along" in refusal(bare)


async def test_garbage_on_the_data_doors(scene: Scene) -> None:
    status = await scene.target.sidecar.status()
    tcp = next(t.reason for t in status.transports if t.name == "tcp").rpartition(" ")[2]
    host, _, port = tcp.rpartition(":")
    wrong = pack_frame(pb.DataHello(protocol=PROTOCOL, token=b"x" * 32, link_id=1, sidecar_id="evil"))
    data = await answer(socket.create_connection((host, int(port))), wrong)
    assert "no such link, or a wrong token" in refusal(data)
    data = await answer(socket.create_connection((host, int(port))), struct.pack("<I", 1 << 30) + GARBAGE)
    assert "a frame of" in refusal(data)
    shm = str(scene.target.sidecar.socket) + ".shm"
    data = await answer(await open_unix(shm, 60), wrong)
    assert "1 descriptors belong to this message" in refusal(data)
    sock = await open_unix(shm, 60)
    hello = pb.DataHello(protocol=PROTOCOL, token=b"x" * 32, link_id=1, sidecar_id="evil")
    body, fds = await exchange(sock, hello, [2], max_fds=8, timeout_s=60)
    assert not fds
    assert "wrong token" in pb.DataHelloReply.FromString(body).reason
    sock.close()


async def test_too_many_descriptors_are_closed_again(scene: Scene) -> None:
    before = scene.target.sidecar.fds()
    sock = await open_unix(str(scene.target.sidecar.socket) + ".shm", 60)
    hello = pb.DataHello(protocol=PROTOCOL, token=b"x" * 32, link_id=1)
    body, _ = await exchange(sock, hello, [2] * 5, max_fds=0, timeout_s=60)
    assert "descriptors arrived, at most 1 are taken" in pb.DataHelloReply.FromString(body).reason
    sock.close()
    async with asyncio.timeout(60):
        while scene.target.sidecar.fds() > before:
            await asyncio.sleep(0.01)


def bad_hello(change: str, engine: Engine) -> pb.PeerHello:
    client = engine.client
    hello = pb.PeerHello(
        protocol=PROTOCOL,
        engine_id="evil",
        incarnation=1,
        sidecar_id="evil",
        sidecar_incarnation=1,
        destination_engine_id=client.engine_id,
        destination_incarnation=client.incarnation,
        destination_sidecar_incarnation=client.sidecar_incarnation,
        layout=layout_to_proto(engine.layout),
        offers=[pb.TransportOffer(name="tcp")],
    )
    if change == "protocol":
        hello.protocol = 99
    elif change == "engine":
        hello.destination_engine_id = "nobody"
    elif change == "incarnation":
        hello.destination_incarnation = 77
    elif change == "sidecar":
        hello.destination_sidecar_incarnation = 77
    elif change == "layout":
        hello.layout.CopyFrom(layout_to_proto(make_layout(heads=4)))
    elif change == "fingerprint":
        hello.layout.fingerprint = b"x" * 16
    elif change == "transport":
        hello.offers[0].name = "pigeon"
    elif change == "names":
        hello.sidecar_id = "x" * 1000
    elif change == "offers":
        hello.offers.extend(pb.TransportOffer(name=str(i)) for i in range(100))
    return hello


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ("protocol", FailedPrecondition, "peer protocol 99"),
        ("engine", FailedPrecondition, "'nobody'"),
        ("incarnation", NotFound, "life 77"),
        ("sidecar", NotFound, "successor"),
        ("layout", InvalidArgument, "layouts do not match"),
        ("fingerprint", InvalidArgument, "fingerprint"),
        ("transport", FailedPrecondition, "no common transport: tcp: not offered"),
        ("names", InvalidArgument, "sidecar_id"),
        ("offers", InvalidArgument, "transports are offered"),
        ("none", InvalidArgument, "first message of a peer is its hello"),
    ],
)
async def test_wrong_peer_hellos(scene: Scene, change: str, error: type[KvmeshError], text: str) -> None:
    message = pb.PeerRequest(heartbeat=pb.Heartbeat())
    if change != "none":
        message = pb.PeerRequest(hello=bad_hello(change, scene.target))
    async with grpc.aio.insecure_channel(scene.target.sidecar.address) as channel:
        call: Any = kvtransfer_pb2_grpc.KvTransferStub(channel).Peer()  # type: ignore[call-arg]
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call.read())
    found = from_rpc_error(caught.value)
    assert type(found) is error
    assert text in found.message


class Writer:
    """A peer written by hand, with a tcp data connection."""

    async def open(self, target: Engine) -> Writer:
        self.channel = grpc.aio.insecure_channel(target.sidecar.address)
        self.call: Any = kvtransfer_pb2_grpc.KvTransferStub(self.channel).Peer()  # type: ignore[call-arg]
        await self.call.write(pb.PeerRequest(hello=bad_hello("", target)))
        reply = (await soon(self.call.read())).hello
        host, _, port = reply.endpoint.rpartition(":")
        sock = socket.create_connection((host, int(port)))
        hello = pb.DataHello(protocol=PROTOCOL, token=reply.token, link_id=reply.link_id, sidecar_id="evil")
        body, _ = await exchange(sock, hello, [], max_fds=0, timeout_s=60)
        assert pb.DataHelloReply.FromString(body).ok
        # The token opens it once.
        again = socket.create_connection((host, int(port)))
        body, _ = await exchange(again, hello, [], max_fds=0, timeout_s=60)
        assert not pb.DataHelloReply.FromString(body).ok
        again.close()
        sock.settimeout(60)
        self.sock = sock
        return self

    async def bind(self, slot: int, generation: int, nbytes: int) -> pb.BindReply:
        await self.call.write(pb.PeerRequest(bind=pb.BindSlot(slot=slot, generation=generation, bytes=nbytes)))
        return (await soon(self.until("bind"))).bind

    async def until(self, kind: str) -> pb.PeerResponse:
        while (message := await self.call.read()).WhichOneof("body") != kind:
            pass
        return message

    def send(
        self, immediate: int, runs: list[tuple[int, int]], data: bytes, number: int = 1, claimed: int = -1
    ) -> None:
        total = len(data) if claimed < 0 else claimed
        table = b"".join(struct.pack("<QQ", *run) for run in runs)
        self.sock.sendall(HEAD.pack(immediate, 0, len(runs), 0, total, number) + table + data)

    def ack(self) -> tuple[int, int]:
        data = b""
        while len(data) < ACK.size:
            chunk = self.sock.recv(ACK.size - len(data))
            assert chunk, "cut off"
            data += chunk
        return ACK.unpack(data)  # type: ignore[return-value]

    async def close(self) -> None:
        self.call.cancel()
        self.sock.close()
        await self.channel.close()


async def test_wrong_binds(scene: Scene) -> None:
    target = scene.target
    writer = await Writer().open(target)
    pages = [10, 11]
    slot = await target.open(pages)
    bind = await writer.bind(4095, 0, 10)
    assert not bind.ok
    assert "NOT_FOUND" in bind.reason
    bind = await writer.bind(slot.slot, slot.generation ^ 1, slot.expected_bytes)
    assert "not current" in bind.reason
    bind = await writer.bind(slot.slot, slot.generation, slot.expected_bytes + 1)
    assert "INVALID_ARGUMENT" in bind.reason
    assert (await writer.bind(slot.slot, slot.generation, slot.expected_bytes)).ok
    bind = await writer.bind(slot.slot, slot.generation, slot.expected_bytes)
    assert "one writer, once" in bind.reason
    # The slot of somebody else, which is bound and half way.
    bind = await writer.bind(scene.slot.slot, scene.slot.generation, scene.slot.expected_bytes)
    assert "one writer, once" in bind.reason
    await writer.close()
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    await soon(slot.drained)


async def bound(writer: Writer, target: Engine, pages: list[int]) -> tuple[Any, int]:
    slot = await target.open(pages)
    assert (await writer.bind(slot.slot, slot.generation, slot.expected_bytes)).ok
    return slot, pack(slot.slot, slot.generation)


PAGE = make_layout().page_bytes("main")
STRIDE = make_layout().layer_stride("main")


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([(12 * PAGE, PAGE)], "not granted"),
        ([(11 * PAGE, 2 * PAGE)], "not granted"),
        ([(10 * PAGE, PAGE), (40 * PAGE, PAGE)], "not granted"),
        ([(10 * PAGE - 1, 2)], "not granted"),
        ([(STRIDE - 8, 16)], "over a layer's end"),
        ([(4 * STRIDE, PAGE)], "outside of its region"),
        ([((1 << 64) - 8, 16)], "outside of its region"),
        ([(10 * PAGE, 0)], "outside of its region"),
    ],
)
async def test_writes_out_of_bounds_are_cut_off(scene: Scene, runs: list[tuple[int, int]], text: str) -> None:
    target = scene.target
    writer = await Writer().open(target)
    slot, immediate = await bound(writer, target, [10, 11])
    before = target.pages.copy()
    total = sum(length for _, length in runs)
    writer.send(immediate, runs, b"\xee" * total, claimed=total or 1)
    with pytest.raises(TransferFailed, match=text if total else None):
        await soon(slot.completed)
    await soon(slot.drained)
    others = [page for page in range(64) if page not in DST]
    np.testing.assert_array_equal(target.pages[:, others], before[:, others])
    await writer.close()


async def test_stale_writes_are_dropped(scene: Scene) -> None:
    target = scene.target
    writer = await Writer().open(target)
    slot, immediate = await bound(writer, target, [10, 11])
    before = target.pages[:, 10].copy()
    # Of another generation, of a slot nobody opened, of a slot that another peer writes.
    foreign = pack(scene.slot.slot, scene.slot.generation)
    for number, wrong in enumerate([immediate ^ 1, pack(4000, 1), foreign], start=1):
        writer.send(wrong, [(10 * PAGE, PAGE)], b"\xee" * PAGE, number)
        assert writer.ack() == (number, REFUSED)
    np.testing.assert_array_equal(target.pages[:, 10], before)
    writer.send(immediate, [(10 * PAGE, PAGE)], b"\xaa" * PAGE, 4)
    assert writer.ack() == (4, PAGE)
    assert (target.pages[0, 10] == 0xAA).all()
    assert (await target.sidecar.status()).counters.stale_writes >= 3
    # More bytes than were expected fail the generation, and the writer is asked to stop.
    for number in range(5, 13):
        writer.send(immediate, [(10 * PAGE, PAGE)], b"\xaa" * PAGE, number)
        writer.ack()
    assert (await soon(slot.completed)).bytes == slot.expected_bytes
    await writer.close()


async def test_too_many_bytes_fail_the_generation(scene: Scene) -> None:
    target = scene.target
    writer = await Writer().open(target)
    slot, immediate = await bound(writer, target, [10, 11])
    half = slot.expected_bytes - PAGE
    for number in range(half // PAGE):
        writer.send(immediate, [(10 * PAGE, PAGE)], b"\xaa" * PAGE, number)
        writer.ack()
    writer.send(immediate, [(10 * PAGE, 2 * PAGE)], b"\xaa" * 2 * PAGE, 99)
    with pytest.raises(TransferFailed, match="were expected"):
        await soon(slot.completed)
    abort = (await soon(writer.until("abort"))).abort
    assert (abort.slot, abort.generation) == (slot.slot, slot.generation)
    assert not slot.drained.done()
    drained = pb.Drained(slot=slot.slot, generation=slot.generation)
    await writer.call.write(pb.PeerRequest(drained=drained))
    await soon(slot.drained)
    await writer.close()


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("version", 9, InvalidArgument, "version 9"),
        ("control_address", "nonsense", InvalidArgument, "control_address"),
        ("control_address", "127.0.0.1:1", KvmeshError, ""),
        ("incarnation", 9, KvmeshError, "life 9"),
        ("slot", 4096, InvalidArgument, "12 bits"),
        ("generation", 1 << 20, InvalidArgument, "20 bits"),
        ("expected_bytes", 5, InvalidArgument, "expected_bytes 5"),
        ("num_tokens", 17, InvalidArgument, "num_tokens"),
        ("first_block", 1000, InvalidArgument, "first_block"),
    ],
)
async def test_wrong_descriptors(scene: Scene, field: str, value: Any, error: type[KvmeshError], text: str) -> None:
    slot = await scene.target.open([10])
    descriptor = scene.target.describe(slot, [10])
    setattr(descriptor, field, value)
    with pytest.raises(error, match=text or None):
        await soon(scene.source.client.start_transfer(descriptor, {"main": [1]}, ready_pages=1))
    await scene.target.client.close_slot(slot, "over")
    await soon(slot.drained)


async def test_wrong_pages_and_keys(scene: Scene) -> None:
    client = scene.source.client
    slot = await scene.target.open([10])
    good = scene.target.describe(slot, [10])
    with pytest.raises(InvalidArgument, match="not in a pool"):
        await client.start_transfer(good, {"main": [64]}, ready_pages=1)
    with pytest.raises(InvalidArgument, match="as many pages"):
        await client.start_transfer(good, {"main": [1, 2]}, ready_pages=1)
    with pytest.raises(InvalidArgument, match="no kv group"):
        await client.start_transfer(good, {"other": [1]}, ready_pages=1)
    key = pb.Descriptor.FromString(good.SerializeToString())
    key.regions[0].key ^= 1
    with pytest.raises(InvalidArgument, match="region keys"):
        await client.start_transfer(key, {"main": [1]}, ready_pages=1)
    page = pb.Descriptor.FromString(good.SerializeToString())
    page.groups[0].pages[0] = 64
    with pytest.raises(InvalidArgument, match="not in a pool"):
        await client.start_transfer(page, {"main": [1]}, ready_pages=1)
    with pytest.raises(InvalidArgument, match="expected_bytes"):
        await scene.target.client.open_slot(expected_bytes=1, groups={"main": [1]}, request_id="r", ttl_s=1)
    with pytest.raises(InvalidArgument, match="named twice"):
        await scene.target.client.open_slot(expected_bytes=1, groups={"main": [1, 1]}, request_id="r", ttl_s=1)
    # And the slot still serves the good one.
    transfer = await client.start_transfer(good, {"main": [1]}, ready_pages=1)
    await soon(slot.completed)
    await soon(transfer.done)


async def test_engine_with_memory_that_does_not_fit(processes: list[SidecarProcess]) -> None:
    """Against a free sidecar: refused for its hello, not for being second. The next one with good memory is let in."""
    await asyncio.gather(*(process.start() for process in processes if not process.alive))
    engine = Engine("late", processes[1], make_layout())
    good, engine.regions["main"] = engine.regions["main"], Region.create("small", 4096)
    with pytest.raises(InvalidArgument, match="has 4096 bytes, its layout"):
        await engine.connect()
    engine.regions["main"].close()
    engine.regions["main"] = good
    await engine.connect()
    await engine.close()
