"""The semantic cache around its threads: who is served, what is told of it, and who waits for whom."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from kvmesh.errors import FailedPrecondition, InvalidArgument
from services.router.cache.fingerprint import CacheKey
from services.router.match import Rules, Verdict
from services.router.near import batching, nearcache
from services.router.near.embedder import Embedder, HashEmbedder
from services.router.near.entries import Entry
from services.router.near.nearcache import NearCache, NearOutcome, Origin
from services.router.near.search import Vector

LIMIT_S = 60.0
SKIPPED = NearOutcome("skipped")


class Gate(HashEmbedder):
    """An embedder that waits to be let through for texts that start with "slow"."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def embed(self, text: str) -> Vector | None:
        if text.startswith("slow"):
            self.entered.set()
            assert self.open.wait(LIMIT_S)
        if text.startswith("fail"):
            raise RuntimeError("no vector today")
        return super().embed(text)


def key(text: str, partition: bytes = b"p" * 32, prompt: bytes = b"") -> CacheKey:
    return CacheKey(b"exact", partition, text, prompt or text.encode())


Make = Callable[..., NearCache]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[NearCache] = []

    def build(load: Callable[[], Embedder | None] = HashEmbedder, **options: object) -> NearCache:
        values = {"max_entries": 100, "max_bytes": 1 << 20, "ttl_s": 60.0, "embed_timeout_s": LIMIT_S} | options
        cache = NearCache(load, **values)  # type: ignore[arg-type]
        cache.start()
        made.append(cache)
        return cache

    yield build
    for cache in made:
        await asyncio.to_thread(cache.close)


async def settled(cache: NearCache) -> NearCache:
    assert await asyncio.to_thread(cache.settled.wait, LIMIT_S)
    return cache


async def test_what_was_stored_is_found(make: Make) -> None:
    cache = await settled(make())
    assert cache.embedder_id == HashEmbedder.identity
    assert await cache.store(key("How do I fix a flat tire?"), b"answer", LIMIT_S)
    found = await cache.lookup(key("How do I fix a flat tire"), 0.9, LIMIT_S)
    assert found.result == "hit"
    assert found.hit is not None
    assert (found.hit.answer, round(found.hit.score, 3)) == (b"answer", 1.0)
    assert found.hit.text == "How do I fix a flat tire?"
    assert found.hit.age_s < LIMIT_S
    other = key("How do I fix a flat tire", b"q" * 32)
    assert (await cache.lookup(other, 0.0, LIMIT_S)).result == "miss", "another partition"
    assert (await cache.lookup(key("Who wrote Hamlet and why"), 0.9, LIMIT_S)).result == "miss"
    assert await cache.lookup(key("How do I fix a flat tire", b""), 0.0, LIMIT_S) == SKIPPED
    assert not await cache.store(key("anything", b""), b"answer", LIMIT_S)
    assert cache.entries == 1


async def test_guards_stand_before_a_hit(make: Make) -> None:
    cache = await settled(make())
    await cache.store(key("Which of the foods here do contain gluten 12"), b"answer", LIMIT_S)
    asked = key("Which of the foods here do contain gluten 13")
    outcome = await cache.lookup(asked, 0.5, LIMIT_S)
    assert outcome.result == "guarded"
    assert [candidate.guard for candidate in outcome.candidates] == ["numbers"]


async def test_the_same_text_rendered_otherwise_is_no_hit(make: Make) -> None:
    cache = await settled(make())
    await cache.store(key("hello there", prompt=b"1"), b"answer", LIMIT_S)
    assert (await cache.lookup(key("hello there", prompt=b"1"), 0.9, LIMIT_S)).result == "hit"
    assert (await cache.lookup(key("hello there", prompt=b"2"), 0.9, LIMIT_S)).result == "guarded"


def number(value: float) -> float:
    """-1 for NaN, which equals nothing."""
    return -1 if math.isnan(value) else round(value, 3)


async def test_candidates_tell_what_became_of_each(make: Make) -> None:
    """Words of a question that others share make cosines: of 20 words 19, 18 and 17 are .95, .9 and .85."""
    judged: list[str] = []

    def judge(asked: str, remembered: str, cosine: float, rules: Rules) -> Verdict:
        judged.append(remembered)
        if cosine / 2 < rules.threshold:
            return Verdict(False, "verifier", cosine / 2)
        return Verdict("x1" not in remembered, "numbers" if "x1" in remembered else "", cosine / 2)

    cache = await settled(make(judge=judge))
    judged.clear()
    rules = Rules(threshold=0.1)
    words = [f"w{i}" for i in range(20)]

    def remembered(*others: str) -> CacheKey:
        return key(" ".join([*words[len(others) :], *others]))

    texts = [remembered(*(f"x{j}" for j in range(i, 2 * i))) for i in (1, 2, 3, 6)]
    for at, each in enumerate(texts):
        origin = Origin(bytes([at]) * 16, "", "", "", "", "", 1, int(1e15))
        assert await cache.store(each, str(at).encode(), LIMIT_S, origin)
    asked = key(" ".join(words))
    outcome = await cache.lookup(asked, 0.89, LIMIT_S, rules=rules)
    assert outcome.result == "hit"
    assert outcome.hit is not None
    assert (outcome.hit.answer, outcome.hit.purge_id, round(outcome.hit.verifier, 3)) == (b"1", "01" * 16, 0.45)
    told = [
        (round(c.similarity, 2), c.text, c.guard, number(c.verifier), c.served, c.purge_id)
        for c in outcome.candidates[:2]
    ]
    assert told == [
        (0.95, texts[0].text, "numbers", -1, False, "00" * 16),
        (0.9, texts[1].text, "", 0.45, True, "01" * 16),
    ]
    assert [c.text for c in outcome.candidates] == [t.text for t in texts[:3]], "down to .84, not to .7"
    assert (outcome.candidates[2].guard, number(outcome.candidates[2].verifier)) == ("", -1), "not judged"
    assert judged == [t.text for t in texts[:2]]
    explained = await cache.lookup(asked, 0.89, LIMIT_S, rules=rules, explain=True)
    assert explained.hit == outcome.hit._replace(age_s=explained.hit.age_s if explained.hit else 0.0)
    assert [number(c.verifier) for c in explained.candidates] == [-1, 0.45, 0.425]
    assert [c.served for c in explained.candidates] == [False, True, False], "what is below tau never serves"
    strict = await cache.lookup(asked, 0.97, LIMIT_S, explain=True)
    assert (strict.result, [c.text for c in strict.candidates]) == ("miss", [texts[0].text])
    sure = await cache.lookup(asked, 0.89, LIMIT_S, rules=Rules(threshold=0.99))
    assert sure.result == "guarded"
    assert [(c.guard, number(c.verifier)) for c in sure.candidates[:2]] == [("verifier", 0.475), ("verifier", 0.45)]


async def test_a_request_may_want_younger_answers(make: Make) -> None:
    cache = await settled(make())
    at = int(1000 * (time.time() + 20))
    origin = Origin(b"i" * 16, "", "", "", "", "", 1, at)
    assert await cache.store(key("hello there"), b"answer", LIMIT_S, origin)
    assert (await cache.lookup(key("hello there"), 0.9, LIMIT_S, max_age_s=1e6)).result == "hit"


@pytest.mark.parametrize("tau", [-0.1, 1.1, math.nan, math.inf])
async def test_tau_out_of_range_is_an_error(make: Make, tau: float) -> None:
    cache = await settled(make())
    with pytest.raises(InvalidArgument, match="tau"):
        await cache.lookup(key("hello"), tau, LIMIT_S)


async def test_a_slow_embedder_costs_only_its_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "HUNG_S", 0.0)
    gate = Gate()
    cache = await settled(make(lambda: gate, embed_timeout_s=0.05))
    assert (await cache.lookup(key("slow one"), 0.9, LIMIT_S)).result == "timeout"
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    assert await cache.lookup(key("any"), 0.9, LIMIT_S) == SKIPPED, "while it hangs nobody waits for it"
    assert await cache.embed("any", LIMIT_S) is None
    gate.open.set()


async def test_a_known_vector_is_searched_while_the_embedder_hangs(make: Make) -> None:
    gate = Gate()
    cache = await settled(make(lambda: gate))
    assert await cache.store(key("hello there"), b"answer", LIMIT_S)
    waiting = asyncio.create_task(cache.embed("slow one", LIMIT_S))
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    assert (await cache.lookup(key("hello there"), 0.9, LIMIT_S)).result == "hit"
    gate.open.set()
    assert await waiting is not None


async def test_a_busy_index_costs_only_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = await settled(make(max_queue=2))
    assert await cache.embed("hello", LIMIT_S) is not None
    entered, release = threading.Event(), threading.Event()

    def hang(index: object) -> str:
        entered.set()
        assert release.wait(LIMIT_S)
        return "done"

    busy = asyncio.create_task(cache.bulk(hang))
    assert await asyncio.to_thread(entered.wait, LIMIT_S)
    assert (await cache.lookup(key("hello"), 0.9, 0.01)).result == "timeout"
    waiting = [asyncio.create_task(cache.lookup(key("hello"), 0.9, LIMIT_S)) for _ in range(3)]
    done, pending = await asyncio.wait(waiting, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {SKIPPED}, "the queue is full"
    monkeypatch.setattr(nearcache, "STUCK_S", 0.0)
    assert await cache.lookup(key("hello"), 0.9, LIMIT_S) == SKIPPED, "it hangs"
    release.set()
    assert await busy == "done"
    assert {(await task).result for task in pending} == {"miss"}


async def test_a_failing_embedder_costs_one_answer(make: Make) -> None:
    cache = await settled(make(Gate))
    assert (await cache.lookup(key("fail now"), 0.9, LIMIT_S)).result == "skipped"
    assert not await cache.store(key("fail now"), b"a", LIMIT_S)
    assert (await cache.lookup(key("fine"), 0.9, LIMIT_S)).result == "miss"


async def test_a_judge_that_fails_costs_one_answer(make: Make) -> None:
    def judge(*_: object) -> Verdict:
        raise RuntimeError("no verdict")

    cache = await settled(make(judge=judge))
    await cache.store(key("hello there"), b"a", LIMIT_S)
    assert await cache.lookup(key("there hello"), 0.9, LIMIT_S) == SKIPPED
    assert (await cache.lookup(key("hello there"), 0.9, LIMIT_S)).result == "hit"


async def test_answers_that_memory_let_go_are_fetched(make: Make) -> None:
    cache = await settled(make(max_bytes=14_500, fetchable=True))
    replies: dict[str, bytes | None] = {"hello there": b"fetched", "who knows it": None, "gone for good": b""}

    async def fetch(entry: Entry, timeout_s: float) -> bytes | None:
        assert timeout_s > 0
        return replies[entry.text]

    cache.fetch = fetch
    for at, text in enumerate([*replies, "the last one"]):
        origin = Origin(bytes([at]) * 16, "", "", "", "", "", 1, int(1e15))
        assert await cache.store(key(text), b"x" * 3000, LIMIT_S, origin)
    outcome = await cache.lookup(key("hello there"), 0.9, LIMIT_S)
    assert outcome.result == "hit"
    assert outcome.hit is not None
    assert outcome.hit.answer == b"fetched"
    away = await cache.lookup(key("who knows it"), 0.9, LIMIT_S)
    assert (away.result, away.hit, [c.served for c in away.candidates]) == ("timeout", None, [False])
    assert (await cache.lookup(key("gone for good"), 0.9, LIMIT_S)).result == "miss"
    assert await cache.bulk(lambda index: index.find(b"\2" * 16)) is None, "its entry went too"
    assert await cache.bulk(lambda index: index.find(b"\1" * 16)) is not None
    held = await cache.lookup(key("the last one"), 0.9, LIMIT_S)
    assert held.hit is not None
    assert held.hit.answer == b"x" * 3000


async def test_what_is_stored_is_told(make: Make) -> None:
    cache = await settled(make())
    told = []

    async def publish(key: CacheKey, vector: Vector, embedder: str, origin: Origin) -> None:
        told.append((key.text, embedder, origin.entry_id, float(np.linalg.norm(vector))))

    cache.publish = publish
    assert await cache.store(key("hello there"), b"a", LIMIT_S)
    assert told == []
    origin = Origin(b"i" * 16, "tag", "exact", "t", "m", "f", 1, int(1e15))
    assert await cache.store(key("hello there"), b"a", LIMIT_S, origin)
    assert told == [("hello there", "hash-1", b"i" * 16, pytest.approx(1.0))]
    assert await cache.purge("tenant", "t")
    assert (await cache.lookup(key("hello there"), 0.9, LIMIT_S)).result == "miss"


async def test_a_large_partition_gets_its_index(make: Make) -> None:
    cache = await settled(make(max_entries=2000, max_bytes=1 << 24, big_rows=64))
    for i in range(80):
        assert await cache.store(key(f"question number{i} about subject{i}"), str(i).encode(), LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while not cache.building.built:
            await asyncio.sleep(0.01)
    for i in range(80):
        outcome = await cache.lookup(key(f"question number{i} about subject{i}"), 0.9, LIMIT_S)
        assert outcome.hit is not None
        assert outcome.hit.answer == str(i).encode()
    assert cache.indexed == 1


async def test_an_embedder_that_cannot_load_turns_the_cache_off(make: Make) -> None:
    def load() -> Embedder | None:
        raise FailedPrecondition("no model here")

    cache = await settled(make(load))
    assert cache.state == "failed"
    assert await cache.lookup(key("x"), 0.9, LIMIT_S) == SKIPPED
    assert not await cache.store(key("x"), b"a", LIMIT_S)


async def test_close_ends_the_threads(make: Make) -> None:
    cache = await settled(make())
    await asyncio.to_thread(cache.close)
    assert not cache._thread.is_alive()
    assert cache._batcher is not None
    assert not cache._batcher.alive
    assert await cache.lookup(key("x"), 0.9, LIMIT_S) == SKIPPED
    assert await cache.bulk(lambda index: 1) is None


async def test_close_while_loading(make: Make) -> None:
    gate = threading.Event()

    def load() -> Embedder | None:
        gate.wait(LIMIT_S)
        return HashEmbedder()

    cache = make(load)
    assert await cache.lookup(key("x"), 0.9, LIMIT_S) == SKIPPED
    closing = asyncio.create_task(asyncio.to_thread(cache.close))
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert await asyncio.to_thread(cache.settled.wait, LIMIT_S)
    cache._thread.join(LIMIT_S)
    assert not cache._thread.is_alive()
