"""The answer cache as routing sees it: exact, then semantic; look up within a limit, store when an answer comes."""

from __future__ import annotations

import asyncio
import enum
import time

from kvmesh.config import RouterSettings
from kvmesh.proto.v1 import inference_pb2, router_pb2
from kvmesh.telemetry import metrics, names, tracing
from services.router.cache import stored
from services.router.cache.exact import ExactCache
from services.router.cache.fingerprint import CacheKey
from services.router.near.embedder import load_embedder
from services.router.near.nearcache import NearCache

NEAR_MAX_BYTES = 256 << 20
STORE_TIMEOUT_S = 2.0


class Mode(enum.IntEnum):
    """How much of the cache a request may use; the order is the order of strength."""

    OFF = 1
    EXACT = 2
    SEMANTIC = 3


_BY_SETTING = {"off": Mode.OFF, "exact": Mode.EXACT, "semantic": Mode.SEMANTIC}


class AnswerCache:
    """Both caches of one router and their counts."""

    def __init__(self, exact: ExactCache | None, near: NearCache | None, *, mode: Mode, max_entry_bytes: int) -> None:
        self.exact = exact
        self.near = near
        self._mode = mode
        self._max_entry_bytes = max_entry_bytes
        self._embedder = "none"
        self.exact_hits = 0
        self.near_hits = 0
        self.misses = 0

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> AnswerCache:
        """Built, not started. Raises ValueError or OSError for an unusable Redis URL or password file."""
        mode = _BY_SETTING[settings.cache]
        exact = near = None
        if settings.redis_url and mode > Mode.OFF:
            exact = ExactCache(
                settings.redis_url,
                timeout_s=settings.redis_timeout_ms / 1000,
                ttl_s=settings.cache_ttl_s,
                max_entry_bytes=settings.cache_max_entry_bytes,
                password_file=settings.redis_password_file,
            )
        if settings.embedder != "none" and mode >= Mode.SEMANTIC:
            near = NearCache(
                lambda: load_embedder(settings.embedder),
                max_entries=settings.semantic_max_entries,
                max_bytes=NEAR_MAX_BYTES,
                ttl_s=settings.cache_ttl_s,
            )
        cache = cls(exact, near, mode=mode, max_entry_bytes=settings.cache_max_entry_bytes)
        cache._embedder = settings.embedder if near is not None else "none"
        return cache

    def start(self) -> None:
        """Begin to load the embedder. `exact.watch()` is the caller's to run."""
        if self.near is not None:
            self.near.start()

    def mode(self, asked: int) -> Mode:
        """The mode of a request: what it asks for (a `CacheMode`), never more than the router offers."""
        if asked == inference_pb2.CACHE_MODE_UNSPECIFIED:
            return self._mode
        try:
            return min(self._mode, Mode(asked))
        except ValueError:
            # A mode of a newer gateway that this router does not know.
            return Mode.OFF

    async def lookup(
        self, key: CacheKey, mode: Mode, *, tau: float, revision: str, budget_s: float
    ) -> router_pb2.CachedAnswer | None:
        """A complete answer to this request, or None; never takes longer than `budget_s` by much, never raises."""
        started = time.monotonic()
        found = await self._lookup_exact(key, revision, budget_s) if mode >= Mode.EXACT else None
        if found is None and mode >= Mode.SEMANTIC and key.partition:
            found = await self._lookup_near(key, tau, revision, budget_s - (time.monotonic() - started))
        if found is None:
            self.misses += 1
        return found

    async def _lookup_exact(self, key: CacheKey, revision: str, budget_s: float) -> router_pb2.CachedAnswer | None:
        if self.exact is None:
            return None
        with tracing.span(names.SPAN_CACHE_EXACT) as span:
            answer, result = None, "skipped"
            if self.exact.ok:
                data = await self.exact.get(key.exact, budget_s)
                answer = stored.decode(data, kind="exact", score=1.0, revision=revision) if data else None
                result = "miss" if answer is None else "hit"
            span.set_attribute(names.ATTR_CACHE, result)
        metrics.counter(names.CACHE_LOOKUPS).labels("exact", result).inc()
        self.exact_hits += answer is not None
        return answer

    async def _lookup_near(
        self, key: CacheKey, tau: float, revision: str, budget_s: float
    ) -> router_pb2.CachedAnswer | None:
        if self.near is None:
            return None
        with tracing.span(names.SPAN_CACHE_SEMANTIC) as span:
            result, hit = await self.near.lookup(key, tau, budget_s)
            answer = None
            if hit is not None:
                answer = stored.decode(hit.answer, kind="semantic", score=hit.score, revision=revision)
                result = result if answer is not None else "miss"
            span.set_attribute(names.ATTR_CACHE, result)
        metrics.counter(names.CACHE_LOOKUPS).labels("semantic", result).inc()
        self.near_hits += answer is not None
        return answer

    async def store(self, key: CacheKey, answer: router_pb2.CachedAnswer, *, revision: str, near: bool) -> bool:
        """Keep an answer where it is allowed to be; False when it is not worth keeping or no cache took it."""
        data = stored.encode(answer, revision=revision, max_bytes=self._max_entry_bytes)
        if data is None:
            return False
        stores = []
        if self.exact is not None:
            stores.append(self.exact.put(key.exact, data))
        if self.near is not None and near and key.partition:
            stores.append(self.near.store(key, data, STORE_TIMEOUT_S))
        return any(await asyncio.gather(*stores))

    def status(self) -> router_pb2.CacheStatus:
        """State for watchers; `entries` counts the semantic cache, Redis keeps its own count."""
        near = self.near
        embedder = self._embedder
        if near is not None and near.state != "ready":
            embedder = f"{embedder} ({near.state})"
        return router_pb2.CacheStatus(
            redis_ok=self.exact is not None and self.exact.ok,
            embedder=embedder,
            exact_hits=self.exact_hits,
            semantic_hits=self.near_hits,
            misses=self.misses,
            entries=near.entries if near is not None else 0,
        )

    async def close(self) -> None:
        """End the thread and the connections."""
        try:
            if self.near is not None:
                await asyncio.to_thread(self.near.close)
        finally:
            if self.exact is not None:
                await self.exact.close()
