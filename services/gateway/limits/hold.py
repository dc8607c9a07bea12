"""What one request has taken of its tenant's limits: grows while it streams, is settled once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Protocol

from kvmesh.errors import BudgetExceeded, KvmeshError, Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.policy import Policy
from kvmesh.telemetry import metrics, names
from services.gateway.limits.contract import Counted, LimitState

log = logging.getLogger(__name__)

SHORT = 0.8
"""Part of a hold that may be used before more is taken."""

MIN_STEP = 64
"""Output tokens that are taken at least, where the request may have as many."""

NEVER = math.inf
RETRY_S = 1.0


class Owner(Protocol):
    """The limiter."""

    @property
    def strict(self) -> bool:
        """True when nothing may be used that Redis has not granted."""

    async def top_up(self, hold: TenantHold, most: int, tokens: int) -> tuple[int, int] | None:
        """Cost granted of `most`, and held now; None = nobody knows, as while Redis is away. `tokens`: for the rate."""

    def spawn(self, hold: TenantHold, step: int) -> asyncio.Task[None]:
        """Run `hold.grow(step)`."""

    def settled(self, hold: TenantHold, usage: pb.Usage, served: pb.Served | None, code: int) -> None:
        """The end."""


class TenantHold:
    """See `contract.Hold`. `held` is a cost in the unit of the tenant's budget; `covered` output tokens that it is
    enough for; `tokens` what the rate of tokens was charged for it."""

    def __init__(
        self,
        owner: Owner,
        tenant: str,
        policy: Policy,
        job: Counted,
        stop: Callable[[KvmeshError], None],
        *,
        hold_id: str,
        key: str,
        period: str,
        expected: int,
    ) -> None:
        self._owner = owner
        self._stop = stop
        self.tenant = tenant
        self.policy = policy
        self.job = job
        self.id = hold_id
        self.key = key
        self.period = period
        self.state = LimitState()
        self.most = most_of(job)
        self.covered = expected
        self.held = self.cost(expected)
        self.tokens = len(job.token_ids) + expected
        self.local = False
        """True when this process alone has let it in."""
        self._used = 0
        self._next: float = NEVER
        self._exhausted = False
        self._blind = False
        self._growing: asyncio.Task[None] | None = None
        self._end: tuple[pb.Usage, pb.Served | None, int] | None = None
        self._watch()

    def cost(self, completion: int) -> int:
        """Of that much output, nothing cached."""
        return self.policy.cost(self.job.served, len(self.job.token_ids), 0, completion)

    def _watch(self) -> None:
        """Say at which output something has to be done."""
        counted = self.policy.budget.amount or self.policy.tokens_per_minute
        if not counted or self.covered >= self.most:
            self._next = NEVER
        elif self._exhausted:
            self._next = self.covered
        elif self._blind:
            # Each time half of what is left later: seldom, and at last when there is nothing.
            self._next = min(self.covered, self._used + max(1, (self.covered - self._used) // 2))
        else:
            self._next = self.covered * SHORT

    def used(self, completion_tokens: int) -> None:
        """See Hold."""
        if completion_tokens < self._next:
            return
        self._used = completion_tokens
        if completion_tokens >= self.covered and (self._exhausted or self._blind):
            self._next = NEVER
            metrics.counter(names.LIMITS_STOPPED).inc()
            self._stop(exceeded(self.policy) if self._exhausted else unknown())
        elif self._growing is None and self._end is None:
            step = (
                min(self.most, max(self.covered, completion_tokens) + max(MIN_STEP, self.covered // 2)) - self.covered
            )
            self._growing = self._owner.spawn(self, step)

    def short(self, completion_tokens: int) -> bool:
        """See Hold."""
        budget = self.policy.budget.amount
        return bool(budget) and completion_tokens > self.covered and completion_tokens >= self._next

    async def cover(self, completion_tokens: int) -> None:
        """See Hold."""
        while self.short(completion_tokens):
            self.used(completion_tokens)
            if self._growing is None:
                break
            await asyncio.wait({self._growing})

    async def grow(self, step: int) -> None:
        """Take as much as `step` more output tokens cost."""
        try:
            want = max(0, self.cost(self.covered + step) - self.held)
            got = await self._owner.top_up(self, want, step)
            if got is None:
                outcome = "away"
                if self._owner.strict and self.policy.budget.amount:
                    # Asked for again before what there is runs out.
                    self._blind = True
                else:
                    # Charged at the end, whatever it is.
                    self.held += want
                    self.covered += step
            else:
                self._blind = False
                granted, self.held = got
                self._exhausted = granted < want
                self.covered = self.covered + step if granted >= want else self._covers(step)
                outcome = "part" if self._exhausted else "whole"
            metrics.counter(names.LIMITS_TOP_UPS).labels(outcome).inc()
        finally:
            self._growing = None
            if self._end is not None:
                self._owner.settled(self, *self._end)
            else:
                self._watch()
                self.used(self._used)

    def _covers(self, step: int) -> int:
        """Output tokens up to `covered + step` that what is held is enough for."""
        low, high = 0, self.covered + step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cost(middle) <= self.held else (low, middle - 1)
        return low

    def settle(self, usage: pb.Usage, served: pb.Served | None, code: int) -> None:
        """See Hold."""
        if self._end is not None:
            return
        self._end = (usage, served, code)
        self._next = NEVER
        # What is on its way to Redis must be there before the end is.
        if self._growing is None:
            self._owner.settled(self, usage, served, code)


def most_of(job: Counted) -> int:
    """Output tokens that a job may cost: of all choices that run, whether they are returned or not."""
    return job.sampling.max_tokens * max(1, job.sampling.n, job.sampling.best_of)


def unknown() -> Unavailable:
    """Nobody knows what is left."""
    return Unavailable("budgets cannot be checked now", retry_after=RETRY_S, details={"limit": "budget"})


def exceeded(policy: Policy, spent: int | None = None) -> BudgetExceeded:
    """There is nothing left, or, of what was `spent`, too little for a request."""
    period = {"day": " of the day", "month": " of the month", "none": ""}[policy.budget.period]
    text = f"this tenant's budget{period} is spent"
    if spent is not None and spent < policy.budget.amount:
        text = f"what is left of this tenant's budget{period} is less than this request may use: ask for fewer tokens"
    return BudgetExceeded(text, details={"limit": "budget"})
