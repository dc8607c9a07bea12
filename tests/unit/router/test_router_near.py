"""The semantic cache's parts: vectors that mean something, guards, the partitioned index, the thread around them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import FailedPrecondition
from near_pairs import DIFFERENT, SAME
from router_helpers import FakeClock
from services.router.cache.fingerprint import CacheKey
from services.router.match.guards import read, refusal
from services.router.near import nearcache
from services.router.near.embedder import Embedder, HashEmbedder, MiniLmEmbedder, Vector, load_embedder
from services.router.near.index import Entry, NearIndex
from services.router.near.nearcache import Found, NearCache

DIM = HashEmbedder.dim


@pytest.fixture(scope="module")
def minilm() -> MiniLmEmbedder:
    return MiniLmEmbedder()


def cosine(embedder: Embedder, a: str, b: str) -> float:
    one, two = embedder.embed(a), embedder.embed(b)
    assert one is not None
    assert two is not None
    return float(one @ two)


# --- embedder ---------------------------------------------------------------------------------------------------


def test_minilm_agrees_with_the_fp32_reference(minilm: MiniLmEmbedder) -> None:
    golden = json.loads((Path(__file__).parent / "minilm_golden.json").read_text())
    assert len(golden) >= 5
    for text, encoded in golden.items():
        reference = np.frombuffer(base64.b64decode(encoded), dtype="<f2").astype(np.float32)
        vector = minilm.embed(text)
        assert vector is not None
        assert vector.shape == (minilm.dim,)
        assert vector.dtype == np.float32
        assert abs(float(np.linalg.norm(vector)) - 1.0) < 1e-5
        # int8 weights against fp32: the direction stays.
        assert float(vector @ reference) > 0.97, text


def test_minilm_tells_paraphrases_from_strangers(minilm: MiniLmEmbedder) -> None:
    assert cosine(minilm, "What is the capital of France?", "Tell me the capital of France.") > 0.9
    assert cosine(minilm, "How do I fix a flat tire?", "How do I repair a flat tire?") > 0.9
    assert cosine(minilm, "What is the boiling point of water?", "At what temperature does water boil?") > 0.8
    assert cosine(minilm, "How do I fix a flat tire?", "A recipe for chocolate cake") < 0.3
    assert cosine(minilm, "What is the capital of France?", "How do I sort a list in Python?") < 0.3


def test_texts_beyond_the_window_have_no_vector(minilm: MiniLmEmbedder) -> None:
    assert minilm.embed("word " * 126) is not None
    assert minilm.embed("word " * 127) is None, "cut texts would look alike"
    assert minilm.embed("") is None
    assert minilm.embed("   ") is None
    assert HashEmbedder().embed("...") is None


def test_the_embedder_does_not_report_to_anybody(tmp_path: Path) -> None:
    """onnxruntime's uploader begins with a session file in the temporary folder. A fresh process, as it is global."""
    code = "from services.router.near.embedder import MiniLmEmbedder; MiniLmEmbedder()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], env={**environment, "PYTHONPATH": path}, check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_embedders_by_name(tmp_path: Path) -> None:
    assert load_embedder("none") is None
    hashed = load_embedder("hash")
    assert hashed is not None
    assert hashed.name == "hash"
    with pytest.raises(FailedPrecondition):
        load_embedder("nope")
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(FailedPrecondition):
        MiniLmEmbedder(model=broken)


# --- guards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), SAME)
def test_paraphrases_pass(a: str, b: str) -> None:
    assert refusal(a, b) == ""
    assert refusal(b, a) == ""


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_near_misses_are_refused(a: str, b: str) -> None:
    assert refusal(a, b) != ""
    assert refusal(b, a) != ""


def test_false_hits_on_the_labelled_set(minilm: MiniLmEmbedder) -> None:
    """Prints the rates with and without guards; with them no pair of the set is a false hit at any threshold."""
    lines = []
    for tau in (0.80, 0.85, 0.90, 0.95):
        near = [(a, b) for a, b in DIFFERENT if cosine(minilm, a, b) >= tau]
        false = [pair for pair in near if not refusal(*pair)]
        true = [pair for pair in SAME if cosine(minilm, *pair) >= tau and not refusal(*pair)]
        lines.append(
            f"tau {tau:.2f}: false hits {len(false)}/{len(DIFFERENT)} (vectors alone {len(near)}), "
            f"hits {len(true)}/{len(SAME)}"
        )
        assert not false
        if tau == 0.85:
            assert len(near) >= 20, "the set must be one that vectors alone get wrong"
            assert len(true) == len(SAME)
        if tau == 0.95:
            assert len(true) >= len(SAME) // 2, "the default threshold still finds paraphrases"
    print("\n".join(lines))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_guards_survive_any_text_and_do_not_depend_on_order(a: str, b: str) -> None:
    assert (refusal(a, b) == "") == (refusal(b, a) == "")
    assert refusal(a, a) == ""


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon", "kappa", "lambda", "sigma"]),
        min_size=2,
        max_size=6,
    ),
    st.integers(0, 5),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_another_number_is_always_refused(words: list[str], at: int, one: int, two: int) -> None:
    def with_number(value: int) -> str:
        index = at % len(words)
        return " ".join([*words[:index], str(value), *words[index:]])

    assert (refusal(with_number(one), with_number(two)) == "") == (one == two)


def test_numbers_are_read_as_numbers() -> None:
    assert read("1,000 and 2.50 and three and 007").numbers == ["1000", "2.5", "3", "7"]
    assert read("it is -5, or 10-5").numbers == ["-5", "10", "5"]
    assert refusal("Pay 1,000 dollars", "Pay 1000 dollars") == ""


# --- index ------------------------------------------------------------------------------------------------------


def unit(*values: float) -> Vector:
    vector = np.zeros(4, dtype=np.float32)
    vector[: len(values)] = values
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def index(**options: object) -> NearIndex:
    values = {"max_entries": 100, "max_bytes": 1 << 20, "ttl_s": 60.0} | options
    return NearIndex(4, **values)  # type: ignore[arg-type]


def texts(near: NearIndex, partition: bytes, vector: Vector, tau: float = 0.9) -> list[str]:
    return [entry.text for _, _, entry in near.search(partition, vector, tau)]


def test_search_is_by_cosine_within_a_partition() -> None:
    near = index()
    near.add(b"p", unit(1), Entry("exact", b"", b""))
    near.add(b"p", unit(1, 0.2), Entry("close", b"", b""))
    near.add(b"p", unit(0, 1), Entry("far", b"", b""))
    near.add(b"q", unit(1), Entry("foreign", b"", b""))
    assert texts(near, b"p", unit(1)) == ["exact", "close"]
    assert texts(near, b"p", unit(1), tau=0.999) == ["exact"]
    assert texts(near, b"none", unit(1), tau=-1.0) == []


def test_entries_grow_old_and_are_replaced() -> None:
    clock = FakeClock()
    near = index(clock=clock)
    near.add(b"p", unit(1), Entry("a", b"", b"old"))
    near.add(b"p", unit(1), Entry("a", b"", b"new"))
    assert len(near) == 1
    assert [e.answer for _, _, e in near.search(b"p", unit(1), 0.9)] == [b"new"]
    clock.advance(60.0)
    assert texts(near, b"p", unit(1)) == []
    assert near.expire() == 1
    assert (len(near), near.partitions, near.bytes) == (0, 0, 0)


def test_the_least_recently_used_leave_first() -> None:
    near = index(max_entries=3)
    for name in "abc":
        near.add(b"p", unit(1), Entry(name, b"", b""))
    entry_id = next(i for _, i, e in near.search(b"p", unit(1), 0.9) if e.text == "a")
    near.touch(entry_id)
    near.add(b"p", unit(1), Entry("d", b"", b""))
    assert sorted(texts(near, b"p", unit(1))) == ["a", "c", "d"]


def test_bytes_are_bounded() -> None:
    near = index(max_bytes=20_000)
    assert not near.add(b"p", unit(1), Entry("huge", b"", b"x" * 20_000))
    for i in range(100):
        near.add(b"p", unit(1), Entry(str(i), b"", b"x" * 4000))
        assert near.bytes <= 20_000
    assert len(near) == 4
    near.check_integrity()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add", "touch", "expire"]),
            st.sampled_from([b"p", b"q", b"r"]),
            st.integers(0, 30),
            st.integers(0, 3000),
        ),
        max_size=120,
    )
)
def test_index_and_entries_agree_after_anything(operations: list[tuple[str, bytes, int, int]]) -> None:
    clock = FakeClock()
    near = index(max_entries=10, max_bytes=30_000, clock=clock)
    rng = np.random.default_rng(0)
    for action, partition, number, size in operations:
        clock.advance(1.0)
        if action == "add":
            vector = rng.normal(size=4).astype(np.float32)
            near.add(partition, unit(*vector), Entry(str(number), b"", b"x" * size))
        elif action == "touch":
            near.touch(number)
        else:
            near.expire()
        near.check_integrity()
        for _, _, entry in near.search(partition, unit(1), -1.0):
            assert entry.text in {k.entry.text for k in near._kept.values() if k.partition == partition}


# --- the thread -------------------------------------------------------------------------------------------------


class Gate(HashEmbedder):
    """An embedder that waits to be let through for texts that start with "slow"."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def embed(self, text: str) -> Vector | None:
        if text.startswith("slow"):
            self.entered.set()
            assert self.open.wait(30)
        if text.startswith("fail"):
            raise RuntimeError("no vector today")
        return super().embed(text)


def key(text: str, partition: bytes = b"p", prompt: bytes = b"") -> CacheKey:
    return CacheKey(b"exact", partition, text, prompt or text.encode())


Make = Callable[..., NearCache]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[NearCache] = []

    def build(load: Callable[[], Embedder | None] = HashEmbedder, **options: object) -> NearCache:
        values = {"max_entries": 100, "max_bytes": 1 << 20, "ttl_s": 60.0} | options
        cache = NearCache(load, **values)  # type: ignore[arg-type]
        cache.start()
        made.append(cache)
        return cache

    yield build
    for cache in made:
        await asyncio.to_thread(cache.close)


async def settled(cache: NearCache) -> NearCache:
    assert await asyncio.to_thread(cache.settled.wait, 10)
    return cache


async def test_what_was_stored_is_found(make: Make) -> None:
    cache = await settled(make())
    assert await cache.store(key("How do I fix a flat tire?"), b"answer", 5)
    found = await cache.lookup(key("How do I fix a flat tire"), 0.9, 5)
    assert found.result == "hit"
    assert found.hit is not None
    assert (found.hit.answer, round(found.hit.score, 3)) == (b"answer", 1.0)
    assert (await cache.lookup(key("How do I fix a flat tire", b"q"), 0.0, 5)).result == "miss", "another partition"
    assert (await cache.lookup(key("Who wrote Hamlet and why"), 0.9, 5)).result == "miss"
    assert cache.entries == 1


async def test_guards_stand_before_a_hit(make: Make) -> None:
    cache = await settled(make())
    await cache.store(key("Which of the foods here do contain gluten 12"), b"answer", 5)
    asked = key("Which of the foods here do contain gluten 13")
    assert (await cache.lookup(asked, 0.5, 5)).result == "guarded"


async def test_the_same_text_rendered_otherwise_is_no_hit(make: Make) -> None:
    cache = await settled(make())
    await cache.store(key("hello there", prompt=b"1"), b"answer", 5)
    assert (await cache.lookup(key("hello there", prompt=b"1"), 0.9, 5)).result == "hit"
    assert (await cache.lookup(key("hello there", prompt=b"2"), 0.9, 5)).result == "guarded"


async def test_a_slow_embedder_costs_only_its_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearcache, "STUCK_S", 0.0)
    gate = Gate()
    cache = await settled(make(lambda: gate))
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert (await cache.lookup(key("slow one"), 0.9, 0.05)).result == "timeout"
    assert loop.time() - started < 5.0
    assert await asyncio.to_thread(gate.entered.wait, 5)
    assert await cache.lookup(key("any"), 0.9, 30) == Found("skipped"), "while it hangs nobody waits for it"
    gate.open.set()


async def test_the_queue_is_bounded(make: Make) -> None:
    gate = Gate()
    cache = await settled(make(lambda: gate, max_queue=2))
    first = asyncio.create_task(cache.lookup(key("slow one"), 0.9, 30))
    assert await asyncio.to_thread(gate.entered.wait, 5)
    waiting = [asyncio.create_task(cache.lookup(key(f"text {i}"), 0.9, 30)) for i in range(5)]
    done, pending = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {Found("skipped")}
    assert len(pending) == 2
    gate.open.set()
    assert {(await task).result for task in [first, *pending]} == {"miss"}


async def test_a_failing_embedder_costs_one_answer(make: Make) -> None:
    cache = await settled(make(Gate))
    assert (await cache.lookup(key("fail now"), 0.9, 5)).result == "skipped"
    assert not await cache.store(key("fail now"), b"a", 5)
    assert (await cache.lookup(key("fine"), 0.9, 5)).result == "miss"


async def test_an_embedder_that_cannot_load_turns_the_cache_off(make: Make) -> None:
    def load() -> Embedder | None:
        raise FailedPrecondition("no model here")

    cache = await settled(make(load))
    assert cache.state == "failed"
    assert (await cache.lookup(key("x"), 0.9, 5)).result == "skipped"
    assert not await cache.store(key("x"), b"a", 5)


async def test_close_ends_the_thread(make: Make) -> None:
    cache = await settled(make())
    await asyncio.to_thread(cache.close)
    assert not cache._thread.is_alive()
    assert (await cache.lookup(key("x"), 0.9, 5)).result == "skipped"


async def test_close_while_loading(make: Make) -> None:
    gate = threading.Event()

    def load() -> Embedder | None:
        gate.wait(60)
        return HashEmbedder()

    cache = make(load)
    assert (await cache.lookup(key("x"), 0.9, 5)).result == "skipped"
    closing = asyncio.create_task(asyncio.to_thread(cache.close))
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert await asyncio.to_thread(cache.settled.wait, 10)
    cache._thread.join(60)
    assert not cache._thread.is_alive()
