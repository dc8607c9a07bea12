"""What requests add up to: goodput against the service level, and sums by tenant.

Goodput counts every request that was let in and ended, except those that their client gave up or sent wrong: `good`
came in time, `late_first_token` and `slow_tokens` did not, `failed` is everything else. Tenants come from credentials;
only so many have series of their own, in all processes of a gateway together, the others are `other`.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.telemetry import metrics, names
from services.gateway.access import AccessLine

OTHER = "other"
OUTCOMES = ("good", "late_first_token", "slow_tokens", "failed")
TENANT_OUTCOMES = ("ok", "failed", "refused", "cancelled")
KINDS = ("prompt", "completion", "cached")

KNOWN: tuple[tuple[names.Metric, tuple[str | tuple[str, ...], ...]], ...] = (
    (names.GATEWAY_HEALS, (("ok", "failed"),)),
    (names.GATEWAY_REFUSED, (("late", "full", "shed"),)),
    (names.GATEWAY_FLIGHTS, (("lead", "follow", "again", "lost", "takeover", "alone"),)),
    (names.GATEWAY_DEGRADED, ()),
    (names.GATEWAY_SLOW_READERS, ()),
    (names.LIMITS_REFUSED, (("requests_per_minute", "tokens_per_minute", "max_concurrent", "budget"),)),
    (names.HEARTBEATS_MISSED, (("worker", "router"),)),
    (names.LIMITS_LOCAL, ()),
    (names.LIMITS_STOPPED, ()),
    (names.LIMITS_LOST, ()),
    (names.LIMITS_DISK, ()),
    (names.LIMITS_TOP_UPS, (("whole", "part", "away"),)),
    (names.LIMITS_UNSETTLED, ()),
    (names.LIMITS_HOLDS, ()),
    (names.GATEWAY_ACTIVE, ()),
    (names.GATEWAY_WAITING, ()),
)
"""Series of a gateway that begin at 0."""

FAILURES = ("CANCELLED", "UNAVAILABLE", "WORKER_LOST", "DEADLINE_EXCEEDED", "OVERLOADED", "INTERNAL")
"""The commonest reasons, of each model."""

# Ends of a request that say nothing about the service: its own fault, or its tenant's.
_OWN_FAULT = frozenset(
    {
        *("CANCELLED", "SLOW_READER", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNAUTHENTICATED"),
        *("PERMISSION_DENIED", "TOO_LARGE", "BUDGET_EXCEEDED", "NOT_CACHED"),
    }
)


class TenantNames:
    """Which tenants have series of their own: the first `limit`.

    `shared`: a file that several processes keep the names in. It is read and written once for each new tenant, and
    never again once it is full. Nobody waits for it: while another process is at it, the request at hand is one of
    `other`'s, and the tenant's next one asks again.
    """

    def __init__(self, limit: int, shared: Path | None = None) -> None:
        self._limit = limit
        self._shared = shared
        self._names: set[str] = set()

    def label(self, tenant: str) -> str:
        """The tenant, or `other`."""
        if tenant in self._names:
            return tenant
        if len(self._names) < self._limit:
            self._take(tenant)
        return tenant if tenant in self._names else OTHER

    def _take(self, tenant: str) -> None:
        if self._shared is None:
            self._names.add(tenant)
            return
        try:
            with self._shared.open("a+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.seek(0)
                self._names.update(json.loads(line) for line in file)
                if tenant not in self._names and len(self._names) < self._limit:
                    file.seek(0, os.SEEK_END)
                    file.write(json.dumps(tenant) + "\n")
                    self._names.add(tenant)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            # Without the file nobody knows what the others have: no new names.
            self._limit = 0


class _Tenant:
    """The series of one tenant."""

    def __init__(self, label: str) -> None:
        requests, tokens = metrics.counter(names.TENANT_REQUESTS), metrics.counter(names.TENANT_TOKENS)
        self.outcomes = {outcome: requests.labels(label, outcome) for outcome in TENANT_OUTCOMES}
        self.tokens = {kind: tokens.labels(label, kind) for kind in KINDS}
        self.ttft = metrics.histogram(names.TENANT_TTFT).labels(label)


class Tallies:
    """The sums of this process. Targets in seconds."""

    def __init__(self, slo_ttft_s: float = 2.0, slo_tpot_s: float = 0.1, tenants: TenantNames | None = None) -> None:
        self._ttft_s = slo_ttft_s
        self._tpot_s = slo_tpot_s
        self._names = tenants or TenantNames(100)
        self._tenants: dict[str, _Tenant] = {}
        for metric, values in KNOWN:
            metrics.at_zero(metric, *values)

    def serves(self, model: str) -> None:
        """A model is served now: its series begin at 0."""
        metrics.at_zero(names.SLO_REQUESTS, model, OUTCOMES)
        metrics.at_zero(names.REQUEST_SUCCESS, model, ("stop", "length"))
        metrics.at_zero(names.REQUEST_FAILURE, model, FAILURES)
        # Nobody has lined up yet; autoscalers take what is missing for a fault of theirs.
        metrics.at_zero(names.GATEWAY_QUEUE_DELAY, model)
        metrics.at_zero(names.GATEWAY_WAITING_TOKENS, model)

    def begin(self, tenant: str, line: AccessLine | None = None) -> Tally:
        """A request of this tenant has come; `line` is told what becomes of it."""
        label = self._names.label(tenant)
        series = self._tenants.get(label)
        if series is None:
            series = self._tenants[label] = _Tenant(label)
        return Tally(self, series, line)

    def judge(self, model: str, ttft_s: float | None, tpot_s: float) -> None:
        """A request went well: in time or not. One without a token (max_tokens reached by its prompt) was in time."""
        if ttft_s is not None and ttft_s > self._ttft_s:
            outcome = "late_first_token"
        else:
            outcome = "slow_tokens" if tpot_s > self._tpot_s else "good"
        metrics.counter(names.SLO_REQUESTS).labels(model, outcome).inc()


class Tally:
    """One request's part. The first end counts."""

    __slots__ = ("_ended", "_line", "_series", "_tallies")

    def __init__(self, tallies: Tallies, series: _Tenant, line: AccessLine | None) -> None:
        self._tallies = tallies
        self._line = line
        self._series = series
        self._ended = False

    def first_token(self, ttft_s: float) -> None:
        """It reached the client."""
        self._series.ttft.observe(ttft_s)
        if self._line is not None:
            self._line.ttft_ms = ttft_s * 1e3

    def used(self, usage: pb.Usage) -> None:
        """At the end, whatever that was."""
        tokens = self._series.tokens
        tokens["prompt"].inc(usage.prompt_tokens)
        tokens["completion"].inc(usage.completion_tokens)
        tokens["cached"].inc(usage.cached_tokens)
        if self._line is not None:
            self._line.usage = usage

    def finished(self, model: str, ttft_s: float | None, tpot_s: float) -> None:
        """It went well. `tpot_s`: seconds a token after the first, of the slowest choice."""
        if not self._ended:
            self._end("ok")
            self._tallies.judge(model, ttft_s, tpot_s)

    def failed(self, error: KvmeshError, model: str = "") -> None:
        """`model`: once it is known and the request was let in."""
        if self._ended:
            return
        reason = error.reason
        outcome = "cancelled" if reason == "CANCELLED" else "refused" if reason in names.REFUSALS else "failed"
        self._end(outcome, reason)
        if model and reason not in _OWN_FAULT:
            metrics.counter(names.SLO_REQUESTS).labels(model, "failed").inc()

    def left(self) -> None:
        """Its handler ends; nothing where the end is known."""
        if not self._ended:
            self._end("cancelled")

    def _end(self, outcome: str, reason: str = "") -> None:
        self._ended = True
        if self._line is not None:
            self._line.outcome, self._line.reason = outcome, reason
        self._series.outcomes[outcome].inc()
