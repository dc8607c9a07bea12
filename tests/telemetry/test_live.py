"""A mesh under load, scraped by a real Prometheus and traced through a real collector: every query of every dashboard,
rule and autoscaler has an answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.telemetry import tracing
from load_kit import Load, Loaded, kill_and_heal, loaded_mesh
from mesh_kit import until
from otlp_kit import Receiver, Seen, collector, orphans
from prometheus_kit import Prometheus, prometheus
from queries import Query, alerts, autoscaling, panels, recorded, selectors, variables

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICES = {"gateway", "router", "decode", "prefill", "kvtransfer"}
PATIENCE_S = 60.0

# What the load is for: each of these grows, or the panels above would show nothing but zeros.
TOUCHED = (
    'kvmesh:cache_lookups_total{cache="exact",result="hit"}',
    'kvmesh:cache_lookups_total{cache="semantic",result="hit"}',
    'kvmesh:cache_lookups_total{cache="exact",result="follow"}',
    'kvmesh:gateway_flights_total{role="lead"}',
    'kvmesh:gateway_heals_total{outcome="ok"}',
    'kvmesh:gateway_queue_time_seconds_count{priority="low"}',
    'kvmesh:gateway_queue_time_seconds_count{priority="high"}',
    'kvmesh:limits_refused_total{limit="requests_per_minute"}',
    'kvmesh:auth_failures_total{cause="key"}',
    'kvmesh:tenant_requests_total{outcome="cancelled"}',
    'kvmesh:slo_requests_total{outcome="good"}',
    'kvmesh:rpc_handled_total{method="POST /v1/chat/completions",code="200"}',
    'kvmesh:rpc_handled_total{method="POST /v1/chat/completions",code="400"}',
    'kvmesh:transfer_bytes_total{direction="in"}',
    "kvmesh:transfer_exposed_seconds_count",
    "kvmesh:prefix_cache_hits_total",
    'kvmesh:router_placements_total{role="decode"}',
)

# What has no series in this mesh, each with its reason. Keys are parts of a query's place.
EMPTY = {
    "kvmesh-router / Classes": "classes are off by default",
    "KvmeshBackgroundTaskFailed": "its series appears with the first failure, which the rule allows for",
}


# Of what alerts look at, before the first request; all else is there as soon as the services are.
LATER = {
    **EMPTY,
    "KvmeshSloBurn": "a share of the requests that there were",
    "KvmeshTtftHigh": "no first token yet",
    "KvmeshTpotHigh": "no token yet",
    "KvmeshRoutersAway: kvmesh:tenant_requests_total": "tenants are not known before",
}


@dataclass
class Live:
    """What runs while the tests ask."""

    loaded: Loaded
    prometheus: Prometheus
    receiver: Receiver
    load: Load

    async def answered(self, queries: Iterable[Query], told: bool = True, without: Iterable[str] = EMPTY) -> None:
        """Until every query has an answer (with `told`: a number that is not NaN), but for those whose place begins
        with one of `without`; which have none is named."""
        left = [query for query in queries if not query.where.startswith(tuple(without))]
        assert left

        async def none_left() -> bool:
            self.prometheus.follow(self.loaded.targets())
            nonlocal left
            answers = [await self.prometheus.query(query.expression) for query in left]
            left = [
                query
                for query, samples in zip(left, answers, strict=True)
                if not any(sample.told or not told for sample in samples)
            ]
            return not left

        # On a busy machine the first look at all of them may take as long as they may take to come.
        if await none_left():
            return
        try:
            await until(none_left, "every query answered", timeout_s=PATIENCE_S, every_s=0.5)
        except AssertionError as error:
            named = "\n".join(f"  {query.where}\n    {query.expression}" for query in left)
            raise AssertionError(f"{error}\nwithout an answer:\n{named}\nload: {self.load}") from None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder: Path = tmp_path_factory.mktemp("live")
    async with contextlib.AsyncExitStack() as stack:
        receiver, endpoint = await stack.enter_async_context(collector(folder))
        server, loaded = await asyncio.gather(
            stack.enter_async_context(prometheus(folder)), stack.enter_async_context(loaded_mesh(folder, endpoint))
        )
        made = Live(loaded, server, receiver, Load(loaded))
        server.follow(loaded.targets())
        await until(lambda: server.value('count(up{job=~"kvmesh-.*"} == 1) >= 7'), "every process scraped", every_s=0.2)
        # Nothing was asked yet: an alert must not need luck, or the fault itself, to have something to look at.
        await made.answered(selectors(), without=LATER)
        # Traces that this process begins are sampled whole; those of the load 5 in 100.
        tracing.setup("client", otlp_endpoint=endpoint)
        try:
            await made.load.once()
            await made.load.followed()
            async with loaded.client("acme") as client:
                await kill_and_heal(loaded.mesh, client)
        finally:
            await asyncio.to_thread(tracing.shutdown, 30.0)
        task = asyncio.create_task(made.load.run())
        try:
            yield made
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_every_panel_of_every_dashboard_shows_something(live: Live) -> None:
    await live.answered(panels())


async def test_the_load_touches_what_is_measured(live: Live) -> None:
    await live.answered(Query(series, f"sum({series}) > 0") for series in TOUCHED)


async def test_every_variable_has_values(live: Live) -> None:
    await live.answered(variables())


async def test_rules_evaluate_and_recorded_series_are_there(live: Live) -> None:
    await live.answered(recorded())
    for group in (await live.prometheus.get("rules"))["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", f"{rule['name']}: {rule.get('lastError')}"


async def test_alerts_look_at_series_that_are_there(live: Live) -> None:
    await live.answered(selectors())
    for alert in alerts():
        await live.prometheus.query(alert.expression)


async def test_autoscalers_get_an_answer(live: Live) -> None:
    await live.answered(autoscaling())


async def test_a_killed_worker_raises_the_alert(live: Live) -> None:
    firing = 'ALERTS{alertname="KvmeshWorkerLost",alertstate="firing"}'
    await until(lambda: live.prometheus.value(firing), "the alert of a lost worker", timeout_s=PATIENCE_S)
    assert not await live.prometheus.query('ALERTS{alertname="KvmeshHealsFail",alertstate="firing"}')


async def eventually(find: Callable[[], Any], what: str, live: Live) -> Any:
    """What `find` finds, once spans have come; each process sends in batches, so a span may come before its parent."""
    try:
        return await until(find, what, timeout_s=PATIENCE_S, every_s=0.2)
    except AssertionError as error:
        spans = Counter((span.service, span.name, len(span.links)) for span in live.receiver.all())
        raise AssertionError(f"{error}; spans by service, name and links: {spans}") from None


async def test_one_trace_has_spans_of_every_service_and_no_orphan(live: Live) -> None:
    def whole() -> list[Seen]:
        return next(
            (
                spans
                for spans in live.receiver.traces.values()
                if {span.service for span in spans} >= SERVICES | {"client"} and not orphans(spans)
            ),
            [],
        )

    spans = await eventually(whole, "a trace of every service", live)
    assert [span.service for span in spans if not span.parent] == ["client"]


async def test_a_heal_and_a_shared_generation_are_linked(live: Live) -> None:
    def linked(kind: str) -> tuple[Seen, Seen] | None:
        by_id = {(span.trace, span.id): span for span in live.receiver.all()}
        for span in by_id.values():
            for trace, other, attributes in span.links:
                if kind in attributes.values() and (trace, other) in by_id:
                    return span, by_id[trace, other]
        return None

    again, before = await eventually(lambda: linked("replaces"), "an attempt that replaces another", live)
    assert again.name == before.name == "gateway.attempt"
    assert again.trace == before.trace
    follower, leader = await eventually(lambda: linked("leader"), "a follower's leader", live)
    assert follower.name == "gateway.follow"
    assert leader.service == "gateway"
    assert follower.trace != leader.trace


async def test_metrics_are_scraped_by_the_names_that_they_have(live: Live) -> None:
    names = await live.prometheus.get("label/__name__/values")
    assert any(re.match("kvmesh:", name) for name in names)
    assert not [name for name in names if name.startswith("kvmesh_")]
