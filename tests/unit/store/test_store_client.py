"""What a Redis that is away counts: an alert has only these to go by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from flight_kit import LIMIT_S, Valkey, connected
from kvmesh.store import client
from kvmesh.store.client import PROBE, RedisStore
from kvmesh.telemetry import metrics, names


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for nothing but the clock waits less."""
    monkeypatch.setattr(client, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.2)


@pytest_asyncio.fixture
async def hanging() -> AsyncIterator[str]:
    """The URL of what takes connections and never answers."""
    writers = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    server.close()
    for writer in writers:
        writer.close()


def errors(operation: str) -> float | None:
    """None where there is no series yet."""
    return metrics.REGISTRY.get_sample_value(names.REDIS_ERRORS.name, {"operation": operation})


async def counted(more: int) -> None:
    """Until the probe has failed so often again."""
    before = errors(PROBE) or 0.0
    async with asyncio.timeout(LIMIT_S):
        while (errors(PROBE) or 0.0) < before + more:
            await asyncio.sleep(0.01)


async def get(store: RedisStore, operation: str) -> Any:
    return await store.run(operation, lambda redis: redis.get("nothing"), "default")


async def test_known_operations_begin_at_zero() -> None:
    store = RedisStore("redis://127.0.0.1:1/0", timeout_s=1.0)
    assert errors(PROBE) is not None, "also where Redis never answers"
    await store.close()
    server = Valkey()
    try:
        async with connected(server.url) as store:
            assert errors("began") is None
            assert await get(store, "began") is None
            assert errors("began") == 0.0
            assert errors("began_tail") is None
            await store.tail("began_tail", lambda redis: redis.get("nothing"), None, timeout_s=LIMIT_S)
            assert errors("began_tail") == 0.0
    finally:
        server.close()


async def test_a_dead_redis_is_counted_for_as_long_as_it_is_dead() -> None:
    server = Valkey()
    try:
        async with connected(server.url) as store:
            server.kill()
            assert await get(store, "asked") == "default"
            assert errors("asked") == 1.0
            assert not store.ok
            await counted(5)
            # Nobody else asks: the breaker is open.
            assert await get(store, "asked") == "default"
            assert errors("asked") == 1.0
            server.restart()
            async with asyncio.timeout(LIMIT_S):
                await store.up.wait()
            after = errors(PROBE)
            for _ in range(20):
                assert await get(store, "asked") is None
            assert errors(PROBE) == after, "what answers is no error"
    finally:
        server.close()


async def test_one_that_hangs_or_was_never_there_is_counted_too(hanging: str) -> None:
    for url in (hanging, "redis://127.0.0.1:1/0"):
        store = RedisStore(url, timeout_s=1.0)
        watch = asyncio.create_task(store.watch())
        await counted(3)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await store.close()
