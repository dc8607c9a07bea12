"""What a connection may cost, and what happens when one of its ends goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway_fakes import EOS, MODEL, WAIT_S, FakeWorker
from gateway_world import World
from http_world import CHAT, Wire, chat, client, events, get, post, start_http, text_of
from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Principal
from kvmesh.rpc.limits import Deadline
from services.gateway import request as running
from services.gateway.http import protocol
from services.gateway.http.body import Reading
from services.gateway.http.exchange import duration
from services.gateway.http.places import Places, origin
from services.gateway.job import Job
from services.gateway.limits.contract import LimitState, NoHold, Window


def silent(worker: FakeWorker) -> None:
    """Accept, and say nothing."""

    async def nothing(request: engine_pb2.SubmitRequest) -> None:
        return None

    worker.on_submit = nothing


def speak(worker: FakeWorker, request: engine_pb2.SubmitRequest, text: str) -> None:
    """Answer a request that was accepted."""
    worker.answer(request, text)


# --- bounds
async def test_a_body_over_the_limit_is_refused_before_it_is_read(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world, http_max_body_bytes=4096)
    wire = await Wire.to(url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    wire.writer.write(f"{head}Content-Length: 1000000000000\r\n\r\n{{".encode())
    reply = await wire.reply()
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "too_large", "close")
    assert await wire.rest() == b""
    wire = await Wire.to(url)
    wire.writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(8):
        wire.writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
    reply = await wire.reply()
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "too_large", "close")
    # At the limit it is served.
    assert (await post(url, CHAT, content=json.dumps(chat()).encode().ljust(4096), headers=JSON)).status == 200
    await world.until(world.idle)


JSON = {"content-type": "application/json"}


HEADS = [
    (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 40_000, 431),
    (b"GET /" + b"y" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    (b"\x16\x03\x01\x02\x00\x01", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nx\x00: y\r\n\r\n", 400),
    (b"POST /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET /\xff\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
]


async def test_heads_that_are_not_served(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    for raw, status in HEADS:
        wire = await Wire.to(url)
        wire.writer.write(raw)
        reply = await wire.reply()
        assert reply.status == status, (raw[:60], reply.body)
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert await wire.rest() == b""
    assert (await get(url, "/livez")).status == 200


async def test_slow_senders_are_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    http = world.gateway.http
    assert http is not None
    http.face.body_timeout_s = 0.05
    wire = await Wire.to(url)
    wire.writer.write(f"POST {CHAT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
    reply = await wire.reply()
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    wire = await Wire.to(url)
    wire.writer.write(b"GET / HTTP/1.1\r\nHo")
    reply = await wire.reply()
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    http._config.timeout_keep_alive = 0.05  # type: ignore[assignment]
    wire = await Wire.to(url)
    assert await wire.rest() == b""


@pytest.mark.parametrize(
    ("bound", "status", "code"),
    [("http_max_connections", 503, "overloaded"), ("http_max_connections_per_address", 429, "too_many_connections")],
)
async def test_a_connection_too_many_is_told_so_and_costs_the_others_nothing(
    world: World, caplog: pytest.LogCaptureFixture, bound: str, status: int, code: str
) -> None:
    await world.worker(text="ok")
    url = await start_http(world, **{bound: 3})
    http = world.gateway.http
    assert http is not None
    held = [await Wire.to(url) for _ in range(3)]
    await world.until(lambda: len(http.places) == 3)
    for _ in range(2):
        wire = await Wire.to(url)
        reply = await wire.reply()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (status, code, "close")
        assert reply.headers["retry-after"] == "1"
        assert await wire.rest() == b""
    await http.look(asyncio.get_running_loop().time())
    assert "HTTP connection(s) refused" in caplog.text
    # Who has a place is served, and a place that is given up is the next one's.
    held[0].post(CHAT, chat())
    assert (await held[0].reply()).status == 200
    held[1].close()
    await world.until(lambda: len(http.places) == 2)
    assert (await get(url, "/livez")).status == 200
    for wire in held:
        wire.close()
    await world.until(lambda: len(http.places) == 0)


async def test_of_many_connections_too_many_only_some_are_told_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is told lives a moment longer: a flood of them is cut off."""
    monkeypatch.setattr(protocol, "MAX_TOLD", 2)
    monkeypatch.setattr(protocol, "LINGER_S", 60.0)
    await world.worker(text="ok")
    url = await start_http(world, http_max_connections=1)
    http = world.gateway.http
    assert http is not None
    held = await Wire.to(url)
    await world.until(lambda: len(http.places) == 1)
    told = [await Wire.to(url) for _ in range(2)]
    await world.until(lambda: len(http.connections) == 3)
    for wire in [await Wire.to(url) for _ in range(3)]:
        with contextlib.suppress(ConnectionResetError):
            assert await wire.rest() == b""
    for wire in told:
        assert (await wire.reply()).status == 503
    assert len(http.places) == 1
    held.close()


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, ""),
    ],
)
def test_what_counts_as_one_address(host: str | None, found: str) -> None:
    assert origin(host) == found


def test_places_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert Places(10_000, 0).most == 1024 - 256
    assert Places(100, 0).most == 100
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    assert Places(10_000, 0).most == 32


def test_a_bound_that_cannot_apply_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    Places(10_000, 768)
    Places(10_000, 0)
    assert caplog.text == ""
    Places(10_000, 5000)
    assert "one address can take all 768 HTTP connections" in caplog.text


async def test_pipelined_requests_are_answered_in_order_and_bounded(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    for index in range(5):
        wire.post(CHAT, chat(request_id=f"r{index}"))
    for index in range(5):
        assert (await wire.reply()).headers["x-request-id"] == f"r{index}"
    worker = world.workers[0]
    silent(worker)
    for _ in range(50):
        wire.post(CHAT, chat())
    # Cut off in the middle of what it sends, it may see a reset.
    with contextlib.suppress(ConnectionResetError):
        await wire.rest()
    await world.until(world.idle)


async def test_ids_come_from_the_client_only_where_they_can_do_no_harm(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    for given in ("a b", "é", "x" * 200, ""):
        wire = await Wire.to(url)
        raw = json.dumps(chat()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\nx-request-id: "
        wire.writer.write(head.encode() + given.encode() + b"\r\n\r\n" + raw)
        reply = await wire.reply()
        assert reply.status == 200
        assert reply.headers["x-request-id"].isalnum() or "-" in reply.headers["x-request-id"]
        assert reply.headers["x-request-id"] != given
        wire.close()


async def test_bodies_that_are_read_at_once_are_bounded(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    http_of(world).face.reading = Reading(1000)
    first = await Wire.to(url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
    first.writer.write(head.encode() + b" " * 600)
    await world.until(lambda: http_of(world).face.reading.size == 600)
    reply = await post(url, CHAT, chat("x" * 500))
    assert (reply.status, reply.error["code"]) == (429, "overloaded")
    first.abort()
    await world.until(lambda: http_of(world).face.reading.size == 0)
    assert (await post(url, CHAT, chat("x" * 500))).status == 200


async def test_a_stray_line_after_a_body_harms_nothing(world: World) -> None:
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.post(CHAT, chat())
    wire.writer.write(b"\r\n")
    (request,) = await worker.submits.wait(1)
    await http_of(world).look(asyncio.get_running_loop().time() + 1000)
    worker.answer(request, "ok")
    assert (await wire.reply()).status == 200
    wire.post(CHAT, chat())
    _, request = await worker.submits.wait(2)
    worker.answer(request, "ok")
    assert (await wire.reply()).status == 200
    wire.close()


# --- clients that leave
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_frees_everything(world: World, stream: bool, when: str) -> None:
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    if when == "queued":
        worker.fill()
    wire = await Wire.to(url)
    wire.post(CHAT, chat(stream=stream, request_id="mine"))
    (request,) = await worker.submits.wait(1)
    if when == "queued":
        await world.until(lambda: len(world.gateway.queue) == 1)
    elif when == "decode":
        worker.tokens(request, list(b"so"))
        if stream:
            await wire.until(b'"content":"so"')
    wire.abort()
    await world.until(world.idle)
    if when != "queued":
        (abort,) = await worker.aborts.wait(1)
        assert abort.request_id == request.request_id
    assert http_of(world).live_streams == 0


def http_of(world: World) -> Any:
    assert world.gateway.http is not None
    return world.gateway.http


async def test_a_reader_that_stalls_is_cut_alone_and_its_bytes_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "STALL_GRACE_S", 0.1)
    worker = await world.worker(max_model_len=1 << 20)
    top = [pb.TopLogprob(token_id=0x61 + index, logprob=-1.0) for index in range(20)]
    scores = [pb.TokenLogprob(token_id=0x61, logprob=-1.0, top=top)] * 50
    flooding: list[asyncio.Task[None]] = []

    async def tokens(request: engine_pb2.SubmitRequest) -> None:
        position = 0
        while not worker.aborts.items:
            worker.tokens(request, [0x61] * 50, position, logprobs=scores)
            position += 50
            await asyncio.sleep(0.001)

    async def flood(request: engine_pb2.SubmitRequest) -> None:
        if request.sampling.HasField("logprobs"):
            flooding.append(asyncio.create_task(tokens(request)))
        else:
            worker.answer(request, "ok")

    worker.on_submit = flood
    url = await start_http(world, request_buffer_bytes=200_000)
    wire = await Wire.to(url, receive_buffer=4096)
    wire.stall()
    wire.post(CHAT, chat(stream=True, logprobs=True, top_logprobs=20))
    await worker.submits.wait(1)
    reply = await post(url, CHAT, chat(max_tokens=10))
    assert reply.status == 200
    await worker.aborts.wait(1)
    waiting = [one.transport.get_write_buffer_size() for one in http_of(world).connections]
    assert max(waiting, default=0) < 2 << 20
    await world.until(world.idle)
    await world.until(lambda: not http_of(world).live_streams)
    # It is closed, not only left alone.
    await world.until(lambda: not http_of(world).connections)
    wire.abort()
    await asyncio.gather(*flooding)


# --- waiting
async def test_a_stream_that_waits_says_so(world: World) -> None:
    worker = await world.worker()
    silent(worker)
    url = await start_http(world, first_metadata_s=0.05)
    wire = await Wire.to(url)
    wire.post(CHAT, chat(stream=True))
    (request,) = await worker.submits.wait(1)
    worker.text = "ok"
    head = await wire.until(b": waiting\n\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    worker.answer(request, "ok")
    body = await wire.until(b"0\r\n\r\n")
    assert b"[DONE]" in body
    wire.close()


async def test_an_idle_stream_gives_signs_of_life(world: World) -> None:
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.post(CHAT, chat(stream=True))
    (request,) = await worker.submits.wait(1)
    worker.tokens(request, list(b"so"))
    await wire.until(b'"content":"so"')
    # The first look sees that there was something; long after it there was nothing more.
    now = asyncio.get_running_loop().time()
    for seconds in (0, 100):
        await http_of(world).look(now + seconds)
    await wire.until(b": waiting\n\n")
    worker.tokens(request, [EOS], 2, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=EOS)
    worker.end(request)
    await wire.until(b"[DONE]")
    wire.close()


async def test_an_abort_ends_a_request_of_the_same_tenant(world: World) -> None:
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    wire = await Wire.to(url)
    wire.post(CHAT, chat(request_id="mine"))
    await worker.submits.wait(1)
    reply = await post(url, "/v1/abort", {"request_id": "chatcmpl-mine"})
    assert reply.json() == {"request_id": "chatcmpl-mine", "found": True}
    ended = await wire.reply()
    assert (ended.status, ended.error["code"]) == (499, "cancelled")
    assert (await post(url, "/v1/abort", {"request_id": "mine"})).json()["found"] is False
    wire.post("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "request_id": "two", "stream": True})
    await worker.submits.wait(3)
    assert (await post(url, "/v1/abort", {"request_id": "cmpl-two"})).json()["found"] is True
    assert (await wire.reply()).status == 499
    await world.until(world.idle)
    wire.close()


# --- ends
async def test_a_drain_lets_streams_end_and_takes_nothing_new(world: World) -> None:
    worker = await world.worker()
    silent(worker)
    url = await start_http(world)
    idle, busy = await Wire.to(url), await Wire.to(url)
    idle.writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await idle.reply()).status == 200
    busy.post(CHAT, chat(stream=True))
    (request,) = await worker.submits.wait(1)
    drained = asyncio.create_task(world.gateway.drain(Deadline.after(WAIT_S)))
    assert await idle.rest() == b""
    with pytest.raises(ConnectionError):
        await Wire.to(url)
    worker.answer(request, "whole")
    head = await busy.until(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    body = await busy.rest()
    assert b"[DONE]" in body
    await drained


async def test_a_connection_that_is_old_ends_with_its_answer(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world, max_connection_age_s=1e-6)
    wire = await Wire.to(url)
    wire.post(CHAT, chat())
    reply = await wire.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert await wire.rest() == b""


# --- headers
async def test_rates_are_told(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)

    class Hold(NoHold):
        state = LimitState(Window(100, 99, 0.6), Window(5000, 4000, 61.5))

    class Limits:
        async def take(self, principal: Principal, job: Job, stop: Callable[[KvmeshError], None]) -> Hold:
            return Hold()

    world.gateway.front.limiter = Limits()
    for stream in (False, True):
        headers = (await post(url, CHAT, chat(stream=stream))).headers
        told = {name.removeprefix("x-ratelimit-"): headers[name] for name in headers if name.startswith("x-ratelimit-")}
        assert told == {
            "limit-requests": "100",
            "remaining-requests": "99",
            "reset-requests": "600ms",
            "limit-tokens": "5000",
            "remaining-tokens": "4000",
            "reset-tokens": "1m1.5s",
        }


def test_durations() -> None:
    given = (0, 0.0004, 0.35, 1, 1.5, 60, 359.999, 3600, 3661.5)
    assert [duration(one) for one in given] == [
        "0s",
        "0ms",
        "350ms",
        "1s",
        "1.5s",
        "1m0s",
        "5m59.999s",
        "1h0m0s",
        "1h1m1.5s",
    ]


async def test_pages_of_other_origins(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world, cors_origins=["https://app.example"])
    async with client(url) as http:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        good = await http.options(CHAT, headers={"origin": "https://app.example", **asked})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in good.headers["access-control-allow-headers"].lower()
        bad = await http.options(CHAT, headers={"origin": "https://evil.example", **asked})
        assert "access-control-allow-origin" not in bad.headers
        told = await http.post(CHAT, json=chat(stream=True), headers={"origin": "https://app.example"})
        assert told.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in told.headers["access-control-expose-headers"]
        assert text_of(events(told.content)) == "ok"


async def test_no_page_may_call_without_origins(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    async with client(url) as http:
        found = await http.post(CHAT, json=chat(), headers={"origin": "https://app.example"})
        assert not [name for name in found.headers if name.startswith("access-control")]


# --- TLS
async def test_tls_with_client_certificates_and_new_files(world: World, tmp_path: Path) -> None:
    ca = trustme.CA()
    cert, key, roots = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"

    def issue(name: str) -> None:
        made = ca.issue_cert("127.0.0.1", common_name=name)
        made.private_key_pem.write_to_path(str(key))
        made.cert_chain_pems[0].write_to_path(str(cert))

    issue("first")
    ca.cert_pem.write_to_path(str(roots))
    await world.worker(text="ok")
    tls = {"cert": cert, "key": key, "ca": roots, "require_client_cert": True}
    # Its own calls to workers need no TLS here: workers are plain.
    url = await start_http(world, ready=False, tls=tls)
    assert url.startswith("https://")
    trust = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    bare = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    ca.issue_cert("client").configure_cert(trust)

    async def served(context: ssl.SSLContext) -> Any:
        host, port = url.removeprefix("https://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        raw = await reader.read()
        assert raw.startswith(b"HTTP/1.1 200"), raw
        found = writer.get_extra_info("peercert")
        writer.close()
        return dict(pair[0] for pair in found["subject"])["commonName"]

    assert await served(trust) == "first"
    with pytest.raises((ssl.SSLError, OSError, AssertionError)):
        await served(bare)
    issue("second")

    async def renewed() -> None:
        while await served(trust) != "second":
            await asyncio.sleep(0.05)

    async with asyncio.timeout(WAIT_S):
        await renewed()
