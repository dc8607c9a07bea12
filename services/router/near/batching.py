"""Vectors for the event loop: texts that wait together are embedded together, by one thread behind a breaker.

A request never waits longer than its limit, and not at all where waiting is pointless: when the vector is known, when
the work ahead of it takes longer than its limit by all experience, or while the embedder hangs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import Internal, Unavailable
from services.router.near.arena import check_vector
from services.router.near.bulk import Bulk, Embedded
from services.router.near.embedder import MAX_CHARS, MAX_TOKENS, Embedder
from services.router.near.search import Vector

log = logging.getLogger(__name__)

EMBED_TIMEOUT_S = 0.03
"""What an embedding gets by default."""

MAX_BATCH = 16
MAX_QUEUE = 64
RECENT_VECTORS = 4096
HUNG_S = 1.0
"""A run of the model that takes longer counts as hung: nobody waits for it, and once it ends it was a failure."""

FAILURES_TO_OPEN = 5
COOL_S = 1.0
MAX_COOL_S = 30.0
PROBE_TEXT = "are you there"
START_RATE_S = 1e-6
"""Seconds a token, before any was measured: optimistic, the first texts shall be tried."""

SLOWER, FASTER = 0.2, 0.7
"""Parts of a new measurement in the rate that is believed."""

HOPELESS = 2.0
"""A text is not tried where it is thought to take so many times its limit: a rate from short texts is too high."""

Known = tuple[Vector | None, int]


class Breaker:
    """Closed: texts are embedded. Open: refused at once. Half open, after a while: a probe of the thread's own decides.

    Open while a run hangs, and after FAILURES_TO_OPEN runs in a row that failed or hung. Thread-safe enough: one thread
    writes, any reads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._cool_s = COOL_S
        self._opened: float | None = None
        self.busy_since: float | None = None
        """Start of the run in progress."""

    @property
    def state(self) -> str:
        """ "closed", "open" or "half_open"."""
        if self._opened is not None:
            return "half_open" if self._clock() - self._opened >= self._cool_s else "open"
        busy_since = self.busy_since
        return "open" if busy_since is not None and self._clock() - busy_since > HUNG_S else "closed"

    def run(self, work: Callable[[], object]) -> None:
        """Do the work and learn from how it went. Raises what the work raises."""
        started = self.busy_since = self._clock()
        try:
            work()
        except Exception:
            self._failed()
            raise
        finally:
            took, self.busy_since = self._clock() - started, None
        if took > HUNG_S:
            self._failed()
        else:
            self._failures, self._cool_s, self._opened = 0, COOL_S, None

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            if self._opened is not None:
                self._cool_s = min(MAX_COOL_S, 2 * self._cool_s)
            else:
                log.warning("the embedder fails or hangs; going on without it")
            self._opened = self._clock()

    def wait_s(self) -> float | None:
        """Seconds until a probe is due; None while closed."""
        return None if self._opened is None else max(0.0, self._opened + self._cool_s - self._clock())


@dataclass(slots=True, eq=False)
class _Job:
    """One text that somebody waits for until `expires` (monotonic seconds)."""

    text: str
    digest: bytes
    tokens: int
    expires: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Vector | None] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class Batcher:
    """`embed` for any number of tasks; one thread owns the embedder."""

    def __init__(self, embedder: Embedder, *, max_queue: int = MAX_QUEUE, recent: int = RECENT_VECTORS) -> None:
        self.embedder = embedder
        self.breaker = Breaker()
        self._max_queue = max_queue
        self._max_recent = recent
        self._recent: OrderedDict[bytes, Known] = OrderedDict()
        self._jobs: deque[_Job] = deque()
        self._change = threading.Condition()
        self._bulk = Bulk(self._change)
        self._closed = False
        self._rate_s = START_RATE_S
        self._running_tokens = 0
        self._measure = False
        self._measured = 0.0
        self.runs = 0
        """Runs of the model so far, and the texts embedded in them."""
        self.texts = 0
        self._thread = threading.Thread(target=self._loop, name="kvmesh-embedder", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    async def embed(self, text: str, timeout_s: float = EMBED_TIMEOUT_S) -> Vector | None:
        """The text's vector; None when it has none, or not within `timeout_s` seconds.

        Raises TimeoutError when it was tried and took too long.
        """
        if not 0 < len(text) <= MAX_CHARS:
            return None
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._recent.get(digest)
        if known is not None:
            with self._change:
                if digest in self._recent:
                    self._recent.move_to_end(digest)
            return known[0]
        if timeout_s <= 0 or self._closed or self.breaker.state != "closed":
            return None
        # Tokens are guessed here, from above: tokenizing is the thread's work.
        job = _Job(text, digest, 2 + len(text) // 3, time.monotonic() + timeout_s, asyncio.get_running_loop())
        with self._change:
            ahead = self._running_tokens + sum(other.tokens for other in self._jobs)
            if len(self._jobs) >= self._max_queue:
                return None
            if (ahead + job.tokens) * self._rate_s > HOPELESS * timeout_s:
                # Measured now and then all the same, or a slow minute would be believed for ever.
                if not ahead and job.expires - self._measured > COOL_S + timeout_s:
                    self._measure = True
                    self._change.notify()
                return None
            self._jobs.append(job)
            self._change.notify()
        async with asyncio.timeout(timeout_s):
            return await job.future

    async def embed_whole(self, texts: Sequence[str], timeout_s: float) -> list[Embedded]:
        """A vector and its tokens for every text (`Embedder.embed_whole`), behind what the cache asks for.

        Raises Unavailable while the embedder fails or hangs, Overloaded, Internal where it fails on these texts, and
        TimeoutError after `timeout_s` seconds.
        """
        if self._closed or self.breaker.state != "closed":
            raise Unavailable("the embedder does not answer now", retry_after=1.0)
        return await self._bulk.embed(texts, timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread; one that hangs in the model is left behind (it is a daemon)."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._change:
                while not (self._closed or self._jobs or self._measure or self._bulk) and self.breaker.wait_s() != 0.0:
                    self._change.wait(self.breaker.wait_s())
                if self._closed:
                    jobs, self._jobs = list(self._jobs), deque()
                else:
                    now = time.monotonic()
                    jobs = [self._jobs.popleft() for _ in range(min(MAX_BATCH, len(self._jobs)))]
                    # What nobody waits for any more is not worth a run.
                    late = [job for job in jobs if job.expires <= now]
                    jobs = [job for job in jobs if job.expires > now]
                    self._running_tokens = sum(job.tokens for job in jobs)
                    for job in late:
                        _resolve(job, None)
            if self._closed:
                for job in jobs:
                    _resolve(job, None)
                self._bulk.close(Unavailable("this router is stopping"))
                return
            if jobs:
                self._serve(jobs)
            elif self._measure or self.breaker.state == "half_open":
                self._probe()
            self._running_tokens = 0
            self._serve_bulk()

    def _serve_bulk(self) -> None:
        """One run of what clients want embedded."""
        with self._change:
            run = self._bulk.take()
            if run is None:
                return
            order, texts = run
            self._running_tokens = tokens = sum(min(MAX_TOKENS, 2 + len(text) // 3) for text in texts)
        made: list[Embedded] = []
        started = time.monotonic()
        try:
            self.breaker.run(lambda: made.extend(self._embed_whole(texts)))
        except Exception:
            log.warning("the embedder failed on a client's texts", exc_info=True)
            self._bulk.failed(order, Internal("the embedder failed on these texts"))
        else:
            self._learn(time.monotonic() - started, tokens)
            self._bulk.done(order, made)
        self._running_tokens = 0

    def _embed_whole(self, texts: Sequence[str]) -> list[Embedded]:
        made = self.embedder.embed_whole(texts)
        self.runs += 1
        self.texts += len(texts)
        return [(check_vector(vector, self.embedder.dim), tokens) for vector, tokens in made]

    def _probe(self) -> None:
        self._measure = False
        started = time.monotonic()
        try:
            self.breaker.run(lambda: self._embed([PROBE_TEXT]))
        except Exception as exc:
            log.debug("the embedder still fails: %s", exc)
        else:
            self._learn(time.monotonic() - started, 2 + len(PROBE_TEXT) // 3)

    def _learn(self, took_s: float, tokens: int) -> None:
        self._measured = time.monotonic()
        rate_s = min(took_s, HUNG_S) / tokens
        # One slow run says little of the next; a fast one says that it can be.
        self._rate_s += (SLOWER if rate_s > self._rate_s else FASTER) * (rate_s - self._rate_s)

    def _serve(self, jobs: list[_Job]) -> None:
        known = {job.digest: self._recent[job.digest] for job in jobs if job.digest in self._recent}
        asked = list({job.digest: job for job in jobs if job.digest not in known}.values())
        vectors: list[Vector | None] = []
        if asked:
            started = time.monotonic()
            try:
                self.breaker.run(lambda: vectors.extend(self._embed([job.text for job in asked])))
            except Exception:
                if len(asked) > 1:
                    # One text may have spoiled it for all: each by itself.
                    for job in asked:
                        self._serve([job])
                    jobs = [job for job in jobs if job.digest in known]
                else:
                    log.warning("the embedder failed on a text", exc_info=True)
                    vectors.append(None)
            else:
                self._learn(time.monotonic() - started, sum(job.tokens for job in asked))
                self._remember({job.digest: (v, job.tokens) for job, v in zip(asked, vectors, strict=True)})
            known |= {job.digest: (v, job.tokens) for job, v in zip(asked, vectors, strict=False)}
        for job in jobs:
            _resolve(job, known[job.digest][0])

    def _embed(self, texts: list[str]) -> list[Vector | None]:
        """Vectors as the embedder gives them, checked. Raises InvalidArgument for one that is none."""
        vectors = self.embedder.embed_batch(texts)
        self.runs += 1
        self.texts += len(texts)
        return [None if vector is None else check_vector(vector, self.embedder.dim) for vector in vectors]

    def _remember(self, new: dict[bytes, Known]) -> None:
        with self._change:
            self._recent.update(new)
            while len(self._recent) > self._max_recent:
                self._recent.popitem(last=False)


def _resolve(job: _Job, vector: Vector | None) -> None:
    def settle() -> None:
        if not job.future.done():
            job.future.set_result(vector)

    try:
        job.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        log.debug("the event loop is gone")
