"""The semantic cache: one thread that embeds, searches and remembers, behind a bounded queue.

The event loop never computes a vector and never searches. A look-up waits for its own short limit only; when the
thread is busy for long, its queue is full, or the embedder is missing, the look-up is a miss at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router.cache.fingerprint import CacheKey
from services.router.match.guards import refusal
from services.router.near.embedder import Embedder, Vector
from services.router.near.index import Entry, NearIndex

log = logging.getLogger(__name__)

MAX_QUEUE = 64
STUCK_S = 0.5
EXPIRE_EVERY_S = 60.0
CLOSE_TIMEOUT_S = 2.0
RECENT_VECTORS = 1024


class Hit(NamedTuple):
    """A remembered answer and the cosine of its question with the one asked."""

    score: float
    answer: bytes


class Found(NamedTuple):
    """Outcome of a look-up: `result` is "hit", "miss", "guarded", "timeout" or "skipped"."""

    result: str
    hit: Hit | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """Work for the thread; worthless after `expires` (monotonic seconds)."""

    work: Callable[[Embedder, NearIndex], object]
    expires: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[object] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class NearCache:
    """Answers by similarity of the last user text, within one partition."""

    def __init__(
        self,
        load: Callable[[], Embedder | None],
        *,
        max_entries: int,
        max_bytes: int,
        ttl_s: float,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        """`load` makes the embedder; it runs on the thread, so it may take its time and may fail."""
        self._load = load
        self._bounds = (max_entries, max_bytes, ttl_s)
        self._queue: queue.Queue[_Job | None] = queue.Queue(max_queue)
        self._thread = threading.Thread(target=self._run, name="kvmesh-embedder", daemon=True)
        self._busy_since: float | None = None
        self._vectors: dict[str, Vector | None] = {}
        self.state = "new"
        """"new", "loading", "ready", "failed" or "closed"."""
        self.entries = 0
        self.settled = threading.Event()
        """Set once the embedder has loaded or failed to."""

    def start(self) -> None:
        """Load the embedder in the background and begin to work."""
        self.state = "loading"
        self._thread.start()

    async def lookup(self, key: CacheKey, tau: float, timeout_s: float) -> Found:
        """The best remembered answer with cosine ≥ `tau` that no guard refuses, within `timeout_s` seconds."""
        outcome = await self._submit(lambda embedder, index: self._search(embedder, index, key, tau), timeout_s)
        return outcome if isinstance(outcome, Found) else Found("timeout" if outcome is TimeoutError else "skipped")

    async def store(self, key: CacheKey, answer: bytes, timeout_s: float) -> bool:
        """Remember an answer; False when it was not possible within `timeout_s` seconds."""
        return await self._submit(lambda embedder, index: self._add(embedder, index, key, answer), timeout_s) is True

    async def _submit(self, work: Callable[[Embedder, NearIndex], object], timeout_s: float) -> object:
        """The work's result, None when it was refused or failed, the class TimeoutError when it took too long."""
        now = time.monotonic()
        busy_since = self._busy_since
        if self.state != "ready" or timeout_s <= 0 or (busy_since is not None and now - busy_since > STUCK_S):
            return None
        job = _Job(work, now + timeout_s, asyncio.get_running_loop())
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                return await job.future
        except TimeoutError:
            return TimeoutError

    def close(self) -> None:
        """End the thread; one that hangs in the model is left behind (it is a daemon)."""
        if self.state in ("new", "closed"):
            self.state = "closed"
            return
        self.state = "closed"
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.debug("the embedder's queue is full at the end")
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            embedder = self._load()
            if embedder is not None:
                import faiss

                faiss.omp_set_num_threads(1)
                max_entries, max_bytes, ttl_s = self._bounds
                index = NearIndex(embedder.dim, max_entries=max_entries, max_bytes=max_bytes, ttl_s=ttl_s)
        except Exception as exc:
            log.warning("the semantic cache is off: %s", exc)
            embedder = None
        if self.state != "closed":
            self.state = "ready" if embedder is not None else "failed"
        self.settled.set()
        if embedder is None:
            return
        swept = time.monotonic()
        while self.state != "closed":
            try:
                job = self._queue.get(timeout=EXPIRE_EVERY_S)
            except queue.Empty:
                job = None
            now = time.monotonic()
            if now - swept > EXPIRE_EVERY_S:
                index.expire()
                swept, self.entries = now, len(index)
            if job is not None and job.expires > now:
                self._serve(job, embedder, index)

    def _serve(self, job: _Job, embedder: Embedder, index: NearIndex) -> None:
        self._busy_since = time.monotonic()
        result: object = None
        try:
            result = job.work(embedder, index)
        except Exception:
            log.warning("the semantic cache failed on one request", exc_info=True)
        self._busy_since = None
        self.entries = len(index)
        try:
            job.loop.call_soon_threadsafe(_resolve, job.future, result)
        except RuntimeError:
            log.debug("the event loop is gone")

    def _embed(self, embedder: Embedder, text: str) -> Vector | None:
        """The vector of a text; the look-up of a request is followed by its store, so recent ones are kept."""
        if text not in self._vectors:
            while len(self._vectors) >= RECENT_VECTORS:
                del self._vectors[next(iter(self._vectors))]
            self._vectors[text] = embedder.embed(text)
        return self._vectors[text]

    def _search(self, embedder: Embedder, index: NearIndex, key: CacheKey, tau: float) -> Found:
        vector = self._embed(embedder, key.text)
        if vector is None:
            return Found("skipped")
        result = "miss"
        for score, entry_id, entry in index.search(key.partition, vector, tau):
            if _same_question(key, entry):
                index.touch(entry_id)
                return Found("hit", Hit(score, entry.answer))
            result = "guarded"
        return Found(result)

    def _add(self, embedder: Embedder, index: NearIndex, key: CacheKey, answer: bytes) -> bool:
        vector = self._embed(embedder, key.text)
        return vector is not None and index.add(key.partition, vector, Entry(key.text, key.prompt, answer))


def _same_question(key: CacheKey, entry: Entry) -> bool:
    if key.text == entry.text:
        # The same text in other tokens was rendered differently: something else than the text is different.
        return key.prompt == entry.prompt
    return not refusal(key.text, entry.text)


def _resolve(future: asyncio.Future[object], result: object) -> None:
    if not future.done():
        future.set_result(result)
