"""A client that leaves, at every stage of its request: decode, prefill and sidecars stop, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvmesh.cli.ports import free_port
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from mesh_kit import Mesh, mesh_up, until

WAIT_S = 60.0
WORKERS = ("decode-0", "prefill-0")
SETTINGS = {
    "decode.scripted_step_ms": "20",
    "decode.max_batch": "2",
    "decode.max_queue": "0",
    "decode.prefix_cache": "false",
    # A long prompt takes many steps, whose pages leave one by one.
    "prefill.scripted_step_ms": "50",
    "prefill.chunk_size": "16",
    "prefill.prefix_cache": "false",
    # A worker or router that waits for a processor is not lost.
    "gateway.heartbeats_missed": "30",
    "gateway.heal_wait_s": "60",
    "router.redis_timeout_ms": "5000",
}
LONG = "a prompt of many pages " * 120
# What every stage is to be over within, once the client has left; looked at, not asserted: machines stand still.
SOON_S = 1.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Asking:
    """Clients of one mesh, and what is left of their requests."""

    def __init__(self, mesh: Mesh, http: str) -> None:
        self.mesh = mesh
        self.http = http
        self.channel = grpc.aio.insecure_channel(mesh.gateway)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.asked = 0

    def ask(self, text: str = "hello", *, max_tokens: int = 3000, cached: bool = False, **sampling: Any) -> Any:
        """A chat of its own, or (`cached`) one that equals others."""
        self.asked += 1
        request = pb.ChatRequest(
            model=self.mesh.model,
            messages=[pb.ChatMessage(role="user", content=text if cached else f"{self.asked} {text}")],
            sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling),
            cache=pb.CACHE_MODE_EXACT if cached else pb.CACHE_MODE_OFF,
        )
        return self.stub.Chat(request, timeout=300)

    async def post(self, text: str = "hello") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A streamed chat over HTTP, on a connection of its own."""
        self.asked += 1
        message = {"role": "user", "content": f"{self.asked} {text}"}
        body = json.dumps(
            {"model": self.mesh.model, "messages": [message], "max_tokens": 3000, "stream": True}
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.http}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(*self.http.split(":"))
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def gauge(self, name: str) -> float:
        """One of the gateway's own figures."""
        ready = self.mesh.supervisor.processes["gateway"].read_ready()
        assert ready is not None

        def read() -> str:
            with urllib.request.urlopen(f"http://{ready.metrics}/metrics", timeout=WAIT_S) as page:
                text: str = page.read().decode()
            return text

        found = re.search(rf"^kvmesh:{name} (\S+)$", await asyncio.to_thread(read), re.M)
        return float(found[1]) if found else 0.0

    async def active(self, count: int) -> None:
        """Until the gateway holds so many requests."""
        await until(lambda: self._is("gateway_requests_active", count), f"{count} requests at the gateway", WAIT_S)

    async def waiting(self, count: int) -> None:
        """Until so many wait in the gateway's line."""
        await until(lambda: self._is("gateway_requests_waiting", count), f"{count} requests in line", WAIT_S)

    async def _is(self, name: str, value: float) -> bool:
        return await self.gauge(name) == value

    async def gone(self, left: int = 0) -> float:
        """Until workers and sidecars run `left` requests, and the gateway holds as many; seconds it took."""
        began = time.monotonic()

        async def idle() -> bool:
            loads = [await self.mesh.load(name) for name in WORKERS]
            status = await self.mesh.status()
            slots = [reply.slots_open for reply in status.sidecars.values() if reply is not None]
            decode, prefill = loads
            return (
                decode.running + decode.waiting + decode.transferring == left
                and prefill.running + prefill.waiting + prefill.transferring == 0
                and (left > 0 or all(load.free_pages == load.total_pages for load in loads))
                and len(slots) == len(WORKERS)
                and not any(slots)
            )

        await until(idle, "something of a cancelled request is left", WAIT_S, 0.02)
        await self.active(left)
        return time.monotonic() - began


async def tokens(call: Any, count: int = 1) -> int:
    """Read until `count` tokens have come."""
    got = 0
    async with asyncio.timeout(WAIT_S):
        while got < count:
            response = await call.read()
            assert response is not grpc.aio.EOF
            got += len(response.event.delta.token_ids)
    return got


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asking() -> AsyncIterator[Asking]:
    http = f"127.0.0.1:{free_port()}"
    async with mesh_up(settings={**SETTINGS, "gateway.http_listen": http}) as mesh:
        made = Asking(mesh, http)
        try:
            yield made
        finally:
            await made.channel.close()


@pytest.fixture
def told(record_property: Callable[[str, str], None], request: pytest.FixtureRequest) -> Callable[[float], None]:
    def tell(seconds: float) -> None:
        late = "" if seconds <= SOON_S else f" (more than {SOON_S:g} s)"
        record_property("measured", f"{request.node.name}: gone after {seconds:.2f} s{late}")

    return tell


async def test_while_tokens_come(asking: Asking, told: Callable[[float], None]) -> None:
    calls = [asking.ask(), asking.ask()]
    for call in calls:
        await tokens(call, 3)
    for call in calls:
        call.cancel()
    told(await asking.gone())


async def test_while_its_prompt_is_computed_and_its_pages_move(asking: Asking, told: Callable[[float], None]) -> None:
    async def received() -> int:
        reply = (await asking.mesh.status()).sidecars["decode-0"]
        return int(reply.counters.bytes_received) if reply is not None else 0

    before = await received()
    call = asking.ask(LONG)

    async def moving() -> bool:
        return (await asking.mesh.load("prefill-0")).running > 0 and await received() > before

    await until(moving, "pages of a prompt that is still computed", WAIT_S, 0.01)
    call.cancel()
    told(await asking.gone())


async def test_while_others_are_first(asking: Asking, told: Callable[[float], None]) -> None:
    """In the gateway's line; those who are served notice nothing."""
    busy = [asking.ask() for _ in range(2)]
    for call in busy:
        await tokens(call)
    queued = [asking.ask(LONG) for _ in range(3)]
    await asking.waiting(3)
    for call in queued:
        call.cancel()
    await asking.waiting(0)
    await asking.gone(left=2)
    assert await tokens(busy[0], 5) >= 5
    # One goes from the line to a worker just as it leaves.
    late = asking.ask(LONG)
    await asking.waiting(1)
    busy[0].cancel()
    late.cancel()
    await asking.gone(left=1)
    busy[1].cancel()
    told(await asking.gone())


async def test_over_http(asking: Asking, told: Callable[[float], None]) -> None:
    """Its connection is closed: while tokens come, in the line, and while its prompt is computed."""
    busy = [await asking.post() for _ in range(2)]
    for reader, _ in busy:
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b'"content":')
    _, queued = await asking.post(LONG)
    await asking.waiting(1)
    queued.close()
    await asking.waiting(0)
    for _, writer in busy:
        writer.close()
    await asking.gone()
    _, computed = await asking.post(LONG)

    async def computing() -> bool:
        return (await asking.mesh.load("prefill-0")).running > 0

    await until(computing, "a prompt that is computed", WAIT_S, 0.01)
    computed.close()
    told(await asking.gone())


async def test_while_the_router_thinks(asking: Asking, told: Callable[[float], None]) -> None:
    asking.mesh.kill("router", signal.SIGSTOP)
    try:
        call = asking.ask()
        await asking.active(1)
        began = time.monotonic()
        call.cancel()
        await asking.active(0)
        took = time.monotonic() - began
    finally:
        asking.mesh.kill("router", signal.SIGCONT)
    await asking.gone()
    told(took)


async def test_while_it_follows_another(asking: Asking, told: Callable[[float], None]) -> None:
    """A shared generation goes on as long as anybody reads it, and ends with the last, whoever began it."""

    async def shared(question: str) -> list[Any] | None:
        """A leader and two who follow it; None when the router had no answer from Redis in time, and they do not."""
        calls: list[Any] = []
        for _ in range(3):
            calls.append(asking.ask(question, cached=True, seed=1))
            await tokens(calls[-1], 5)
            if (await asking.mesh.load("decode-0")).running > 1:
                for call in calls:
                    call.cancel()
                await asking.gone()
                return None
        return calls

    found = None
    for number in range(5):
        found = found or await shared(f"the same question {number}")
    assert found is not None
    leader, first, second = found
    first.cancel()
    await tokens(leader, 5)
    leader.cancel()
    await tokens(second, 5)
    assert (await asking.mesh.load("decode-0")).running == 1
    second.cancel()
    told(await asking.gone())


async def test_while_its_worker_says_nothing(asking: Asking, told: Callable[[float], None]) -> None:
    """In the middle of its answer, and before the worker has taken it: it hears of both when it runs again."""
    call = asking.ask()
    await tokens(call, 3)
    asking.mesh.kill("decode-0", signal.SIGSTOP)
    try:
        waiting = asking.ask()
        await asking.active(2)
        began = time.monotonic()
        for each in (call, waiting):
            each.cancel()
        await asking.active(0)
        took = time.monotonic() - began
    finally:
        asking.mesh.kill("decode-0", signal.SIGCONT)
    await asking.gone()
    told(took)


async def test_while_it_looks_for_another_worker(asking: Asking, told: Callable[[float], None]) -> None:
    """Its worker is killed, and there is no other; when one is there again, nothing of it comes back."""
    call = asking.ask()
    await tokens(call, 3)
    before = asking.mesh.pid("decode-0")
    asking.mesh.kill("decode-0")
    await until(lambda: "is placed again" in asking.mesh.log("gateway"), "the heal to begin", WAIT_S, 0.01)
    assert await asking.gauge("gateway_requests_active") == 1
    began = time.monotonic()
    call.cancel()
    await asking.active(0)
    took = time.monotonic() - began
    await until(lambda: asking.mesh.pid("decode-0") != before, "the worker to be started again", WAIT_S)
    await asking.gone()

    async def serves() -> bool:
        served = asking.ask()
        try:
            return await tokens(served) > 0
        finally:
            served.cancel()

    await until(serves, "the worker that was started again", WAIT_S)
    await asking.gone()
    told(took)
