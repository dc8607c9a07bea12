"""Replicas of the semantic cache over a real Valkey: what one learns all know, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvmesh.store import RedisStore, events, keys
from router_harness import LIMIT_S, AttachedWorker, Valkey, running_router
from router_helpers import route_request, worker_info
from services.router.cache.fingerprint import CacheKey
from services.router.near import replica
from services.router.near.embedder import HashEmbedder
from services.router.near.entries import Entry
from services.router.near.nearcache import NearCache, Origin
from services.router.near.replica import Replica
from test_cache_cluster import cluster  # noqa: F401

EPOCH = 7


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fresh(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    valkey.client().flushall()
    valkey.client().set(keys.EPOCH, EPOCH)
    monkeypatch.setattr(replica, "BLOCK_MS", 100)
    monkeypatch.setattr(replica, "RETRY_S", 0.02)


class Node:
    """One router's semantic cache."""

    def __init__(self, url: str, **options: Any) -> None:
        self.store = RedisStore(url, timeout_s=5.0)
        values = {"max_entries": 1000, "max_bytes": 1 << 24, "ttl_s": 3600.0, "embed_timeout_s": LIMIT_S} | options
        self.cache = NearCache(HashEmbedder, fetchable=True, **values)
        self.cache.fetch = self.fetch
        self.replica = Replica(self.store, self.cache)

    async def fetch(self, entry: Entry, timeout_s: float) -> bytes | None:
        found = await self.store.run(
            "get", lambda client: client.get(keys.answer(entry.tag, entry.exact)), None, timeout_s=timeout_s
        )
        return bytes(found) if found else b""

    async def put(self, text: str, *, answer: bytes = b"", epoch: int = EPOCH, life_s: float = 600.0) -> Origin:
        """Store an answer as the answer cache does."""
        answer = answer or text.encode()
        origin = origin_of(text, epoch=epoch, life_s=life_s)
        await self.store.run(
            "set", lambda client: client.set(keys.answer(origin.tag, origin.exact), answer), None, write=True
        )
        assert await self.cache.store(key(text), answer, LIMIT_S, origin)
        return origin

    async def ask(self, text: str) -> bytes | None:
        """The answer, None for a miss."""
        outcome = await self.cache.lookup(key(text), 0.95, LIMIT_S)
        assert outcome.result in ("hit", "miss", "timeout")
        return outcome.hit.answer if outcome.hit is not None else None

    async def learns(self, text: str, answer: bytes | None) -> None:
        """Wait until the answer to a text is this one."""
        async with asyncio.timeout(LIMIT_S):
            while await self.ask(text) != answer:
                await asyncio.sleep(0.01)


def origin_of(text: str, *, epoch: int = EPOCH, life_s: float = 600.0) -> Origin:
    entry_id = text.encode().ljust(16, b".")[:16]
    at = int(1000 * (time.time() + life_s))
    return Origin(entry_id, "a" * 32, text.encode().hex().ljust(64, "0")[:64], "b" * 32, "c" * 32, "d" * 16, epoch, at)


def key(text: str) -> CacheKey:
    return CacheKey(b"e" * 32, b"p" * 32, text, b"r" * 16, "a" * 32)


Make = Callable[..., contextlib.AbstractAsyncContextManager[Node]]


@contextlib.asynccontextmanager
async def node(valkey: Valkey | str, *, ready: bool = True, **options: Any) -> AsyncIterator[Node]:
    made = Node(valkey if isinstance(valkey, str) else valkey.url, **options)
    made.cache.start()
    tasks = [asyncio.create_task(made.store.watch()), asyncio.create_task(made.replica.run())]
    try:
        if ready:
            async with asyncio.timeout(LIMIT_S):
                await made.replica.ready.wait()
        yield made
        for task in tasks:
            assert not task.done() or task.result() is None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(made.cache.close)
        await made.store.close()


async def test_what_one_stores_the_other_serves(valkey: Valkey) -> None:
    async with node(valkey) as one, node(valkey) as two:
        await one.put("how deep is the sea")
        await two.learns("how deep is the sea", b"how deep is the sea")
        await two.put("how high is the sky")
        await one.learns("how high is the sky", b"how high is the sky")
        await one.put("how high is the sky", answer=b"newer")
        assert (one.cache.entries, two.cache.entries) == (2, 2)
        assert one.replica.refused == two.replica.refused == 0


async def test_purges_and_epochs_reach_all(valkey: Valkey) -> None:
    client = valkey.client()
    async with node(valkey) as one, node(valkey) as two:
        for text in ("alpha", "beta", "gamma"):
            origin = await one.put(text)
            await two.learns(text, text.encode())
        now = int(time.time() * 1000)
        for event, text in (
            (events.Purged("id", origin.entry_id.hex(), now), "gamma"),
            (events.Purged("tenant", "b" * 32, now), "beta"),
            (events.Purged("family", "d" * 16, now), "delta"),
            (events.Purged("model", "c" * 32, now), "epsilon"),
        ):
            if text > "c":
                await one.put(text)
                await two.learns(text, text.encode())
            client.xadd(keys.EVENTS, events.encode(event))
            await one.learns(text, None)
            await two.learns(text, None)
        assert await one.ask("alpha") is None
        await one.put("before the epoch")
        await two.learns("before the epoch", b"before the epoch")
        client.set(keys.EPOCH, EPOCH + 1)
        client.xadd(keys.EVENTS, events.encode(events.Epoch(EPOCH + 1)))
        await two.learns("before the epoch", None)
        await one.learns("before the epoch", None)
        await one.put("after the epoch", epoch=EPOCH + 1)
        await two.learns("after the epoch", b"after the epoch")
        await one.put("of an old one", epoch=EPOCH)
        await one.put("after that", epoch=EPOCH + 1)
        await two.learns("after that", b"after that")
        assert await two.ask("of an old one") is None


async def test_a_new_epoch_is_noticed_from_an_entry_that_comes_before_its_event(valkey: Valkey) -> None:
    async with node(valkey) as one, node(valkey) as two:
        await one.put("old")
        await two.learns("old", b"old")
        valkey.client().set(keys.EPOCH, EPOCH + 1)
        await one.put("new", epoch=EPOCH + 1)
        await two.learns("new", b"new")
        assert await two.ask("old") is None


async def test_a_fresh_replica_rebuilds_before_it_is_ready(valkey: Valkey) -> None:
    texts = [f"question{i} about subject{i} number{i}" for i in range(300)]
    async with node(valkey) as one:
        for text in texts:
            await one.put(text)
        await one.put("soon gone", life_s=0.01)
    async with node(valkey) as two:
        assert (two.replica.progress, two.replica.rebuilds, two.replica.taken) == (1.0, 1, 300)
        for text in texts[::10]:
            assert await two.ask(text) == text.encode(), "fetched from Redis"
        assert await two.ask("soon gone") is None
        await two.put("one more")
        await two.learns("one more", b"one more")


async def test_readiness_waits_for_the_rebuild_but_not_for_ever(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(valkey) as one:
        await one.put("hello there")
    reached, go_on = asyncio.Event(), asyncio.Event()
    shard = Replica._shard

    async def held_up(self: Replica, name: str, seen: set[bytes]) -> None:
        reached.set()
        await go_on.wait()
        await shard(self, name, seen)

    monkeypatch.setattr(Replica, "_shard", held_up)
    async with node(valkey, ready=False) as two:
        async with asyncio.timeout(LIMIT_S):
            await reached.wait()
        assert not two.replica.ready.is_set()
        assert two.replica.progress < 1.0
        monkeypatch.setattr(replica, "STALLED_S", 0.0)
        async with asyncio.timeout(LIMIT_S):
            await two.replica.ready.wait()
        assert two.replica.progress < 1.0
        go_on.set()
        await two.learns("hello there", b"hello there")


async def test_corrupt_entries_are_left_out(valkey: Valkey) -> None:
    client = valkey.client()
    async with node(valkey) as one:
        good = [await one.put(text) for text in ("first one", "second one", "third one", "fourth one", "fifth one")]
        names = [keys.entry(origin.tag, origin.entry_id.hex()) for origin in good]
        nan = np.full(HashEmbedder.dim, np.nan, dtype="<f4").tobytes()
        packed = [client.get(name) for name in names]
        entries = [events.Added.unpack(each) for each in packed]
        client.set(names[0], dataclasses.replace(entries[0], vector=nan).pack())
        client.set(names[1], packed[1][:-1])
        short = np.eye(8, dtype="<f4")[0].tobytes()
        client.set(names[2], dataclasses.replace(entries[2], vector=short).pack())
        client.set(names[3], dataclasses.replace(entries[3], epoch=1 << 60).pack())
        client.delete(names[4])
        client.hset(names[4], "of", "another type")
        await one.put("a good one")
        client.zadd(keys.vector_index(0, EPOCH), {"nonsense": 1e15, "a b c": 1e15})
    client.xadd(keys.EVENTS, {"kind": "add", "id": "x"})
    client.xadd(keys.EVENTS, {"what": "ever"})
    async with node(valkey) as two:
        assert await two.ask("a good one") == b"a good one"
        assert (two.cache.entries, two.replica.epoch) == (1, EPOCH)
        assert two.replica.refused >= 4
        # The same while following.
        spoiled = dataclasses.replace(entries[0], entry_id=b"s" * 16, text="spoiled", vector=nan)
        foreign = dataclasses.replace(spoiled, embedder="another", vector=np.eye(384, dtype="<f4")[0].tobytes())
        for event in (spoiled, foreign):
            client.xadd(keys.EVENTS, events.encode(event))
        client.xadd(keys.EVENTS, {"kind": "add", "entry": spoiled.pack()[:-1]})
        client.xadd(keys.EVENTS, {"kind": "purge", "what": "everything"})
        await two.put("another good one")
        await two.learns("another good one", b"another good one")
        assert await two.ask("spoiled") is None
        assert await two.ask("a good one") == b"a good one"


async def test_of_an_oversized_entry_no_more_is_read_than_an_entry_has(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = valkey.client()
    async with node(valkey) as one:
        origin = await one.put("grown")
        await one.put("a good one")
    name = keys.entry(origin.tag, origin.entry_id.hex())
    client.setrange(name, 8 << 20, b"x")
    sizes: list[int] = []
    unpack = events.Added.unpack

    def measured(data: Any) -> events.Added:
        sizes.append(len(data))
        return unpack(data)

    monkeypatch.setattr(events.Added, "unpack", measured)
    async with node(valkey) as two:
        assert await two.ask("a good one") == b"a good one"
        assert two.cache.entries == 1
    assert events.MAX_PACKED_BYTES < max(sizes) <= events.MAX_PACKED_BYTES + 1


def test_an_entry_packs_and_unpacks() -> None:
    added = events.Added(
        entry_id=b"i" * 16, partition=b"p" * 32, tag="0a" * 16, exact="0b" * 32, text="naïve?", prompt=b"r" * 16,
        vector=b"\0" * 1536, embedder="minilm-12", tenant="0c" * 16, model="0d" * 16, family="0e" * 8, epoch=7,
        expires_ms=1_700_000_000_000,
    )  # fmt: skip
    packed = added.pack()
    assert events.Added.unpack(packed) == added
    assert events.decode(events.encode(added)) == added
    for bad in (
        b"",
        packed[:-1],
        packed + b"x",
        b"kE\2" + packed[3:],
        packed[:-3] + b"\xff\xff\xff",
        None,
        7,
        [packed],
    ):
        with pytest.raises(ValueError, match=r"entry|decode"):
            events.Added.unpack(bad)
    for wrong in ({"vector": b""}, {"vector": b"x" * 5}, {"prompt": b"r"}, {"text": "x" * 70_000}):
        with pytest.raises(ValueError, match="another length"):
            events.Added.unpack(dataclasses.replace(added, **wrong).pack())  # type: ignore[arg-type]


async def test_routers_share_semantic_answers(valkey: Valkey) -> None:
    """Through the whole service: stored by one, told of by Redis, served by another and by one that starts later."""
    options = {
        "redis_url": valkey.url,
        "redis_timeout_ms": 10_000,
        "embed_timeout_ms": 10_000,
        # Workers of the test say nothing after they have registered.
        "worker_timeout_s": 600.0,
        "semantic_threshold": 0.7,
    }
    near = route_request("Tell me what is the capital of France")
    async with running_router(**options) as one, running_router(instance="router-2", **options) as two:
        async with AttachedWorker(one, worker_info("a")), AttachedWorker(two, worker_info("a")):
            await one.ask(route_request("What is the capital of France?"), "Paris.")
            async with asyncio.timeout(LIMIT_S):
                while not (response := await two.route(near)).HasField("answer"):
                    await asyncio.sleep(0.01)
            answer = response.answer
            assert (answer.kind, answer.choices[0].text, len(answer.purge_id)) == ("semantic", "Paris.", 32)
            async with running_router(instance="router-3", **options) as three:
                async with AttachedWorker(three, worker_info("a")):
                    async with asyncio.timeout(LIMIT_S):
                        await three.service.cache.rebuilt()
                    assert (await three.route(near)).answer.purge_id == answer.purge_id
                    assert three.service.cache.status().progress == 1.0
                    await one.service.cache.purge(purge_id=answer.purge_id)
                    for router in (one, two, three):
                        async with asyncio.timeout(LIMIT_S):
                            while (await router.route(near)).HasField("answer"):
                                await asyncio.sleep(0.01)


async def test_a_trimmed_stream_is_noticed(valkey: Valkey) -> None:
    client = valkey.client()
    async with node(valkey) as one, node(valkey) as two:
        await one.put("stays")
        gone = await one.put("purged behind their backs")
        await two.learns("purged behind their backs", b"purged behind their backs")
        client.zrem(
            keys.vector_index(keys.vector_shard(gone.entry_id.hex()), EPOCH), f"{gone.tag} {gone.entry_id.hex()}"
        )
        client.delete(keys.entry(gone.tag, gone.entry_id.hex()))
        client.xtrim(keys.EVENTS, maxlen=0)
        for each in (one, two):
            async with asyncio.timeout(LIMIT_S):
                while each.replica.rebuilds < 2:
                    await asyncio.sleep(0.01)
            assert each.replica.ready.is_set()
            await each.learns("purged behind their backs", None)
            assert await each.ask("stays") == b"stays"
        await two.put("later on")
        await one.learns("later on", b"later on")


async def test_redis_gone_and_back(valkey: Valkey) -> None:
    server = Valkey()
    server.client().set(keys.EPOCH, EPOCH)
    try:
        async with node(server) as one, node(server) as two:
            await one.put("known to both")
            await two.learns("known to both", b"known to both")
            await asyncio.to_thread(server.kill)
            async with asyncio.timeout(LIMIT_S):
                while one.store.ok or two.store.ok:
                    await asyncio.sleep(0.01)
            # What memory holds is served, what is stored is kept here.
            assert await one.ask("known to both") == b"known to both"
            origin = origin_of("while away")
            assert await one.cache.store(key("while away"), b"kept", LIMIT_S, origin)
            assert await one.ask("while away") == b"kept"
            assert one.replica.ready.is_set()
            await asyncio.to_thread(server.restart)
            server.client().set(keys.EPOCH, EPOCH)
            async with asyncio.timeout(LIMIT_S):
                while one.replica.rebuilds < 2 or two.replica.rebuilds < 2:
                    await asyncio.sleep(0.01)
            assert one.replica.ready.is_set()
            assert two.replica.ready.is_set()
            assert await two.ask("known to both") is None, "Redis came back empty: what it does not know is void"
            await two.put("hello again")
            await one.learns("hello again", b"hello again")
    finally:
        server.close()


async def test_a_failure_of_any_kind_begins_anew(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "FAILED_S", 0.01)
    async with node(valkey) as one, node(valkey) as two:
        monkeypatch.setattr(replica.events, "decode", lambda fields: 1 / 0)
        await one.put("hello there")
        await two.learns("hello there", b"hello there")
        async with asyncio.timeout(LIMIT_S):
            while two.replica.rebuilds < 2:
                await asyncio.sleep(0.01)


async def test_on_a_cluster(cluster: str) -> None:  # noqa: F811
    async with node(cluster, ready=False) as one:
        async with asyncio.timeout(LIMIT_S):
            await one.store.up.wait()
        await one.store.run("epoch", lambda client: client.set(keys.EPOCH, EPOCH), None, write=True)
        await one.put("hello there")
        async with node(cluster) as two:
            assert await two.ask("hello there") == b"hello there"
            await two.put("and back")
            await one.learns("and back", b"and back")


async def test_without_redis_a_router_is_ready_at_once() -> None:
    async with node("redis://127.0.0.1:1/0") as one:
        assert one.replica.progress == 0.0
        assert await one.cache.store(key("hello"), b"world", LIMIT_S, origin_of("hello"))
        assert await one.ask("hello") == b"world"


async def test_an_embedder_that_does_not_load_keeps_nobody_waiting(valkey: Valkey) -> None:
    store = RedisStore(valkey.url, timeout_s=5.0)
    cache = NearCache(lambda: None, max_entries=10, max_bytes=1 << 20, ttl_s=60.0)
    cache.start()
    follower = Replica(store, cache)
    async with asyncio.timeout(LIMIT_S):
        await follower.run()
    assert follower.ready.is_set()
    await asyncio.to_thread(cache.close)
    await store.close()
