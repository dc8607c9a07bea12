"""Answer caches of several routers on one Valkey."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.proto.v1 import router_pb2
from kvmesh.store import RedisStore, client
from router_harness import LIMIT_S
from router_helpers import full_answer, route_request
from services.router.cache import exact
from services.router.cache.answers import AnswerCache
from services.router.cache.outcomes import ExactOutcome
from services.router.cache.policy import CacheRules, Mode

SERVED = {("tiny", "r1")}


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has a limit outlives any pause of a busy machine."""
    monkeypatch.setattr(exact, "LEASE_MS", 60_000)
    for name in ("CONNECT_TIMEOUT_S", "WRITE_TIMEOUT_S", "TAIL_TIMEOUT_S"):
        monkeypatch.setattr(client, name, LIMIT_S)


@contextlib.asynccontextmanager
async def exact_cache(url: str, *, timeout_s: float = 10.0, **fields: Any) -> AsyncIterator[AnswerCache]:
    """A cache without vectors, connected. The limit is generous: the machine may be busy."""
    store = RedisStore(url, timeout_s=timeout_s)
    values = {"rules": CacheRules(mode=Mode.EXACT), "ttl_s": 60.0, "max_entry_bytes": 1 << 16} | fields
    cache = AnswerCache(store, None, **values)
    run = asyncio.create_task(cache.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            await store.up.wait()
        yield cache
    finally:
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        await cache.close()


async def look(
    cache: AnswerCache, text: str = "q", tenant: str = "t", *, served: Any = SERVED, gateway: str = "gw", **fields: Any
) -> ExactOutcome:
    """What a request gets; `fly` only where asked for."""
    fly = fields.pop("fly", False)
    plan = cache.plan(route_request(text, **fields), tenant)
    return await cache.exact_or_flight(plan, served, gateway_id=gateway, fly=fly, budget_s=10.0)


async def keep(
    cache: AnswerCache,
    text: str = "q",
    tenant: str = "t",
    *,
    answer: str = "yes",
    model: str = "tiny",
    revision: str = "r1",
    flight: router_pb2.Flight | None = None,
    **fields: Any,
) -> bool:
    """Store an answer to a request."""
    plan = cache.plan(route_request(text, **fields), tenant)
    return await cache.store_answer(
        plan, full_answer(answer, revision=revision), model=model, revision=revision, flight=flight
    )


def told(outcome: ExactOutcome) -> str:
    """The remembered text, "" for none."""
    return outcome.answer.choices[0].text if outcome.answer is not None else ""
