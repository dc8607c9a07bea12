"""The limiter of a gateway process: Redis decides, in one call a request; while it is away this process alone does.

A tenant without limits costs nothing here, and one whose usage is only counted costs nothing before the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import grpc

from kvmesh.config.gateway import LimitSettings
from kvmesh.errors import KvmeshError, Overloaded
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Principal
from kvmesh.rpc.policy import Policy
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.store.client import RedisStore
from kvmesh.store.limits import LimitStore, Spend, Taken, Terms
from kvmesh.telemetry import metrics, names
from services.gateway.limits.contract import Counted, Hold, LimitState, NoHold, Window
from services.gateway.limits.estimate import Lengths
from services.gateway.limits.hold import RETRY_S, TenantHold, exceeded, most_of, unknown
from services.gateway.limits.ledger import BATCH_S, Ledger
from services.gateway.limits.local import MAX_TENANTS, LocalLimits

log = logging.getLogger(__name__)

TAKE_S = 0.1
"""Seconds that a request waits for Redis at most."""

OPEN_S = 60.0
"""Seconds for which budgets are not looked at while Redis is away."""

RENEWALS = 8
"""Tenants whose holds are renewed at the same time: requests need connections too."""

NO_HOLD = NoHold()
HITS = ("exact", "semantic")
CANCELLED = grpc.StatusCode.CANCELLED.value[0]


class Limits:
    """See `contract.Limiter`. `start` it, and `close` it before Redis."""

    def __init__(
        self,
        settings: LimitSettings,
        redis: RedisStore | None,
        tasks: BackgroundTasks,
        *,
        name: str,
        take_s: float | None = None,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: unique to this start of this process. take_s: what a request waits for Redis, in seconds; None =
        TAKE_S."""
        self._settings = settings
        self._tasks = tasks
        self._name = name
        self._wall = wall
        self._now = now
        self._take_s = TAKE_S if take_s is None else take_s
        hold_ms = int(settings.hold_s * 1e3)
        self._store = LimitStore(redis, hold_ms=hold_ms, take_s=self._take_s) if redis is not None else None
        self.ledger = Ledger(name, self._store, journal=settings.journal, usage_file=settings.usage_file)
        self._local = LocalLimits(settings.replicas, now)
        self._lengths = Lengths()
        self._holds: dict[str, dict[str, TenantHold]] = {}
        self._count = 0
        self._away_since: float | None = None
        # Tenants that Redis has no answer for although it has for others: a key that is broken, a shard that is gone.
        self._unanswered: OrderedDict[str, float] = OrderedDict()
        self._told = False

    def start(self) -> None:
        """Begin to renew and to settle."""
        self._tasks.spawn(self.ledger.run(), name="limits-settle")
        if self._store is not None:
            self._tasks.spawn(self._renew(), name="limits-renew")

    async def close(self) -> None:
        """Settle what has ended."""
        await self.ledger.close()

    def holds(self, tenant: str) -> int:
        """Requests of a tenant that hold something here."""
        return len(self._holds.get(tenant, ()))

    # --- in
    async def take(self, principal: Principal, job: Counted, stop: Callable[[KvmeshError], None]) -> Hold:
        """See Limiter."""
        policy, tenant = principal.policy, principal.tenant
        if not (policy.limited or policy.prices or self._settings.usage_file):
            return NO_HOLD
        self._count += 1
        most = most_of(job)
        # Of what best_of chooses from nothing is heard before its end: there is no taking more meanwhile.
        silent = job.sampling.best_of > max(1, job.sampling.n)
        hold = TenantHold(
            self,
            tenant,
            policy,
            job,
            stop,
            hold_id=f"{self._name}:{self._count}",
            key=principal.key_name,
            period=policy.budget.name(self._wall()),
            expected=most if silent else self._lengths.expected(tenant, most),
        )
        if not policy.limited:
            return hold
        if self._store is None:
            return self._admit(hold, self._alone(hold))
        asking = self._tasks.spawn(self._decide(hold), name="limits-take", essential=False)
        try:
            taken = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # It may be let in all the same: given back once that is known.
            asking.add_done_callback(lambda _: hold.settle(pb.Usage(), None, CANCELLED))
            raise
        if taken is not None:
            return self._admit(hold, taken)
        try:
            return self._admit(hold, self._alone(hold))
        except KvmeshError:
            # Redis may have let it in without our hearing of it.
            hold.settle(pb.Usage(), None, grpc.StatusCode.UNAVAILABLE.value[0])
            raise

    def _admit(self, hold: TenantHold, taken: Taken) -> TenantHold:
        policy, tenant = hold.policy, hold.tenant
        if taken.verdict != "ok":
            raise self._refusal(policy, taken)
        hold.state = _state(policy, taken)
        self._holds.setdefault(tenant, {})[hold.id] = hold
        metrics.gauge(names.LIMITS_HOLDS).inc()
        return hold

    async def _decide(self, hold: TenantHold) -> Taken | None:
        taken = await self._ask(hold)
        if taken is not None and taken.verdict in ("concurrent", "held"):
            # What has just ended may be on its way: a client that sends one after the other is not to be refused.
            await self._catch_up()
            taken = await self._ask(hold)
        return taken

    async def _ask(self, hold: TenantHold) -> Taken | None:
        if self._store is None:
            return None
        policy = hold.policy
        terms = Terms(
            policy.requests_per_minute,
            policy.tokens_per_minute,
            policy.max_concurrent,
            policy.budget.amount,
            hold.period,
        )
        taken = await self._store.take(hold.tenant, hold.id, terms, cost=hold.held, tokens=hold.tokens)
        if taken is not None:
            self._away_since = None
            self._unanswered.pop(hold.tenant, None)
        return taken

    async def _catch_up(self) -> None:
        """Until what ended before now is settled, here and in other processes."""
        # Never cancelled in the middle: what it has begun to settle is in its hands alone.
        flush = self._tasks.spawn(self.ledger.flush(), name="limits-flush", essential=False)
        await asyncio.wait({flush}, timeout=self._take_s)
        await asyncio.sleep(2 * BATCH_S)

    def _alone(self, hold: TenantHold) -> Taken:
        """Decide without Redis."""
        now = self._now()
        if self._away_since is None:
            self._away_since = now
        policy = hold.policy
        if policy.budget.amount:
            if self._store is None and not self._told:
                self._told = True
                log.warning("a tenant has a budget, but there is no redis_url: it can be kept nowhere")
            since = min(self._away_since, self._unanswered.setdefault(hold.tenant, now))
            if len(self._unanswered) > MAX_TENANTS:
                self._unanswered.popitem(last=False)
            if self._settings.budget_away == "closed" or now - since > OPEN_S:
                metrics.counter(names.LIMITS_REFUSED).labels("budget").inc()
                raise unknown()
        taken = self._local.take(hold.tenant, policy, running=self.holds(hold.tenant), tokens=hold.tokens)
        if taken.verdict == "ok":
            hold.local = True
            metrics.counter(names.LIMITS_LOCAL).inc()
        return taken

    def _refusal(self, policy: Policy, taken: Taken) -> KvmeshError:
        limit, text = {
            "requests": ("requests_per_minute", f"may send {policy.requests_per_minute} requests a minute"),
            "tokens": ("tokens_per_minute", f"may use {policy.tokens_per_minute} tokens a minute"),
            "concurrent": ("max_concurrent", f"may run {policy.max_concurrent} requests at a time"),
            "held": ("budget", "has a budget that its running requests hold"),
            "spent": ("budget", "has spent its budget"),
        }[taken.verdict]
        metrics.counter(names.LIMITS_REFUSED).labels(limit).inc()
        if taken.verdict == "spent":
            return exceeded(policy, taken.spent)
        retry_s = taken.wait_ms / 1e3 or RETRY_S
        return Overloaded(f"this tenant {text}", retry_after=retry_s, details={"limit": limit})

    # --- while it runs
    @property
    def strict(self) -> bool:
        """See Owner."""
        return self._settings.budget_away == "closed"

    def spawn(self, hold: TenantHold, step: int) -> asyncio.Task[None]:
        """See Owner."""
        return self._tasks.spawn(hold.grow(step), name="limits-top-up", essential=False)

    async def top_up(self, hold: TenantHold, most: int, tokens: int) -> tuple[int, int] | None:
        """See Owner."""
        if self._store is None or not self._store.store.ok:
            return None
        amount = hold.policy.budget.amount
        return await self._store.top_up(
            hold.tenant,
            hold.id,
            amount=amount,
            period=hold.period,
            held=hold.held,
            most=most,
            tokens_per_minute=hold.policy.tokens_per_minute,
            tokens=tokens,
        )

    async def _renew(self) -> None:
        """Keep what runs, all of a tenant in one call."""
        limit = asyncio.Semaphore(RENEWALS)
        while True:
            await asyncio.sleep(self._settings.hold_s / 3)
            if self._store is not None and self._store.store.ok:
                async with self.ledger.lock:
                    await asyncio.gather(*(self._renew_tenant(tenant, limit) for tenant in list(self._holds)))

    async def _renew_tenant(self, tenant: str, limit: asyncio.Semaphore) -> None:
        async with limit:
            holds = [(hold.id, hold.held) for hold in self._holds.get(tenant, {}).values()]
            if holds and self._store is not None:
                await self._store.renew(tenant, holds)

    # --- out
    def settled(self, hold: TenantHold, usage: pb.Usage, served: pb.Served | None, code: int) -> None:
        """See Owner."""
        mine = self._holds.get(hold.tenant)
        if mine is not None and mine.pop(hold.id, None) is not None:
            metrics.gauge(names.LIMITS_HOLDS).dec()
            if not mine:
                del self._holds[hold.tenant]
        cache = served.cache if served is not None else ""
        prompt, cached, completion = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        if code and not completion and not (code == CANCELLED and served is not None):
            # It failed before it was of any use; whose client left while a worker was at it, was not failed.
            prompt = cached = 0
        free = cache in HITS
        used = 0 if free else prompt + completion
        if completion and not free and not code:
            self._lengths.add(hold.tenant, completion)
        if hold.local:
            self._local.give_back(hold.tenant, hold.policy, hold.tokens - used)
        self.ledger.add(
            Spend(
                number=self.ledger.next_number(),
                tenant=hold.tenant,
                hold=hold.id,
                period=hold.period,
                at=self._wall(),
                tokens_per_minute=hold.policy.tokens_per_minute,
                cost=0 if free else hold.policy.cost(hold.job.served, prompt, cached, completion),
                used=used,
                model=hold.job.served,
                prompt=prompt,
                cached=cached,
                completion=completion,
                request_id=hold.job.request_id,
                key=hold.key,
                cache=cache,
                code=code,
            )
        )


def _state(policy: Policy, taken: Taken) -> LimitState:
    requests = Window(policy.requests_per_minute, taken.requests_left, taken.requests_reset_ms / 1e3)
    tokens = Window(policy.tokens_per_minute, taken.tokens_left, taken.tokens_reset_ms / 1e3)
    return LimitState(
        requests if policy.requests_per_minute else None,
        tokens if policy.tokens_per_minute else None,
    )
