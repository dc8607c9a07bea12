"""Embedders: vectors that mean something, whole texts only, batches that change nothing, a breaker around it all."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvmesh.errors import FailedPrecondition
from router_helpers import FakeClock
from services.router.near import batching
from services.router.near.batching import COOL_S, EMBED_TIMEOUT_S, FAILURES_TO_OPEN, HOPELESS, Batcher, Breaker
from services.router.near.embedder import MAX_TOKENS, Embedder, HashEmbedder, MiniLmEmbedder, _groups, load_embedder
from services.router.near.search import Vector

LIMIT_S = 60.0


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
    assert minilm.embed("word " * 254) is not None
    assert minilm.embed("word " * 255) is None, "cut texts would look alike"
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


def test_long_texts_are_told_apart_by_their_last_word(minilm: MiniLmEmbedder) -> None:
    base = "the quick brown fox jumps over the lazy dog and runs into the deep dark forest where it hides " * 12
    words = base.split()[:200]
    one, two = " ".join([*words, "apple"]), " ".join([*words, "submarine"])
    assert 128 < minilm.tokens(one) <= MAX_TOKENS
    a, b = minilm.embed_batch([one, two])
    assert a is not None
    assert b is not None
    assert float(np.abs(a - b).max()) > 1e-3, "the tail of a text is part of its vector"
    longer = " ".join(base.split() * 2)
    assert minilm.tokens(longer) == 0
    assert minilm.embed_batch([longer, one])[0] is None
    assert minilm.tokens("x" * 1_000_000) == 0, "a megabyte is not even tokenized"


def test_a_batch_gives_the_vectors_of_its_texts_alone(minilm: MiniLmEmbedder) -> None:
    texts = [
        "What is the capital of France?",
        "a",
        "",
        "Explain the difference between a list and a tuple in Python and when to use each of them in practice.",
        "Is it safe to eat raw fish?",
        "word " * 300,
        "Who wrote Hamlet?",
        "naïve café, 東京 — 3.14!",
        "word " * 200,
    ]
    together = minilm.embed_batch(texts)
    for text, vector in zip(texts, together, strict=True):
        alone = minilm.embed(text)
        assert (vector is None) == (alone is None)
        if vector is not None and alone is not None:
            assert float(np.abs(vector - alone).max()) < 1e-3
            assert float(vector @ alone) > 1 - 1e-5
    assert [i for i, vector in enumerate(together) if vector is None] == [2, 5]


def test_texts_share_a_run_only_with_their_like() -> None:
    lengths = [9, 0, 10, 200, 9, 11, 190, 40]
    groups = list(_groups(lengths))
    assert sorted(at for group in groups for at in group) == [0, 2, 3, 4, 5, 6, 7]
    for group in groups:
        own = [lengths[at] for at in group]
        assert max(own) * len(own) <= 1.25 * sum(own)
    assert sorted(map(len, groups)) == [1, 2, 4]
    assert list(_groups([0, 0])) == []


def test_the_identity_names_the_files(tmp_path: Path, minilm: MiniLmEmbedder) -> None:
    from services.router.near.embedder import MAX_TOKENIZER_BYTES, TOKENIZER_FILES, _find

    assert minilm.identity.startswith("minilm-")
    assert MiniLmEmbedder().identity == minilm.identity
    other = tmp_path / "tokenizer.json"
    document = json.loads(_find(TOKENIZER_FILES, MAX_TOKENIZER_BYTES).read_text())
    other.write_text(json.dumps(document, indent=3))
    assert MiniLmEmbedder(tokenizer=other).identity != minilm.identity


# --- batches --------------------------------------------------------------------------------------------------------


class Gate(HashEmbedder):
    """Waits to be let through for texts that start with "slow", fails for "fail", gives nonsense for others."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.batches: list[list[str]] = []

    def embed_batch(self, texts: Sequence[str]) -> list[Vector | None]:
        self.batches.append(list(texts))
        return super().embed_batch(texts)

    def embed(self, text: str) -> Vector | None:
        if text.startswith("slow"):
            self.entered.set()
            assert self.open.wait(LIMIT_S)
        if text.startswith("fail"):
            raise RuntimeError("no vector today")
        if text.startswith("nan"):
            return np.full(self.dim, np.nan, dtype=np.float32)
        if text.startswith("zero"):
            return np.zeros(self.dim, dtype=np.float32)
        if text.startswith("short"):
            return np.ones(1, dtype=np.float32)
        return super().embed(text)


Make = Callable[..., Batcher]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Batcher] = []

    def build(embedder: Embedder, **options: int) -> Batcher:
        batcher = Batcher(embedder, **options)
        batcher.start()
        made.append(batcher)
        return batcher

    yield build
    for batcher in made:
        if isinstance(batcher.embedder, Gate):
            batcher.embedder.open.set()
        await asyncio.to_thread(batcher.close, LIMIT_S)
        assert not batcher.alive


async def test_texts_that_wait_together_are_embedded_together(make: Make) -> None:
    gate = Gate()
    batcher = make(gate)
    first = asyncio.create_task(batcher.embed("slow first", LIMIT_S))
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    texts = [f"text number {i % 5}" for i in range(10)]
    others = [asyncio.create_task(batcher.embed(text, LIMIT_S)) for text in texts]
    await asyncio.sleep(0)
    gate.open.set()
    vectors = await asyncio.gather(*others)
    assert await first is not None
    assert gate.batches == [["slow first"], [f"text number {i}" for i in range(5)]], "each once"
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(vector, HashEmbedder().embed(text))


async def test_recent_vectors_are_kept_and_bounded(make: Make) -> None:
    gate = Gate()
    batcher = make(gate, recent=2)
    for text in ("one", "two", "one", "three", "one", "two"):
        assert await batcher.embed(text, LIMIT_S) is not None
    assert [text for batch in gate.batches for text in batch] == ["one", "two", "three", "two"]
    assert await batcher.embed("", LIMIT_S) is None
    assert await batcher.embed("x" * 1_000_000, LIMIT_S) is None
    assert len(gate.batches) == 4, "what can have no vector is not asked for"


@pytest.mark.parametrize("text", ["nan", "zero", "short", "fail"])
async def test_a_bad_vector_costs_one_text(make: Make, text: str) -> None:
    gate = Gate()
    batcher = make(gate)
    first = asyncio.create_task(batcher.embed("slow first", LIMIT_S))
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    asked = [asyncio.create_task(batcher.embed(each, LIMIT_S)) for each in ("good one", f"{text} text", "good two")]
    await asyncio.sleep(0)
    gate.open.set()
    vectors = await asyncio.gather(first, *asked)
    assert [vector is None for vector in vectors] == [False, False, True, False]
    assert await batcher.embed("good three", LIMIT_S) is not None


async def test_the_queue_is_bounded_and_leavers_cost_nothing(make: Make) -> None:
    gate = Gate()
    batcher = make(gate, max_queue=2)
    first = asyncio.create_task(batcher.embed("slow first", LIMIT_S))
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    with pytest.raises(TimeoutError):
        await batcher.embed("leaves", 0.01)
    other = asyncio.create_task(batcher.embed("stays", LIMIT_S))
    await asyncio.sleep(0)
    assert await batcher.embed("too many", LIMIT_S) is None
    gate.open.set()
    assert await first is not None
    assert await other is not None
    assert gate.batches == [["slow first"], ["stays"]]


async def test_what_would_come_too_late_is_not_tried(make: Make) -> None:
    gate = Gate()
    batcher = make(gate)
    assert await batcher.embed("measured", LIMIT_S) is not None
    batcher._rate_s = 1.0
    batcher._measured = time.monotonic() + 1000
    assert await batcher.embed("some text", 0.5) is None
    assert gate.batches == [["measured"]]
    # A slow minute is not believed for ever: after a while it is measured again, at nobody's cost.
    batcher._measured = 0.0
    for _ in range(10_000):
        if await batcher.embed("some text", 0.5) is not None:
            break
        await asyncio.sleep(0.001)
        batcher._measured = 0.0
    else:
        pytest.fail("never tried again")
    assert [batching.PROBE_TEXT] in gate.batches


# --- the breaker ----------------------------------------------------------------------------------------------------


def failing() -> None:
    raise RuntimeError("no")


def test_the_breaker_opens_after_failures_and_closes_after_a_probe() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)

    def fail() -> None:
        with pytest.raises(RuntimeError):
            breaker.run(failing)

    for _ in range(FAILURES_TO_OPEN - 1):
        fail()
    breaker.run(lambda: None)
    for _ in range(FAILURES_TO_OPEN - 1):
        fail()
        assert (breaker.state, breaker.wait_s()) == ("closed", None)
    fail()
    assert (breaker.state, breaker.wait_s()) == ("open", COOL_S)
    clock.advance(COOL_S)
    assert (breaker.state, breaker.wait_s()) == ("half_open", 0.0)
    fail()
    assert (breaker.state, breaker.wait_s()) == ("open", 2 * COOL_S), "longer each time"
    clock.advance(2 * COOL_S)
    breaker.run(lambda: None)
    assert breaker.state == "closed"


def test_the_breaker_is_open_while_the_model_hangs() -> None:
    clock = FakeClock()
    breaker = Breaker(clock)
    states = []

    def hang() -> None:
        states.append(breaker.state)
        clock.advance(batching.HUNG_S + 0.01)
        states.append(breaker.state)

    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.run(hang)
        assert breaker.state == "closed", "it may have been the machine"
    breaker.run(hang)
    assert states == ["closed", "open"] * FAILURES_TO_OPEN
    assert breaker.state == "open", "but not each time"
    clock.advance(COOL_S)
    breaker.run(lambda: clock.advance(batching.HUNG_S / 2))
    assert breaker.state == "closed"


async def test_an_open_breaker_lets_nobody_wait_and_heals_by_itself(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "HUNG_S", 0.0)
    gate = Gate()
    batcher = make(gate)
    with pytest.raises(TimeoutError):
        await batcher.embed("slow one", 0.05)
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    while batcher.breaker.state != "open":
        await asyncio.sleep(0.001)
    assert await batcher.embed("any", LIMIT_S) is None, "at once"
    monkeypatch.setattr(batching, "HUNG_S", LIMIT_S)
    monkeypatch.setattr(batching, "COOL_S", 0.01)
    gate.open.set()
    async with asyncio.timeout(LIMIT_S):
        while await batcher.embed("any", 1.0) is None:
            await asyncio.sleep(0.001)


def test_one_hung_run_is_soon_forgotten() -> None:
    batcher = Batcher(HashEmbedder())
    for _ in range(20):
        batcher._learn(0.005, 5)
    batcher._learn(1.0, 5)
    assert batcher._rate_s * 5 > HOPELESS * EMBED_TIMEOUT_S
    for _ in range(3):
        batcher._learn(0.005, 5)
    assert batcher._rate_s * 5 < HOPELESS * EMBED_TIMEOUT_S
