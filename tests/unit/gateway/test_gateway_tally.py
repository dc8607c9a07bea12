"""Goodput, sums by tenant, the tokens and times of the line: what the gateway's metrics count, and what they do not."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.trace import INVALID_SPAN

from gateway_fakes import MODEL
from gateway_world import World, end_of, next_event
from kvmesh.errors import (
    BudgetExceeded,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvmeshError,
    Overloaded,
)
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import hash_key
from kvmesh.telemetry import metrics, names
from services.gateway.inbox import SlowReader
from services.gateway.observe import Observer
from services.gateway.tally import OTHER, OUTCOMES, Tallies, TenantNames


class Counted:
    """What a metric has gained since this was made."""

    def __init__(self, metric: names.Metric, label: str, values: Iterable[str], **fixed: str) -> None:
        self._read = lambda: {value: metrics.value(metric, **{label: value, **fixed}) for value in values}
        self._before = self._read()

    @property
    def gained(self) -> dict[str, float]:
        return {value: now - self._before[value] for value, now in self._read().items() if now != self._before[value]}


def slo(model: str = MODEL) -> Counted:
    return Counted(names.SLO_REQUESTS, "outcome", OUTCOMES, model_name=model)


def outcomes(tenant: str) -> Counted:
    values = ("ok", "failed", "refused", "cancelled")
    return Counted(names.TENANT_REQUESTS, "outcome", values, tenant=tenant)


def tokens(tenant: str) -> Counted:
    return Counted(names.TENANT_TOKENS, "kind", ("prompt", "completion", "cached"), tenant=tenant)


# --- what is good
def observed(times: Iterable[tuple[int, int, float]], model: str, tallies: Tallies) -> Observer:
    """Of a request that came at 0: (choice, tokens, when) in order."""
    observer = Observer(INVALID_SPAN, "chat", model, 0.0, tallies.begin("t"))
    for choice, count, at in times:
        observer.tokens(choice, count, at)
    return observer


@pytest.mark.parametrize(
    ("times", "outcome"),
    [
        ([(0, 1, 2.0), (0, 1, 2.1), (0, 1, 2.2)], "good"),
        ([(0, 1, 2.01), (0, 1, 2.02)], "late_first_token"),
        ([(0, 1, 1.0), (0, 1, 1.05), (0, 1, 1.4)], "slow_tokens"),
        # Tokens that come together: ten in a second are a tenth of a second each.
        ([(0, 1, 1.0), (0, 10, 2.0)], "good"),
        # The slowest choice counts.
        ([(0, 1, 0.1), (1, 1, 0.1), (0, 5, 0.2), (1, 1, 0.5)], "slow_tokens"),
        ([(0, 1, 0.5)], "good"),
        ([], "good"),
    ],
)
def test_a_request_is_good_when_it_is_in_time(times: Any, outcome: str) -> None:
    # Halves and eighths of the targets would hide nothing; a float's last digit must not decide.
    counted = slo("a model")
    observed(times, "a model", Tallies(2.0, 0.1000001)).finished(pb.Usage(), ["stop"])
    assert counted.gained == {outcome: 1.0}


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (Internal("x"), True),
        (DeadlineExceeded("x"), True),
        (Overloaded("x"), True),
        (Cancelled("x"), False),
        (SlowReader("x"), False),
        (InvalidArgument("x"), False),
        (BudgetExceeded("x"), False),
    ],
)
def test_what_its_client_spoiled_is_no_failure_of_ours(error: KvmeshError, counts: bool) -> None:
    counted = slo("a model")
    observed([(0, 1, 0.1)], "a model", Tallies()).failed(pb.Usage(), error)
    assert counted.gained == ({"failed": 1.0} if counts else {})


# --- tenants
def test_only_so_many_tenants_have_a_name() -> None:
    tenants = TenantNames(2)
    assert [tenants.label(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
    assert TenantNames(0).label("a") == OTHER


def test_processes_share_the_names(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    processes = [TenantNames(10, file) for _ in range(4)]
    tenants = [f'tenant "{number}"\n' for number in range(40)]

    def ask(one: TenantNames) -> set[str]:
        return {one.label(tenant) for tenant in tenants} - {OTHER}

    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(ask, processes))
    # Whoever was in another's way then has the names now, and whoever comes later.
    named = ask(processes[0])
    assert len(named) == 10
    assert named >= set().union(*at_once)
    assert [ask(one) for one in (*processes, TenantNames(10, file))] == [named] * 5


def test_nobody_waits_for_a_process_that_holds_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    tenants = TenantNames(10, file)
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert tenants.label("a") == OTHER
    assert tenants.label("a") == "a", "its next request has the name"


def test_without_the_file_nobody_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{no json\n")
    for file in (tmp_path / "broken", tmp_path / "no" / "folder"):
        tenants = TenantNames(10, file)
        assert [tenants.label("a"), tenants.label("b")] == [OTHER, OTHER]


# --- in a gateway
@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of them; the mesh has a token, as a gateway that names tenants must."""
    token = tmp_path / "token"
    token.write_text("mesh-token-for-tests\n")
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(token))
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(f'[[keys]]\nsha256 = "{hash_key(f"key-{name}")}"\ntenant = "{name}"\n' for name in ("ta", "tb", "tc"))
        + "[tenants.tb]\nmodels = ['other']\n[tenants.tc]\npriority = 5\n"
    )
    return file


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer key-{tenant}"),)


async def test_requests_are_counted_for_the_tenant_of_their_key(world: World, keys: Path) -> None:
    await world.worker()
    await world.router()
    await world.start(credentials_file=keys)
    goodput, ta, tb, used = slo(), outcomes("ta"), outcomes("tb"), tokens("ta")
    first = metrics.value(names.TENANT_TTFT, tenant="ta")
    await world.ask(metadata=bearer("ta"))
    assert (await end_of(world.chat(metadata=bearer("tb")))).code() is grpc.StatusCode.PERMISSION_DENIED
    assert (await end_of(world.chat(metadata=(("authorization", "Bearer nobody"),)))).code() is (
        grpc.StatusCode.UNAUTHENTICATED
    )
    assert goodput.gained == {"good": 1.0}, "what was never let in says nothing about the service"
    assert ta.gained == {"ok": 1.0}
    assert tb.gained == {"refused": 1.0}
    assert used.gained["completion"] == 6
    assert used.gained["prompt"] > 0
    assert metrics.value(names.TENANT_TTFT, tenant="ta") == first + 1


async def test_a_client_that_leaves_is_counted_as_cancelled(world: World) -> None:
    worker = await world.worker(text=None)
    await world.router()
    await world.start()
    goodput, local = slo(), outcomes("local")
    call = world.chat()
    (request,) = await worker.submits.wait()
    worker.tokens(request, [65])
    await next_event(call)
    call.cancel()
    await world.until(world.idle)
    await world.until(lambda: local.gained)
    assert local.gained == {"cancelled": 1.0}
    assert goodput.gained == {}


async def test_series_of_a_served_model_begin_at_zero(world: World) -> None:
    await world.worker(model="fresh-model", text="x")
    await world.router()
    await world.start(model="")
    for outcome in OUTCOMES:
        labels = {"model_name": "fresh-model", "outcome": outcome}
        assert metrics.REGISTRY.get_sample_value(names.SLO_REQUESTS.name, labels) == 0.0
    for metric, labels in (
        (names.REQUEST_FAILURE, {"reason": "UNAVAILABLE"}),
        (names.REQUEST_SUCCESS, {"finished_reason": "stop"}),
        (names.GATEWAY_QUEUE_DELAY, {}),
        (names.GATEWAY_WAITING_TOKENS, {}),
    ):
        assert metrics.REGISTRY.get_sample_value(metric.name, {"model_name": "fresh-model", **labels}) == 0.0


async def test_a_gateway_that_never_heard_of_a_worker_says_that_it_has_none(world: World) -> None:
    # The gauge of another test's gateway in this process.
    metrics.gauge(names.GATEWAY_WORKERS).clear()
    await world.start(ready=False)
    for state in ("open", "connecting"):
        assert metrics.REGISTRY.get_sample_value(names.GATEWAY_WORKERS.name, {"state": state}) == 0.0


async def test_the_line_tells_its_tokens_and_times_by_priority(world: World, keys: Path) -> None:
    worker = await world.worker()
    await world.router()
    await world.start(credentials_file=keys)

    def waiting() -> float:
        return metrics.value(names.GATEWAY_WAITING_TOKENS, model_name=MODEL)

    waited = Counted(names.GATEWAY_QUEUE_TIME, "priority", ("low", "normal", "high"), model_name=MODEL)
    worker.fill()
    asked = [asyncio.create_task(world.ask("x" * 50, metadata=bearer(tenant))) for tenant in ("ta", "tc")]
    await world.until(lambda: len(world.gateway.queue) == 2)
    assert waiting() >= 100
    worker.empty()
    await asyncio.gather(*asked)
    assert waiting() == 0
    assert waited.gained == {"normal": 1.0, "high": 1.0}
