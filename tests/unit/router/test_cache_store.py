"""The client of Redis: a breaker in front of it, no answer taken for another, and every way to name a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError

from cache_kit import be_patient
from kvmesh.store import RedisStore, client
from router_harness import LIMIT_S, SlowProxy, Valkey, until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fresh(valkey: Valkey) -> None:
    valkey.client().flushall()


@contextlib.asynccontextmanager
async def connected(url: str, **fields: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **({"timeout_s": 10.0} | fields))
    watch = asyncio.create_task(store.watch())
    try:
        async with asyncio.timeout(LIMIT_S):
            await store.up.wait()
        yield store
    finally:
        watch.cancel()
        await store.close()


async def get(store: RedisStore, key: str, timeout_s: float | None = None) -> Any:
    return await store.run("get", lambda redis: redis.get(key), None, timeout_s=timeout_s)


async def test_nothing_is_asked_before_a_probe_was_answered(valkey: Valkey) -> None:
    valkey.client().set("k", "v")
    store = RedisStore(valkey.url, timeout_s=10.0)
    assert not store.ok
    assert await get(store, "k") is None
    await store.close()
    async with connected(valkey.url) as up:
        assert await get(up, "k") == b"v"
        assert await get(up, "other") is None
        assert await up.run("x", lambda redis: redis.incr("n"), 0, write=True) == 1
        assert await get(up, "k", timeout_s=0.0) is None


async def test_a_refused_connection_opens_at_once_and_it_comes_back() -> None:
    own = Valkey()
    try:
        async with connected(own.url) as store:
            own.kill()
            assert await get(store, "k") is None
            assert not store.ok
            assert not store.up.is_set()
            asked = 0

            async def work(_: Any) -> int:
                nonlocal asked
                asked += 1
                return 1

            for _ in range(1000):
                assert await store.run("get", work, 0) == 0
                assert await store.tail("read", work, 0, timeout_s=1.0) == 0
            assert asked == 0, "a dead one costs nothing"
            own.restart()
            await until(lambda: store.ok, "found again")
            assert await store.run("get", work, 0) == 1
    finally:
        own.close()


async def test_an_error_of_a_value_is_not_an_error_of_redis(valkey: Valkey) -> None:
    valkey.client().lpush("list", "x")
    async with connected(valkey.url) as store:
        for _ in range(5):
            assert await get(store, "list") is None
        assert store.ok


async def test_a_caller_in_a_hurry_does_not_open_the_breaker(valkey: Valkey) -> None:
    proxy = SlowProxy(valkey.port)
    store = RedisStore(await proxy.start(), timeout_s=0.05)
    # Without `watch`: nothing closes it again.
    store._ok = True
    try:
        proxy.flow.clear()
        # The socket's own limit is LIMIT_S here: nobody may come to wait for that.
        async with asyncio.timeout(LIMIT_S / 2):
            for _ in range(20):
                assert await get(store, "k", 0.001) is None
            assert store.ok
            for _ in range(client.TIMEOUTS_TO_OPEN):
                assert store.ok
                assert await get(store, "k") is None
        assert not store.ok
    finally:
        await store.close()
        await proxy.close()


async def test_a_late_answer_is_never_taken_for_another(valkey: Valkey) -> None:
    """An operation given up in the middle must not leave its answer in the connection for the next one."""
    proxy = SlowProxy(valkey.port)
    store = RedisStore(await proxy.start(), timeout_s=0.1)
    try:
        for i in range(8):
            valkey.client().set(f"key {i}", f"value {i}")
        hits = 0
        for round_ in range(60):
            if round_ % 3 == 0:
                proxy.flow.clear()
            else:
                proxy.flow.set()
            store._ok, store._timeouts = True, 0
            wanted = [i % 8 for i in range(round_, round_ + 5)]
            got = await asyncio.gather(*(get(store, f"key {i}") for i in wanted))
            for i, value in zip(wanted, got, strict=True):
                assert value in (None, f"value {i}".encode())
                hits += value is not None
        assert hits > 0
    finally:
        await store.close()
        await proxy.close()


async def test_many_at_once_do_not_look_like_a_broken_redis(valkey: Valkey) -> None:
    valkey.client().set("k", "v")
    async with connected(valkey.url, timeout_s=30.0) as store:
        assert set(await asyncio.gather(*(get(store, "k") for _ in range(300)))) == {b"v"}
        assert store.ok
        assert len(valkey.client().client_list()) <= client.MAX_CONNECTIONS + 2


async def test_readers_that_block_keep_nobody_else_waiting(valkey: Valkey) -> None:
    async with connected(valkey.url) as store:
        readers = [
            asyncio.create_task(
                store.tail("read", lambda r: r.xread({"s": "$"}, block=60_000), None, timeout_s=client.TAIL_TIMEOUT_S)
            )
            for _ in range(client.MAX_CONNECTIONS + 8)
        ]
        blocked = valkey.client()
        await until(lambda: blocked.info("clients")["blocked_clients"] == len(readers), "all are reading")
        assert await store.run("set", lambda r: r.set("k", "v"), None, write=True)
        assert await get(store, "k") == b"v"
        blocked.xadd("s", {"f": "x"})
        replies = await asyncio.gather(*readers)
        assert all(reply[0][1][0][1] == {b"f": b"x"} for reply in replies)
        # One whose time runs out says nothing about Redis.
        assert await store.tail("read", lambda r: r.xread({"s": "$"}, block=60_000), None, timeout_s=0.01) is None
        assert store.ok


async def test_hooks_run_before_redis_is_used_again(valkey: Valkey) -> None:
    store = RedisStore(valkey.url, timeout_s=10.0)
    calls: list[bool] = []

    async def hook(redis: Any) -> None:
        calls.append(store.ok)
        if len(calls) == 1:
            raise RedisConnectionError("not yet")
        await redis.set("hooked", "1")

    store.on_connect.append(hook)
    watch = asyncio.create_task(store.watch())
    try:
        async with asyncio.timeout(LIMIT_S):
            await store.up.wait()
        assert calls == [False, False]
        assert await get(store, "hooked") == b"1"
    finally:
        watch.cancel()
        await store.close()


async def test_a_server_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.02)
        watch = asyncio.create_task(store.watch())
        try:
            async with asyncio.timeout(LIMIT_S):
                await store.checked.wait()
            assert not store.ok
        finally:
            watch.cancel()
            await store.close()


@pytest.mark.parametrize(
    ("url", "cluster", "kind"),
    [
        ("redis://host:1/2", False, aioredis.Redis),
        ("rediss://host:1", False, aioredis.Redis),
        ("redis://host:1", True, RedisCluster),
        ("redis+cluster://host:1", False, RedisCluster),
        ("rediss+cluster://host:1", False, RedisCluster),
    ],
)
async def test_ways_to_name_a_server(tmp_path: Path, url: str, cluster: bool, kind: type) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    store = RedisStore(url, timeout_s=1.0, password_file=password, cluster=cluster)
    assert type(store._client) is type(store._tailing) is kind
    tls = url.startswith("rediss")
    if kind is aioredis.Redis:
        pool = store._client.connection_pool
        options = pool.connection_kwargs
        assert issubclass(pool.connection_class, aioredis.SSLConnection) == tls
        assert options["host"] == "host"
    else:
        options = store._client.connection_kwargs
        assert bool(options.get("ssl_context") or options.get("connection_class") is aioredis.SSLConnection) == tls
        assert store._client.nodes_manager.startup_nodes.keys() == {"host:1"}
    assert options["password"] == "secret"
    await store.close()


def test_a_password_in_a_file_opens_the_door(tmp_path: Path, valkey: Valkey) -> None:
    async def run() -> tuple[Any, bool]:
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        right.write_text("open sesame\n")
        wrong.write_text("open barley\n")
        async with connected(valkey.url, password_file=right) as store:
            value = await get(store, "k")
        store = RedisStore(valkey.url, timeout_s=10.0, password_file=wrong)
        watch = asyncio.create_task(store.watch())
        try:
            async with asyncio.timeout(LIMIT_S):
                await store.checked.wait()
            return value, store.ok
        finally:
            watch.cancel()
            await store.close()

    server = valkey.client()
    server.set("k", "v")
    server.config_set("requirepass", "open sesame")
    try:
        assert asyncio.run(run()) == (b"v", False)
    finally:
        server.auth("open sesame")
        server.config_set("requirepass", "")


def test_what_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    for url in ("http://host", "host:1", "redis+other://host", ""):
        with pytest.raises(ValueError):  # noqa: PT011
            RedisStore(url, timeout_s=1.0)
    with pytest.raises(OSError, match="nowhere"):
        RedisStore("redis://host", timeout_s=1.0, password_file=tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        RedisStore("rediss://host", timeout_s=1.0, ca_file=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="rediss"):
        RedisStore("redis://host", timeout_s=1.0, ca_file=tmp_path / "nowhere")
    large = tmp_path / "large"
    large.write_text("x" * 5000)
    with pytest.raises(ValueError, match="larger"):
        RedisStore("redis://host", timeout_s=1.0, password_file=large)
