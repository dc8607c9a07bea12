"""The answer cache as routing sees it: a plan for each request, then exact or flight, then semantic; store, purge."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter

from kvmesh.config import RouterSettings
from kvmesh.proto.v1 import router_admin_pb2, router_pb2
from kvmesh.store import RedisStore, events
from kvmesh.store.keys import FlightKeys, Member
from kvmesh.telemetry import metrics, names, tracing
from services.router.cache import policy, purge, stored
from services.router.cache.building import build_near, build_store
from services.router.cache.epoch import EpochKeeper
from services.router.cache.exact import ExactCache, Head, Put
from services.router.cache.fingerprint import family_tag, model_tag
from services.router.cache.indices import Indices
from services.router.cache.outcomes import ExactOutcome, NearAnswer, Served
from services.router.cache.policy import CachePlan, CacheRules, Mode
from services.router.cache.tenants import MAX_TENANTS, TenantCounts, Tenants
from services.router.match import DEFAULT, Rules
from services.router.near.entries import Entry
from services.router.near.nearcache import NearCache, Origin
from services.router.near.replica import Replica

STORE_TIMEOUT_S = 2.0
UNGUARDED = Rules(guards=frozenset(), threshold=0.0)
"""For tenants and models without guards: the threshold of the cosine alone decides."""

STATS_PARALLEL = 16


class AnswerCache:
    """Both caches of one router and their counts."""

    def __init__(
        self,
        store: RedisStore | None,
        near: NearCache | None,
        *,
        rules: CacheRules,
        ttl_s: float,
        max_entry_bytes: int,
        tenant_entries: int = 1 << 40,
        tenant_bytes: int = 1 << 50,
    ) -> None:
        """Without a `store` there is only what `near` keeps in memory."""
        self.store = store
        self.near = near
        self.rules = rules
        self.tenants = Tenants()
        self._max_entry_bytes = max_entry_bytes
        self._ttl_s = ttl_s
        self._own_epoch = 0
        self._purges = purge.Purges(self._forget_here)
        self.exact: ExactCache | None = None
        if store is not None:
            self.exact = ExactCache(store, ttl_s=ttl_s, max_entry_bytes=max_entry_bytes)
            self._epoch = EpochKeeper(store, self._purges.note)
            self._indices = Indices(store, self.exact, max_entries=tenant_entries, max_bytes=tenant_bytes)
            self._purger = purge.Purger(store, self._indices, self._epoch, self._purges, rules.secret)
        self.replica: Replica | None = None
        if near is not None and store is not None:
            near.fetch = self._fetch
            self.replica = Replica(store, near)
        self._forgetting: set[asyncio.Task[bool]] = set()
        self.lookups: Counter[str] = Counter()
        """Requests by what they got: `exact`, `semantic`, `follow`, `miss`, `bypass`."""
        self.refusals: Counter[str] = Counter()
        """Near questions above the threshold that were refused, by what refused them."""

    @classmethod
    def from_settings(cls, settings: RouterSettings, *, route_policy: str = "") -> AnswerCache:
        """Built, not started. Raises ValueError or OSError for a Redis URL or a file that cannot be used.

        route_policy: version of what decides which model answers for an alias, besides the aliases themselves.
        """
        rules = CacheRules.from_settings(settings, route_policy=route_policy)
        store = build_store(settings, rules)
        near = build_near(settings, rules, fetchable=store is not None)
        return cls(
            store,
            near,
            rules=rules,
            ttl_s=settings.cache_ttl_s,
            max_entry_bytes=settings.cache_max_entry_bytes,
            tenant_entries=settings.cache_tenant_entries,
            tenant_bytes=settings.cache_tenant_bytes,
        )

    @property
    def epoch(self) -> int:
        """The present one; 0 without Redis, or before it was first reached."""
        return self._epoch.value if self.store is not None else self._own_epoch

    def start(self) -> None:
        """Begin to load the embedder. `run` is the caller's to run."""
        if self.near is not None:
            self.near.start()

    async def run(self) -> None:
        """Background loops: the breaker's probes, epochs, what other replicas tell. Runs until cancelled."""
        if self.store is not None:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.store.watch(), name="redis-watch")
                group.create_task(self._epoch.follow(), name="cache-epoch")
                if self.replica is not None:
                    group.create_task(self.replica.run(), name="near-replica")

    async def rebuilt(self) -> None:
        """Wait until memory holds what Redis holds, or there is nothing to wait for: the router is ready then."""
        if self.replica is not None:
            await self.replica.ready.wait()

    # --- one request ----------------------------------------------------------------------------------------------

    def plan(self, request: router_pb2.RouteRequest, tenant: str) -> CachePlan:
        """What a request that passed `policy.check` may do with the caches."""
        return policy.plan(request, tenant, self.rules, self.epoch)

    async def exact_or_flight(
        self,
        plan: CachePlan,
        served: Served,
        *,
        gateway_id: str = "",
        fly: bool = True,
        budget_s: float,
        count: bool = True,
    ) -> ExactOutcome:
        """The remembered answer; else the flight to follow or to lead. Takes no longer than `budget_s` seconds by
        much, never raises. Whoever leads and then cannot have the answer calls `end_flight`. Trials do not `count`."""
        fly = fly and plan.fly
        if self.exact is None or plan.mode < Mode.EXACT or not (plan.read or fly):
            return ExactOutcome("skipped")
        with tracing.span(names.SPAN_CACHE_EXACT) as span:
            outcome = await self._exact_or_flight(self.exact, plan, served, gateway_id, fly, budget_s)
            span.set_attribute(names.ATTR_CACHE, outcome.kind)
        if count:
            metrics.counter(names.CACHE_LOOKUPS).labels("exact", outcome.kind).inc()
            if outcome.kind == "hit":
                if outcome.answer is not None:
                    metrics.histogram(names.CACHE_HIT_AGE).labels("exact").observe(outcome.answer.age_s)
                self.lookups["exact"] += 1
                self._counts(plan).hits += 1
            elif outcome.kind == "follow":
                self.lookups["follow"] += 1
        return outcome

    async def _exact_or_flight(
        self, exact: ExactCache, plan: CachePlan, served: Served, gateway_id: str, fly: bool, budget_s: float
    ) -> ExactOutcome:
        tag, key = plan.key.tag, plan.key.exact.hex()
        families = {family_tag(*each) for each in served}
        until = time.monotonic() + budget_s
        for _ in range(2):
            joined = await exact.get_or_join(
                tag,
                key,
                families,
                timeout_s=until - time.monotonic(),
                read=plan.read,
                fly=fly,
                gateway_id=gateway_id,
                max_age_s=plan.max_age_s,
            )
            if joined.kind in ("follow", "lead"):
                flight = router_pb2.Flight(
                    flight_id=joined.flight_id,
                    gateway_id=joined.gateway_id or gateway_id,
                    token=joined.token,
                    key=FlightKeys(tag, key).key,
                )
                return ExactOutcome(joined.kind, flight=flight)
            if joined.head is None:
                return ExactOutcome(joined.kind)
            answer = stored.decode(
                joined.body,
                kind="exact",
                score=1.0,
                served=served,
                age_s=joined.age_s,
                purge_id=joined.head.entry_id.hex(),
            )
            if answer is not None:
                return ExactOutcome("hit", answer)
            # Not an answer after all: away with it, and ask once more, since another may be making one.
            await exact.delete(tag, key, joined.head.entry_id)
        return ExactOutcome("miss")

    async def near_answer(
        self, plan: CachePlan, served: Served, *, budget_s: float, explain: bool = False, count: bool = True
    ) -> NearAnswer:
        """A similar question's answer, within `budget_s` seconds; never raises. While Redis is away there is none: what
        was purged meanwhile is not known."""
        if self.near is None or not plan.semantic or not (self.store is None or self.store.ok):
            return NearAnswer("skipped")
        with tracing.span(names.SPAN_CACHE_SEMANTIC) as span:
            result, hit, candidates = await self.near.lookup(
                plan.key,
                plan.tau,
                budget_s,
                max_age_s=plan.max_age_s,
                rules=DEFAULT if plan.guards else UNGUARDED,
                explain=explain,
            )
            answer = None
            if hit is not None:
                answer = stored.decode(
                    hit.answer,
                    kind="semantic",
                    score=hit.score,
                    served=served,
                    age_s=hit.age_s,
                    purge_id=hit.purge_id,
                )
                result = result if answer is not None else "miss"
            span.set_attribute(names.ATTR_CACHE, result)
        if count:
            metrics.counter(names.CACHE_LOOKUPS).labels("semantic", result).inc()
            if answer is not None:
                metrics.histogram(names.CACHE_HIT_AGE).labels("semantic").observe(answer.age_s)
                self.lookups["semantic"] += 1
                self._counts(plan).hits += 1
            for candidate in candidates:
                if candidate.guard and candidate.similarity >= plan.tau:
                    self.refusals[candidate.guard] += 1
        return NearAnswer(result, answer, candidates)

    async def _fetch(self, entry: Entry, timeout_s: float) -> bytes | None:
        """For the semantic cache: an entry's answer; b"" when Redis has none, None when Redis did not answer."""
        if self.exact is None:
            return None
        joined = await self.exact.get_or_join(
            entry.tag, entry.exact, [bytes.fromhex(entry.family)], timeout_s=timeout_s, entry_id=entry.entry_id
        )
        return None if joined.kind == "skipped" else joined.body

    def missed(self, plan: CachePlan) -> None:
        """Count a request that goes to a worker: a miss, or one that did not ask."""
        if plan.read:
            self.lookups["miss"] += 1
            self._counts(plan).misses += 1
        else:
            self.lookups["bypass"] += 1

    async def store_answer(
        self,
        plan: CachePlan,
        answer: router_pb2.CachedAnswer,
        *,
        model: str,
        revision: str,
        flight: router_pb2.Flight | None = None,
    ) -> bool:
        """Keep the answer of `model` in `revision` where it may be kept, and end its flight.

        False when it may not, is not worth it, or no cache took it.
        """
        data = stored.encode(answer, model=model, revision=revision, max_bytes=self._max_entry_bytes)
        family = family_tag(model, revision)
        tags = {"tenant": plan.tenant_tag, "model": model_tag(model), "family": family.hex()}
        if data is None or not plan.write or plan.epoch != self.epoch or self._purges.since(plan.made_at, **tags):
            await self.end_flight(flight)
            return False
        kept, entry = await self._keep(plan, data, model, family, tags, flight)
        if entry is not None and self._purges.since(plan.made_at, **tags):
            # Ordered while it was stored: its sweep may have come before the indices had the entry.
            await self._take_back(plan, entry, family, data)
            return False
        return kept

    async def _keep(
        self,
        plan: CachePlan,
        data: bytes,
        model: str,
        family: bytes,
        tags: dict[str, str],
        flight: router_pb2.Flight | None,
    ) -> tuple[bool, bytes | None]:
        """Into both caches: whether one took it, and the id of the new entry."""
        made: Put | None
        if self.exact is not None:
            made = await self._put(self.exact, plan, data, model, family, flight)
            if made is None or made.kept:
                return made is not None, None
        else:
            now = int(time.time() * 1000)
            made = Put(secrets.token_bytes(16), now, now + int(self._ttl_s * 1000), False, None, 0)
        if self.near is None or plan.mode < Mode.SEMANTIC or not plan.key.partition:
            return self.exact is not None, made.entry_id
        origin = Origin(
            entry_id=made.entry_id,
            tag=plan.key.tag,
            exact=plan.key.exact.hex(),
            **tags,
            epoch=plan.epoch,
            expires_ms=made.expires_ms,
        )
        near = await self.near.store(plan.key, data, STORE_TIMEOUT_S, origin)
        return near or self.exact is not None, made.entry_id

    async def _take_back(self, plan: CachePlan, entry_id: bytes, family: bytes, data: bytes) -> None:
        """Out of Redis and of this process's memory; other replicas find no answer to their copy."""
        member = Member(plan.key.tag, plan.key.exact.hex(), entry_id.hex(), family.hex(), len(data))
        if self.store is not None:
            await self._indices.drop(member, plan.epoch)
        if self.near is not None:
            await self.near.purge("id", entry_id.hex())

    async def _put(
        self,
        exact: ExactCache,
        plan: CachePlan,
        data: bytes,
        model: str,
        family: bytes,
        flight: router_pb2.Flight | None,
    ) -> Put | None:
        """Into Redis and its indices."""
        tag, key = plan.key.tag, plan.key.exact.hex()
        put = await exact.put(
            tag,
            key,
            data,
            family=family,
            tenant=plan.tenant_tag,
            model=model_tag(model),
            replace=plan.refresh,
            flight_id=flight.flight_id if flight is not None else "",
            token=flight.token if flight is not None else 0,
        )
        if put is None or put.kept:
            return put
        if put.replaced is not None:
            old = Member(tag, key, put.replaced.entry_id.hex(), put.replaced.family.hex(), put.replaced_size)
            await self._indices.forget(old, put.replaced, plan.epoch)
        head = Head(put.stored_ms, put.expires_ms, put.entry_id, family, plan.tenant_tag, model_tag(model))
        held = await self._indices.add(Member(tag, key, put.entry_id.hex(), family.hex(), len(data)), head, plan.epoch)
        if held is not None:
            self._counts(plan).held = held
        return put

    async def end_flight(self, flight: router_pb2.Flight | None) -> None:
        """Let the next request lead: this flight brings no answer. None, or one that is not ours, is no flight."""
        keys = FlightKeys.parse(flight.key) if flight is not None else None
        if self.exact is not None and flight is not None and keys is not None:
            await self.exact.end_flight(keys.tag, keys.exact, flight.flight_id, flight.token)

    # --- operators ------------------------------------------------------------------------------------------------

    async def purge(
        self, *, purge_id: str = "", tenant: str = "", model: str = "", revision: str = "", everything: bool = False
    ) -> int:
        """See `Purger.purge`. Without Redis it is this router's memory alone that forgets, and the number is 0."""
        purge.check_purge(purge_id=purge_id, tenant=tenant, model=model, revision=revision, everything=everything)
        if self.store is not None:
            return await self._purger.purge(
                purge_id=purge_id, tenant=tenant, model=model, revision=revision, everything=everything
            )
        if everything:
            self._own_epoch += 1
        else:
            self._purges.note(
                purge.event(self.rules.secret, purge_id=purge_id, tenant=tenant, model=model, revision=revision)
            )
        return 0

    async def tenant_stats(self, limit: int = MAX_TENANTS) -> list[router_admin_pb2.TenantCache]:
        """What the tenants seen last hold (in Redis) and got (from this router)."""
        slots = asyncio.Semaphore(STATS_PARALLEL)

        async def one(tenant: str, counts: TenantCounts) -> router_admin_pb2.TenantCache:
            async with slots:
                held = await self._indices.held(counts.tag, self.epoch) if self.store is not None else None
            counts.held = held or counts.held
            return router_admin_pb2.TenantCache(
                tenant=tenant,
                entries=counts.held.entries,
                bytes=counts.held.bytes,
                hits=counts.hits,
                misses=counts.misses,
            )

        return list(await asyncio.gather(*(one(*each) for each in self.tenants.latest(limit))))

    def status(self) -> router_pb2.CacheStatus:
        """State for watchers; `entries` counts the semantic cache, Redis keeps its own count."""
        near = self.near
        embedder = self.rules.embedder if near is not None else "none"
        if near is not None and near.state != "ready":
            embedder = f"{embedder} ({near.state})"
        return router_pb2.CacheStatus(
            redis_ok=self.store is not None and self.store.ok,
            embedder=embedder,
            exact_hits=self.lookups["exact"],
            semantic_hits=self.lookups["semantic"],
            misses=self.lookups["miss"],
            entries=near.entries if near is not None else 0,
            bytes=near.bytes if near is not None else 0,
            partitions=near.partitions if near is not None else 0,
            progress=self.replica.progress if self.replica is not None else 1.0,
            epoch=self.epoch,
            follows=self.lookups["follow"],
        )

    def _forget_here(self, event: events.Purged) -> None:
        """Of what was purged, this process's memory too."""
        if self.near is not None and self.near.state == "ready":
            task = asyncio.get_running_loop().create_task(self.near.purge(event.what, event.value))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    def _counts(self, plan: CachePlan) -> TenantCounts:
        return self.tenants.of(plan.tenant, plan.tenant_tag)

    async def close(self) -> None:
        """End the thread and the connections."""
        try:
            if self.near is not None:
                await asyncio.to_thread(self.near.close)
        finally:
            if self.store is not None:
                await self.store.close()
