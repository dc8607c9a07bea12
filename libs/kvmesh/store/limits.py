"""Limits of tenants in Redis: rates, requests at a time, budgets, and what was used.

A request takes all of them in one step and gets a hold: a lease on one place and on what it may cost, that lapses
unless it is renewed, so that a gateway that dies holds nothing for long. At its end it is settled: what it cost is
spent, and the hold ends.

Settlements of one journal (a gateway process, as a rule) are numbered and come in order. Redis remembers the last
number of each, so that one that is told twice counts once.

All keys of a tenant share a slot:

    kvmesh:{l:<tenant>}:r             hash   levels of its rates
    kvmesh:{l:<tenant>}:h             zset   holds, by when they lapse
    kvmesh:{l:<tenant>}:a             hash   what each of them holds
    kvmesh:{l:<tenant>}:s:<period>    string what was spent in a period (`Budget.name`)
    kvmesh:{l:<tenant>}:u:<day>       hash   `<what>:<model>` -> a sum
    kvmesh:{l:<tenant>}:q:<journal>   string number of the last settlement of a journal
    kvmesh:usage:<day>                set    tenants that used something that day; in a slot of its own

No call raises for Redis being away, slow or gone: the answer is None then. Times are milliseconds of Redis' own clock.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvmesh.store.client import RedisStore
from kvmesh.store.limit_scripts import FIGURES, RENEW, SETTLE, TAKE, TOP_UP

DAY_MS = 86_400_000
SPENT_MS = 400 * DAY_MS
"""How long a day's or a month's spend is remembered; that without a period is for ever."""

USAGE_MS = 400 * DAY_MS
SEEN_MS = 7 * DAY_MS
"""How long a settlement that was told may be told again."""

MAX_BATCH = 500
MAX_KNOWN = 100_000
METRICS = ("requests", "prompt", "cached", "completion", "tokens", "money")

Verdict = Literal["ok", "requests", "tokens", "concurrent", "spent", "held"]
"""What stands in the way. `held`: the budget would do, were it not for what running requests hold of it."""


class Terms(NamedTuple):
    """A tenant's limits; 0 = none. `period`: as `Budget.name` has it."""

    requests_per_minute: int
    tokens_per_minute: int
    max_concurrent: int
    amount: int
    period: str


class Taken(NamedTuple):
    """Figures just after. `*_reset_ms`: until all are back."""

    verdict: Verdict
    wait_ms: int
    running: int
    spent: int
    held: int
    requests_left: int
    requests_reset_ms: int
    tokens_left: int
    tokens_reset_ms: int


class Figures(NamedTuple):
    """A tenant's budget now: spent in the period, held by running requests, and how many those are."""

    spent: int
    held: int
    running: int


@dataclass(frozen=True, slots=True)
class Spend:
    """A settlement: what one request has used. `used`: tokens that its rate is charged; `number` counts a journal's."""

    number: int
    tenant: str
    hold: str
    period: str
    at: float
    tokens_per_minute: int
    cost: int
    used: int
    model: str
    prompt: int
    cached: int
    completion: int
    request_id: str
    key: str = ""
    cache: str = ""
    code: int = 0

    @property
    def unit(self) -> str:
        """Of the cost: tokens or money."""
        return self.period.partition(":")[0]


class DayUsage(NamedTuple):
    """What a tenant used on a day: model -> sums of METRICS, those that are not zero at least."""

    tenant: str
    day: str
    models: dict[str, dict[str, int]]


class TenantKeys(NamedTuple):
    """Where a tenant's limits are."""

    tenant: str

    def of(self, *parts: str) -> str:
        """Key of a part."""
        return f"kvmesh:{{l:{self.tenant}}}:{':'.join(parts)}"

    @property
    def rates(self) -> str:
        """Levels of its rates."""
        return self.of("r")

    @property
    def leases(self) -> str:
        """Holds by when they lapse."""
        return self.of("h")

    @property
    def amounts(self) -> str:
        """What each holds."""
        return self.of("a")

    def spent(self, period: str) -> str:
        """Spend of a period."""
        return self.of("s", period)

    def usage(self, day: str) -> str:
        """Sums of a day."""
        return self.of("u", day)

    def seen(self, journal: str) -> str:
        """Last settlement of a journal."""
        return self.of("q", journal)


def day_set(day: str) -> str:
    """Key of the tenants of a day."""
    return f"kvmesh:usage:{day}"


class LimitStore:
    """Limits over all gateways. `clock_ms` is for tests: what Redis' clock is to show."""

    def __init__(self, store: RedisStore, *, hold_ms: int, take_s: float) -> None:
        """hold_ms: life of a hold that is not renewed. take_s: seconds that a request waits at most."""
        self._store = store
        self._hold_ms = hold_ms
        self._take_s = take_s
        self._listed: set[tuple[str, str]] = set()
        store.on_connect.append(self._forget)
        self.clock_ms: int | None = None

    @property
    def store(self) -> RedisStore:
        """The connection."""
        return self._store

    def _clock(self) -> str:
        return "" if self.clock_ms is None else str(self.clock_ms)

    async def _forget(self, client: Any) -> None:
        """It may have come back empty."""
        self._listed.clear()

    async def take(self, tenant: str, hold: str, terms: Terms, *, cost: int, tokens: int) -> Taken | None:
        """All limits in one step: with verdict `ok` the hold is there, with any other nothing has changed."""
        keys = TenantKeys(tenant)
        reply = await self._store.script(
            TAKE,
            [keys.rates, keys.leases, keys.amounts, keys.spent(terms.period)],
            [self._clock(), hold, self._hold_ms, *terms[:4], cost, tokens],
            timeout_s=self._take_s,
        )
        return None if reply is None else Taken(_text(reply[0]), *(int(part) for part in reply[1:]))  # type: ignore[arg-type]

    async def top_up(
        self,
        tenant: str,
        hold: str,
        *,
        amount: int,
        period: str,
        held: int,
        most: int,
        tokens_per_minute: int = 0,
        tokens: int = 0,
    ) -> tuple[int, int] | None:
        """More for a running request: what was granted of `most` (as far as the budget goes), and what it holds now.
        `held`: what it holds as far as the gateway knows. `tokens`: what its rate is charged besides."""
        keys = TenantKeys(tenant)
        reply = await self._store.script(
            TOP_UP,
            [keys.leases, keys.amounts, keys.spent(period), keys.rates],
            [self._clock(), hold, self._hold_ms, amount, held, most, tokens_per_minute, tokens],
            write=True,
        )
        return None if reply is None else (int(reply[0]), int(reply[1]))

    async def renew(self, tenant: str, holds: Sequence[tuple[str, int]]) -> bool:
        """Keep holds (id, cost); one that Redis does not know is made. False when Redis is away."""
        keys = TenantKeys(tenant)
        for begin in range(0, len(holds), MAX_BATCH):
            args = [part for hold in holds[begin : begin + MAX_BATCH] for part in hold]
            reply = await self._store.script(
                RENEW, [keys.leases, keys.amounts], [self._clock(), self._hold_ms, *args], write=True
            )
            if reply is None:
                return False
        return True

    async def settle(self, journal: str, spends: Sequence[Spend]) -> list[Spend]:
        """Charge settlements of a journal. Those returned may not have been: tell them again, in this order and before
        any later one of their tenants."""
        spends = sorted(spends, key=lambda spend: (spend.tenant, spend.number))
        left: list[Spend] = []
        begin = 0
        while begin < len(spends):
            end = begin + 1
            while end < min(len(spends), begin + MAX_BATCH) and _together(spends[begin], spends[end]):
                end += 1
            batch = spends[begin:end]
            # What comes after one that failed waits with it.
            if (left and left[-1].tenant == batch[0].tenant) or not await self._settle(journal, batch):
                left += batch
            begin = end
        return sorted(left, key=lambda spend: spend.number)

    async def _settle(self, journal: str, spends: Sequence[Spend]) -> bool:
        first, last = spends[0], spends[-1]
        keys, day = TenantKeys(first.tenant), day_of(first.at)
        if (first.tenant, day) not in self._listed:
            if await self._store.run("limit_list", lambda client: _list(client, day, first.tenant), None) is None:
                return False
            if len(self._listed) >= MAX_KNOWN:
                self._listed.clear()
            self._listed.add((first.tenant, day))
        args: list[str | int] = []
        for spend in spends:
            args += [spend.number, spend.hold, spend.cost, spend.used]
            args += [spend.model, spend.prompt, spend.cached, spend.completion]
        spent_ms = 0 if first.period.endswith(":all") else SPENT_MS
        reply = await self._store.script(
            SETTLE,
            [
                *(keys.rates, keys.leases, keys.amounts, keys.spent(first.period)),
                *(keys.usage(day), keys.seen(journal)),
            ],
            [self._clock(), last.tokens_per_minute, spent_ms, USAGE_MS, SEEN_MS, first.unit, *args],
            write=True,
        )
        return reply is not None

    async def figures(self, tenant: str, period: str) -> Figures | None:
        """How a tenant's budget stands."""
        keys = TenantKeys(tenant)
        reply = await self._store.script(
            FIGURES, [keys.leases, keys.amounts, keys.spent(period)], [self._clock()], write=True
        )
        return None if reply is None else Figures(*(int(part) for part in reply))

    async def usage(self, tenant: str, days: Sequence[str]) -> list[DayUsage] | None:
        """Sums of the days on which there are any."""
        keys = TenantKeys(tenant)

        async def ask(client: Any) -> list[DayUsage]:
            out = []
            for day in days:
                models: dict[str, dict[str, int]] = {}
                for field, value in (await client.hgetall(keys.usage(day))).items():
                    what, _, model = _text(field).partition(":")
                    models.setdefault(model, {})[what] = int(value)
                if models:
                    out.append(DayUsage(tenant, day, models))
            return out

        return await self._store.run("limit_usage", ask, None)

    async def tenants(self, days: Sequence[str]) -> set[str] | None:
        """Tenants that used something on any of the days."""

        async def ask(client: Any) -> set[str]:
            return {_text(name) for day in days for name in await client.smembers(day_set(day))}

        return await self._store.run("limit_tenants", ask, None)


def day_of(at_s: float) -> str:
    """The day (UTC) of a moment."""
    return dt.datetime.fromtimestamp(at_s, dt.UTC).date().isoformat()


def _together(one: Spend, other: Spend) -> bool:
    """Whether two settlements lie under the same keys."""
    return (one.tenant, one.period, day_of(one.at)) == (other.tenant, other.period, day_of(other.at))


async def _list(client: Any, day: str, tenant: str) -> bool:
    await client.sadd(day_set(day), tenant)
    await client.pexpire(day_set(day), USAGE_MS)
    return True


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
