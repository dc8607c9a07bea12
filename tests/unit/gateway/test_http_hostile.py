"""Clients that bend HTTP: what they send belongs to nobody else, and what they leave open ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway_fakes import FakeWorker
from gateway_world import World
from http_world import CHAT, Wire, chat, start_http
from kvmesh.proto.v1 import engine_pb2
from kvmesh.rpc.limits import Deadline
from services.gateway.http.server import FLUSH_LOOK_S

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


def silent(worker: FakeWorker) -> None:
    """Accept, and say nothing."""

    async def nothing(request: engine_pb2.SubmitRequest) -> None:
        return None

    worker.on_submit = nothing


def http_of(world: World) -> Any:
    assert world.gateway.http is not None
    return world.gateway.http


async def test_headers_after_a_body_are_no_headers(world: World) -> None:
    """Whoever checks or removes headers on the way sees those before the body alone."""
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    raw = json.dumps(chat()).encode()
    chunked = b"%x\r\n%s\r\n0\r\nx-request-id: smuggled\r\nx-kvmesh-details: 1\r\n\r\n" % (len(raw), raw)
    wire.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)
    reply = await wire.reply()
    assert reply.status == 200
    assert reply.headers["x-request-id"] != "smuggled"
    assert "kvmesh" not in reply.json()
    # They are bounded as others are.
    many = b"".join(b"x: y\r\n" for _ in range(200))
    wire.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n0\r\n" % (len(raw), raw) + many)
    assert (await wire.reply()).status == 431
    assert await wire.rest() == b""


@pytest.mark.parametrize("sent", [b"\r\n", b"{"])
async def test_a_connection_that_was_used_ends_though_it_is_fed(
    world: World, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Bytes that begin nothing, and the rest of a body that nobody waits for, do not keep a connection."""
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" if sent == b"{" else LIVEZ)
    assert (await wire.reply()).status == 200
    wire.writer.write(sent)
    (connection,) = http_of(world).connections
    await world.until(lambda: connection.timeout_keep_alive_task is None)
    await http_of(world).look(asyncio.get_running_loop().time() + 1.0)
    assert not connection.transport.is_closing()
    await http_of(world).look(asyncio.get_running_loop().time() + connection.timeout_keep_alive + 1.0)
    assert await wire.rest() == b""


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_who_has_asked_for_more_and_leaves_is_missed(world: World) -> None:
    """A second request on the line does not hide that its client has left."""
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.post(CHAT, chat())
    await worker.submits.wait(1)
    wire.post(CHAT, chat())
    (connection,) = http_of(world).connections
    await world.until(lambda: len(connection.pipeline) == 1)
    wire.abort()
    await worker.aborts.wait(1)
    await world.until(world.idle)


async def test_a_body_that_was_waiting_for_leave_is_not_waited_for(world: World) -> None:
    """The client may never send it, and its next request would be taken for it."""
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.writer.write(b"POST /v1/none HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
    reply = await wire.reply()
    assert (reply.status, reply.headers.get("connection")) == (404, "close")
    assert await wire.rest() == b""
    wire = await Wire.to(url)
    raw = json.dumps(chat()).encode()
    wire.writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(raw))
    assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.writer.write(raw)
    assert (await wire.reply()).status == 200
    wire.close()


async def test_an_old_client_gets_no_chunks(world: World) -> None:
    """HTTP/1.0 knows none: the end of the connection is the end of the stream."""
    await world.worker(text="ok")
    url = await start_http(world)
    for stream in (True, False):
        wire = await Wire.to(url)
        raw = json.dumps(chat(stream=stream)).encode()
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
        wire.writer.write(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        whole = await wire.rest()
        top, _, body = whole.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding" not in top.lower()
        if stream:
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(body)["choices"][0]["message"]["content"] == "ok"


async def test_one_that_cannot_be_looked_after_harms_no_other(world: World) -> None:
    """Whatever fails in a look is that connection's or stream's own."""
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    wires = [await Wire.to(url) for _ in range(2)]
    for wire in wires:
        wire.post(CHAT, chat(stream=True))
    requests = await worker.submits.wait(2)
    http = http_of(world)
    assert len(http.face.live) == 2
    broken = next(iter(http.face.live))

    async def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("already sent")

    broken._send = fails
    await http.look(asyncio.get_running_loop().time() + 1000)
    heads = [asyncio.create_task(wire.until(b": waiting\n\n")) for wire in wires]
    done, rest = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    for task in rest:
        task.cancel()
    for wire in wires:
        wire.abort()
    assert len(requests) == 2
    await world.until(world.idle)


async def test_a_sign_of_life_is_never_waited_for(world: World) -> None:
    """One client that does not read would end the looking after all others."""
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.post(CHAT, chat(stream=True))
    await worker.submits.wait(1)
    (connection,) = http_of(world).connections
    write = connection.transport.write

    class Full:
        """A transport whose buffer is full after the next write."""

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            write(data)
            connection.pause_writing()

    transport = connection.transport
    connection._running.transport = Full()
    async with asyncio.timeout(20):
        await http_of(world).look(asyncio.get_running_loop().time() + 1000)
    wire.abort()
    await world.until(world.idle)


async def test_a_drain_waits_for_what_its_clients_still_read(world: World) -> None:
    """An answer that was written is not one that has arrived."""
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url, receive_buffer=4096)
    wire.stall()
    wire.writer.write(LIVEZ)
    await world.until(lambda: [one for one in http_of(world).connections if one.cycle and one.cycle.response_complete])
    (connection,) = http_of(world).connections
    size = 16 << 20
    connection.transport.write(b"x" * size)
    assert connection.transport.get_write_buffer_size()
    drained = asyncio.create_task(world.gateway.drain(Deadline.after(120.0)))
    await world.until(lambda: connection.transport.is_closing())
    for _ in range(3):
        await asyncio.sleep(2 * FLUSH_LOOK_S)
    assert not drained.done()
    wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert (await wire.rest()).count(b"x") >= size
    await drained


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
async def test_offers_of_other_protocols_are_passed_over(world: World, upgrade: bytes) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    raw = json.dumps(chat()).encode()
    for _ in range(3):
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nUpgrade: %s\r\n"
        wire.writer.write(HEAD + offer % upgrade + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        assert (await wire.reply()).status == 200
    wire.close()
