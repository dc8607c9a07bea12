"""Frames: bounded, with descriptors, and honest about how a connection ended."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import DataLoss, DeadlineExceeded, InvalidArgument, KvmeshError, TooLarge, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer import wire
from kvmesh.transfer.wire import FrameSocket, exchange, open_unix, pack_frame


class End:
    """One end of a pair, keeping what it sees."""

    def __init__(self, sock: socket.socket, **bounds: int) -> None:
        self.bodies: list[bytes] = []
        self.closed: asyncio.Future[KvmeshError | None] = asyncio.get_running_loop().create_future()
        self.more = asyncio.Event()
        self.frames = FrameSocket(sock, on_frame=self.on_frame, on_closed=self.on_closed, **bounds)

    def on_frame(self, body: bytes) -> None:
        self.bodies.append(body)
        self.more.set()

    def on_closed(self, error: KvmeshError | None) -> None:
        self.closed.set_result(error)

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.bodies) < count:
                self.more.clear()
                await self.more.wait()

    async def end(self) -> KvmeshError | None:
        async with asyncio.timeout(60):
            return await self.closed


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def message(text: str) -> pb.EngineMessage:
    return pb.EngineMessage(call_id=1, close_slot=pb.CloseSlot(slot=1, generation=2, reason=text))


async def test_frames_arrive_whole_and_in_order_however_they_are_cut() -> None:
    a, b = pair()
    end = End(b)
    stream = b"".join(pack_frame(message("x" * n)) for n in range(200))
    for at in range(0, len(stream), 7):
        a.sendall(stream[at : at + 7])
        if at % 700 == 0:
            await asyncio.sleep(0)
    await end.wait(200)
    assert [pb.EngineMessage.FromString(x).close_slot.reason for x in end.bodies] == ["x" * n for n in range(200)]
    a.close()
    assert await end.end() is None


@given(data=st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_no_bytes_break_it(data: bytes) -> None:
    async def run() -> None:
        a, b = pair()
        end = End(b, max_frame=100)
        a.sendall(data)
        a.close()
        error = await end.end()
        assert error is None or isinstance(error, TooLarge | DataLoss)
        end.frames.close()

    asyncio.run(run())


async def test_descriptors_travel_with_their_frame() -> None:
    a, b = pair()
    taken: list[int] = []
    sender = FrameSocket(a, on_frame=lambda body: None, on_closed=lambda error: None)
    got = asyncio.Event()

    def on_frame(body: bytes) -> None:
        taken.extend(receiver.take_fds(1))
        got.set()

    receiver = FrameSocket(b, on_frame=on_frame, on_closed=lambda error: None, max_fds=1)
    r, w = os.pipe()
    sender.send(message("fd"), [w])
    os.close(w)
    async with asyncio.timeout(60):
        await got.wait()
    os.write(taken[0], b"hello")
    assert os.read(r, 10) == b"hello"
    os.close(taken[0])
    os.close(r)
    sender.close()
    receiver.close()


async def test_missing_and_surplus_descriptors_end_the_connection() -> None:
    a, b = pair()
    end = End(b, max_fds=1)
    with pytest.raises(InvalidArgument):
        end.frames.take_fds(1)
    socket.send_fds(a, [pack_frame(message("x"))], [0, 1, 2])
    assert isinstance(await end.end(), TooLarge)
    a.close()


async def test_too_long_a_frame_is_refused_before_it_is_read() -> None:
    a, b = pair()
    end = End(b, max_frame=1000)
    a.sendall(struct.pack("<I", 1001))
    error = await end.end()
    assert isinstance(error, TooLarge)
    # A last word still gets through.
    end.frames.send(message("no"))
    end.frames.close()
    a.settimeout(60)
    assert b"no" in a.recv(1000)
    assert a.recv(1) == b""


async def test_a_frame_that_is_no_message() -> None:
    a, b = pair()
    closed: asyncio.Future[KvmeshError | None] = asyncio.get_running_loop().create_future()
    frames = FrameSocket(b, on_frame=lambda x: void(pb.EngineMessage.FromString(x)), on_closed=closed.set_result)
    a.sendall(struct.pack("<I", 4) + b"\xff" * 4)
    async with asyncio.timeout(60):
        assert isinstance(await closed, InvalidArgument)
    frames.close()
    a.close()


def void(_: object) -> None:
    return None


async def test_a_cut_frame_is_data_loss() -> None:
    a, b = pair()
    end = End(b)
    a.sendall(pack_frame(message("whole")) + b"\x10\x00\x00")
    a.close()
    assert isinstance(await end.end(), DataLoss)
    assert len(end.bodies) == 1


async def test_last_words_are_read_though_a_write_finds_the_end_first() -> None:
    a, b = pair()
    end = End(b)
    for text in ("the last but one", "the last"):
        a.sendall(pack_frame(message(text)))
    a.close()
    # Before the loop has looked at the socket: this is what finds the peer gone.
    end.frames.send(message("to nobody"))
    await end.end()
    assert end.bodies == [message(text).SerializeToString() for text in ("the last but one", "the last")]


async def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BACKLOG_BYTES", 1 << 20)
    a, b = pair()
    end = End(a)
    end.frames.send(message("x" * (600 << 10)))
    with pytest.raises(DeadlineExceeded):
        await end.frames.flush(0.05)
    for _ in range(5):
        end.frames.send(message("x" * (600 << 10)))
    assert isinstance(await end.end(), TooLarge)
    b.close()


async def test_backlog_is_written_when_the_peer_reads() -> None:
    a, b = pair()
    end = End(a)
    for n in range(40):
        end.frames.send(message(str(n) * 100_000))
    assert end.frames.backlog > 0
    other = End(b)
    await other.wait(40)
    await end.frames.flush(5)
    assert end.frames.backlog == 0
    end.frames.close()
    assert await other.end() is None


async def test_exchange_and_its_ends(tmp_path: object) -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        await open_unix(f"{tmp_path}/nobody", 1)
    a, b = pair()
    with pytest.raises(DeadlineExceeded):
        await exchange(a, message("hi"), [], max_fds=0, timeout_s=0.05)
    b.close()
    a, b = pair()
    b.sendall(pack_frame(message("back")))
    body, fds = await exchange(a, message("hi"), [], max_fds=0, timeout_s=5)
    assert b"back" in body
    assert not fds
    a.close()
    b.close()
    a, b = pair()
    b.close()
    with pytest.raises(KvmeshError):
        await exchange(a, message("hi"), [], max_fds=0, timeout_s=5)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(TooLarge):
        pack_frame(message("x" * (5 << 20)))
