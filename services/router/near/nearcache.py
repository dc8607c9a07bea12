"""The semantic cache: texts become vectors on one thread, another searches and remembers; both behind bounded queues.

The event loop never computes a vector and never searches. A look-up waits for its own short limit only; when a thread
is busy for long, its queue is full, or the embedder is missing, the look-up is a miss at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.router.cache.fingerprint import CacheKey
from services.router.match import DEFAULT as DEFAULT_RULES
from services.router.match import Rules, Verdict, judge
from services.router.near.arena import BIG_ROWS
from services.router.near.batching import EMBED_TIMEOUT_S, Batcher
from services.router.near.builder import CellsMaker
from services.router.near.building import IndexBuilding
from services.router.near.bulk import Embedded
from services.router.near.embedder import Embedder
from services.router.near.entries import Entry
from services.router.near.index import Near, NearIndex
from services.router.near.outcome import MAX_CANDIDATES, Candidate, Hit, NearOutcome, Origin, choose, floor
from services.router.near.search import Maker, Vector

__all__ = ["Candidate", "Hit", "NearCache", "NearOutcome", "Origin"]

log = logging.getLogger(__name__)

MAX_QUEUE = 64
STUCK_S = 0.5
EXPIRE_EVERY_S = 5.0
CLOSE_TIMEOUT_S = 2.0
BULK_TIMEOUT_S = 30.0
FULL_PAUSE_S = 0.005


Judge = Callable[[str, str, float, Rules], Verdict]
"""See `services.router.match.judge`."""

Fetch = Callable[[Entry, float], Awaitable[bytes | None]]
"""(entry, seconds) → its answer from Redis; b"" when Redis has none, None when Redis did not answer."""

Publish = Callable[[CacheKey, Vector, str, Origin], Awaitable[None]]
"""(key, vector, embedder's identity, origin): tell the other replicas of a new entry."""


@dataclass(slots=True, eq=False)
class _Job:
    """Work for the thread; worthless after `expires` (monotonic seconds)."""

    work: Callable[[NearIndex], object]
    expires: float
    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[object] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.loop is not None:
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
        embed_timeout_s: float = EMBED_TIMEOUT_S,
        big_rows: int = BIG_ROWS,
        judge: Judge = judge,
        fetchable: bool = False,
        maker: Callable[[], Maker] = CellsMaker,
    ) -> None:
        """`load` makes the embedder; it runs on the thread, so it may take its time and may fail.

        fetchable: answers can be fetched from Redis (`fetch` is set), so memory may let go of them. maker: makes the
        maker of indices for large partitions, on the thread too.
        """
        self._load = load
        self._judge = judge
        self._maker = maker
        self._embed_timeout_s = embed_timeout_s
        self._options = {
            "max_entries": max_entries,
            "max_bytes": max_bytes,
            "ttl_s": ttl_s,
            "big_rows": big_rows,
            "fetchable": fetchable,
        }
        # Replicas' bulk work waits elsewhere (`_bulk`), so this bounds who waits for an answer.
        self._queue: queue.Queue[_Job | None] = queue.Queue(max_queue)
        self._batcher: Batcher | None = None
        self.building = IndexBuilding(self._post)
        self._thread = threading.Thread(target=self._run, name="kvmesh-near", daemon=True)
        self._busy_since: float | None = None
        self.state = "new"
        """"new", "loading", "ready", "failed" or "closed"."""
        self.embedder_id = ""
        """Name and digest of what makes the vectors, once it has loaded."""
        self.entries = self.bytes = self.partitions = self.indexed = 0
        self.settled = threading.Event()
        """Set once the embedder has loaded or failed to."""
        self.fetch: Fetch | None = None
        self.publish: Publish | None = None

    def start(self) -> None:
        """Load the embedder in the background and begin to work."""
        self.state = "loading"
        self._thread.start()

    async def embed(self, text: str, timeout_s: float | None = None) -> Vector | None:
        """float32 (dim,) of length 1; None where the text has no vector, or none within `timeout_s` seconds."""
        try:
            return await self._embed(text, self._embed_timeout_s if timeout_s is None else timeout_s)
        except TimeoutError:
            return None

    async def _embed(self, text: str, timeout_s: float) -> Vector | None:
        batcher = self._batcher
        if self.state != "ready" or batcher is None:
            return None
        return await batcher.embed(text, timeout_s)

    async def embed_whole(self, texts: Sequence[str], timeout_s: float) -> list[Embedded]:
        """A vector and its tokens for every text, long ones cut at the window. See `Batcher.embed_whole`.

        Raises Unavailable while the embedder loads, FailedPrecondition when it could not be loaded.
        """
        batcher = self._batcher
        if self.state == "failed":
            raise FailedPrecondition("this router's embedder could not be loaded")
        if self.state != "ready" or batcher is None:
            raise Unavailable("this router's embedder is being loaded, or is gone", retry_after=1.0)
        return await batcher.embed_whole(texts, timeout_s)

    @property
    def model(self) -> str:
        """Name under which the embedder's vectors can be had; "" while there are none."""
        batcher = self._batcher
        return batcher.embedder.model if self.state == "ready" and batcher is not None else ""

    async def lookup(
        self,
        key: CacheKey,
        tau: float,
        timeout_s: float,
        *,
        max_age_s: float | None = None,
        rules: Rules = DEFAULT_RULES,
        explain: bool = False,
    ) -> NearOutcome:
        """The best remembered answer with cosine ≥ `tau` that is judged to ask the same, within `timeout_s` seconds.

        max_age_s: older answers do not count. rules: guards, and the threshold of the verifier. explain: candidates
        below τ and behind a hit are judged too.
        Raises InvalidArgument for a τ outside [0, 1].
        """
        if not 0.0 <= tau <= 1.0:
            raise InvalidArgument("tau must be in [0, 1]", details={"field": "tau"})
        if not key.partition or timeout_s <= 0:
            return NearOutcome("skipped")
        ends = time.monotonic() + timeout_s
        try:
            vector = await self._embed(key.text, min(timeout_s, self._embed_timeout_s))
        except TimeoutError:
            return NearOutcome("timeout")
        if vector is None:
            return NearOutcome("skipped")
        known = vector

        def decide(remembered: str, cosine: float) -> Verdict:
            return self._judge(key.text, remembered, cosine, rules)

        def search(index: NearIndex) -> tuple[NearOutcome, Near | None]:
            near = index.search(key.partition, known, floor(tau), MAX_CANDIDATES, max_age_s)
            return choose(index, key, near, tau, decide, explain)

        result = await self._submit(search, ends - time.monotonic())
        if not isinstance(result, tuple):
            return NearOutcome("timeout" if result is TimeoutError else "skipped")
        outcome: NearOutcome = result[0]
        served: Near | None = result[1]
        if served is None or served.entry.answer is not None:
            return outcome
        return await self._fetched(outcome, served, ends - time.monotonic())

    async def _fetched(self, outcome: NearOutcome, served: Near, timeout_s: float) -> NearOutcome:
        """The outcome with its answer from Redis; a miss where there is none."""
        entry = served.entry
        answer = await self.fetch(entry, timeout_s) if self.fetch is not None and timeout_s > 0 else None
        if answer and outcome.hit is not None:
            return outcome._replace(hit=outcome.hit._replace(answer=answer))
        if answer == b"":
            self._post_to_index(lambda index: index.purge("id", entry.entry_id.hex()))
        unserved = tuple(candidate._replace(served=False) for candidate in outcome.candidates)
        return NearOutcome("miss" if answer == b"" else "timeout", None, unserved)

    async def store(self, key: CacheKey, answer: bytes, timeout_s: float, origin: Origin | None = None) -> bool:
        """Remember an answer and tell the other replicas; False when it was not possible within `timeout_s` seconds.

        origin: None for an answer that this process alone shall know.
        """
        if not key.partition:
            return False
        ends = time.monotonic() + timeout_s
        vector = await self.embed(key.text, timeout_s)
        if vector is None:
            return False
        known = vector
        entry = Entry(key.text, key.prompt, answer)
        left = None
        if origin is not None:
            entry = Entry(
                key.text,
                key.prompt,
                answer,
                entry_id=origin.entry_id,
                tag=origin.tag,
                exact=origin.exact,
                tenant=origin.tenant,
                model=origin.model,
                family=origin.family,
                epoch=origin.epoch,
            )
            left = origin.expires_ms / 1000 - time.time()
        added = await self._submit(
            lambda index: index.add(key.partition, known, entry, left_s=left), ends - time.monotonic()
        )
        if origin is not None and self.publish is not None:
            # Also when this replica had no time for it: others may, and a rebuild finds it.
            await self.publish(key, known, self.embedder_id, origin)
        return added is True

    async def purge(self, what: str, value: str) -> bool:
        """Forget entries here by `id`, `tenant`, `model` or `family` (hex); False when the thread had no time."""
        return await self.bulk(lambda index: index.purge(what, value)) is not None

    async def bulk(self, work: Callable[[NearIndex], object]) -> object:
        """The result of work that may wait behind look-ups; None when it failed or the cache ends."""
        ends = time.monotonic() + BULK_TIMEOUT_S
        while self.state == "ready" and time.monotonic() < ends:
            job = _Job(work, ends, asyncio.get_running_loop())
            try:
                self._queue.put_nowait(job)
            except queue.Full:
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            assert job.future is not None
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + BULK_TIMEOUT_S):
                    return await job.future
            except TimeoutError:
                return None
        return None

    async def _submit(self, work: Callable[[NearIndex], object], timeout_s: float) -> object:
        """The work's result, None when it was refused or failed, the class TimeoutError when it took too long."""
        now = time.monotonic()
        busy_since = self._busy_since
        if self.state != "ready" or (busy_since is not None and now - busy_since > STUCK_S):
            return None
        if timeout_s <= 0:
            return TimeoutError
        job = _Job(work, now + timeout_s, asyncio.get_running_loop())
        assert job.future is not None
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
        """End the threads; one that hangs in the model is left behind (it is a daemon)."""
        self.building.close()
        batcher = self._batcher
        if batcher is not None:
            batcher.close(CLOSE_TIMEOUT_S)
        if self.state in ("new", "closed"):
            self.state = "closed"
            return
        self.state = "closed"
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.debug("the index's queue is full at the end")
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        index: NearIndex | None = None
        try:
            embedder = self._load()
            if embedder is not None:
                import faiss

                faiss.omp_set_num_threads(1)
                index = NearIndex(embedder.dim, maker=self._maker(), **self._options)  # type: ignore[arg-type]
                self.embedder_id = embedder.identity
                self._batcher = Batcher(embedder, max_queue=self._queue.maxsize)
                self._batcher.start()
                self._warm_up()
        except Exception as exc:
            log.warning("the semantic cache is off: %s", exc)
            index = None
        if self.state != "closed":
            self.state = "ready" if index is not None else "failed"
        elif self._batcher is not None:
            self._batcher.close(0.0)
        self.settled.set()
        if index is None:
            return
        while self.state != "closed":
            try:
                job = self._queue.get(timeout=EXPIRE_EVERY_S)
            except queue.Empty:
                job = None
            if job is not None and job.expires > time.monotonic():
                self._serve(job, index)
            else:
                index.expire()
            self.building.poll(index.arena)
            self.entries, self.bytes = len(index), index.held_bytes
            self.partitions, self.indexed = index.partitions, index.arena.indexed
        self.building.close()
        index.close()

    def _warm_up(self) -> None:
        """What the judge loads at its first judgement must not be paid for by a request."""
        try:
            self._judge("What is a page?", "What is one page?", 1.0, DEFAULT_RULES)
        except Exception:
            log.warning("the judge of the semantic cache fails", exc_info=True)

    def _serve(self, job: _Job, index: NearIndex) -> None:
        self._busy_since = time.monotonic()
        result: object = None
        try:
            result = job.work(index)
        except InvalidArgument as exc:
            log.warning("the semantic cache refused a vector: %s", exc)
        except Exception:
            log.warning("the semantic cache failed on one request", exc_info=True)
        self._busy_since = None
        self.entries = len(index)
        if job.loop is None or job.future is None:
            return
        try:
            job.loop.call_soon_threadsafe(_resolve, job.future, result)
        except RuntimeError:
            log.debug("the event loop is gone")

    def _post_to_index(self, work: Callable[[NearIndex], object]) -> None:
        """Run on the thread when there is room; lost otherwise."""
        try:
            self._queue.put_nowait(_Job(work, math.inf, None))
        except queue.Full:
            log.debug("the index's queue is full")

    def _post(self, call: Callable[[], None]) -> None:
        """Run on the thread, from another one that may wait for room."""
        while self.state != "closed":
            try:
                self._queue.put(_Job(lambda _: call(), math.inf, None), timeout=1.0)
            except queue.Full:
                continue
            return


def _resolve(future: asyncio.Future[object], result: object) -> None:
    if not future.done():
        future.set_result(result)
