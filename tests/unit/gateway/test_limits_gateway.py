"""Limits as a client meets them: which status, with what to do about it, and what a request has cost in the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_world import World, end_of, kinds, next_event, rest
from kvmesh.errors import BudgetExceeded, Overloaded
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc import hash_key
from kvmesh.rpc.budget import Budget
from kvmesh.rpc.status import from_rpc_error
from kvmesh.store.limits import Figures, LimitStore
from limits_kit import LIMIT_S, Valkey, lines
from services.gateway.prepare import Preparer

CREDENTIALS = "".join(
    f"""
[[keys]]
sha256 = "{hash_key(name)}"
tenant = "{name}"
name = "key of {name}"
[tenants.{name}]
{limits}
"""
    for name, limits in {
        "rated": "requests_per_minute = 1",
        "small": 'budget = { amount = 3, period = "day" }',
        "long": 'budget = { amount = 2000, period = "day" }',
        "counted": 'budget = { amount = 1_000_000, period = "day" }',
        "free": "",
    }.items()
)


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest.fixture
def settings(world: World, valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "token").write_text("mesh-token-for-tests\n")
    (tmp_path / "keys.toml").write_text(CREDENTIALS)
    # Nothing here is about how fast this machine is.
    monkeypatch.setattr("services.gateway.app.REDIS_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr("services.gateway.limits.limiter.TAKE_S", LIMIT_S)
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(tmp_path / "token"))
    return {"credentials_file": tmp_path / "keys.toml", "redis_url": valkey.url, "limits": {"hold_s": 60}}


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def begin(world: World, **settings: Any) -> None:
    await world.start(**settings)
    assert world.gateway.redis is not None
    await asyncio.wait_for(world.gateway.redis.up.wait(), LIMIT_S)


async def figures(world: World, tenant: str) -> Figures:
    assert world.gateway.redis is not None
    store = LimitStore(world.gateway.redis, hold_ms=60_000, take_s=LIMIT_S)
    found = await store.figures(tenant, Budget(period="day").name(world.gateway.limits._wall()))
    assert found is not None
    return found


async def test_statuses_tell_whether_to_come_back(world: World, settings: Any) -> None:
    await world.worker()
    await begin(world, static=True, **settings)
    await world.ask(metadata=bearer("rated"))
    error = from_rpc_error(await end_of(world.chat(metadata=bearer("rated"))))
    assert isinstance(error, Overloaded)
    assert error.details["limit"] == "requests_per_minute"
    assert error.retry_after is not None
    assert 1 < error.retry_after <= 60

    raw = await end_of(world.chat(metadata=bearer("small")))
    assert raw.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(raw)
    assert isinstance(error, BudgetExceeded)
    assert error.retry_after is None
    assert error.details["limit"] == "budget"


async def test_who_is_over_a_limit_has_no_grammar_compiled(
    world: World, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[str] = []
    compile_ = Vocabulary.compile

    def noted(self: Vocabulary, source: GrammarSource) -> Any:
        compiled.append(source.text)
        return compile_(self, source)

    monkeypatch.setattr(Vocabulary, "compile", noted)
    await world.worker()
    settings["limits"]["usage_file"] = usage_file = tmp_path / "usage.jsonl"
    await begin(world, static=True, grammar_timeout_ms=60_000, **settings)
    # One that does not compile has been work as well.
    bad = world.chat(metadata=bearer("rated"), sampling={"grammar": pb.Grammar(regex="(")})
    assert from_rpc_error(await end_of(bad)).details["field"] == "grammar"
    assert compiled == ["("]
    error = from_rpc_error(
        await end_of(world.chat(metadata=bearer("rated"), sampling={"grammar": pb.Grammar(regex="a")}))
    )
    assert isinstance(error, Overloaded)
    assert error.details["limit"] == "requests_per_minute"
    assert compiled == ["("]
    async with asyncio.timeout(LIMIT_S):
        while not usage_file.exists() or not lines(usage_file):
            await asyncio.sleep(0.01)
    (line,) = map(json.loads, lines(usage_file))
    assert (line["code"], line["cost"]) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], 0)


async def test_who_leaves_while_a_grammar_compiles_has_cancelled(
    world: World, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiling = asyncio.Event()

    async def compile_for_ever(*_: Any) -> None:
        compiling.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Preparer, "check_grammar", compile_for_ever)
    await world.worker()
    settings["limits"]["usage_file"] = usage_file = tmp_path / "usage.jsonl"
    await begin(world, static=True, **settings)
    call = world.chat(metadata=bearer("free"))
    async with asyncio.timeout(LIMIT_S):
        await compiling.wait()
        call.cancel()
        while not usage_file.exists() or not lines(usage_file):
            await asyncio.sleep(0.01)
    (line,) = map(json.loads, lines(usage_file))
    assert (line["code"], line["cost"]) == (grpc.StatusCode.CANCELLED.value[0], 0)


async def test_a_stream_ends_where_the_budget_does_and_its_worker_stops(world: World, settings: Any) -> None:
    worker = await world.worker(max_model_len=8192)
    sending: list[asyncio.Task[None]] = []

    async def talk(request: Any) -> None:
        async def go() -> None:
            for first in range(0, 8000, 8):
                worker.tokens(request, list(b"eight of"), first)
                await asyncio.sleep(0.001)

        sending.append(asyncio.create_task(go()))

    worker.on_submit = talk
    await begin(world, static=True, **settings)
    call = world.chat(metadata=bearer("long"), sampling={"max_tokens": 4000})
    events = await rest(call)
    assert kinds(events) == ["accepted", "delta", "error"]
    assert events[-1].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert events[-1].error.reason == "BUDGET_EXCEEDED"
    await worker.aborts.wait()
    for task in sending:
        task.cancel()
    used = events[-1].error.usage
    async with asyncio.timeout(LIMIT_S):
        while (await figures(world, "long")) != (used.prompt_tokens + used.completion_tokens, 0, 0):
            await asyncio.sleep(0.01)
    assert used.prompt_tokens + used.completion_tokens > 1900


async def test_what_each_request_has_cost_is_exported(world: World, settings: Any, tmp_path: Path) -> None:
    await world.worker()
    router = await world.router()
    cached: list[bool] = []

    async def decide(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        if not cached:
            return router.placement(request)
        choice = router_pb2.CachedChoice(text="x", token_ids=[120, 257], finish_reason=pb.FINISH_REASON_STOP)
        answer = router_pb2.CachedAnswer(kind="exact", choices=[choice], score=1.0, revision="rev-1", prompt_tokens=3)
        return router_pb2.RouteResponse(answer=answer, model="scripted", decision_id="d")

    router.decide = decide
    usage_file = tmp_path / "usage.jsonl"
    settings["limits"]["usage_file"] = usage_file
    await begin(world, **settings)
    fresh = (await world.ask(metadata=bearer("counted"), request_id="one"))[-1].finished
    cached.append(True)
    await world.ask(metadata=bearer("counted"), request_id="two")
    # Of a tenant without limits too.
    await world.ask(metadata=bearer("free"), request_id="three")
    async with asyncio.timeout(LIMIT_S):
        while not usage_file.exists() or len(lines(usage_file)) < 3:
            await asyncio.sleep(0.01)
    one, two, three = sorted((json.loads(line) for line in lines(usage_file)), key=lambda line: line["at"])
    cost = fresh.usage.prompt_tokens + fresh.usage.completion_tokens
    assert (one["tenant"], one["key"], one["request_id"]) == ("counted", "key of counted", "one")
    assert (one["cost"], one["unit"], one["cache"], one["code"]) == (cost, "tokens", fresh.served.cache, 0)
    assert (two["cost"], two["cache"], two["completion_tokens"]) == (0, "exact", 2)
    assert (three["tenant"], three["model"]) == ("free", "scripted")
    assert await figures(world, "counted") == (cost, 0, 0)


async def test_embeddings_count_as_well(world: World, settings: Any) -> None:
    await world.worker()
    router = await world.router()
    router.embedder = "texts"
    await begin(world, **settings)
    await world.until(world.gateway.routers.embedders)
    request = pb.EmbedRequest(model="texts", input=["a", "b"])
    for key, tenant in (("rated", None), ("counted", "counted")):
        await world.stub.Embed(request, metadata=bearer(key), timeout=LIMIT_S)
        if tenant is not None:
            async with asyncio.timeout(LIMIT_S):
                while not (await figures(world, tenant)).spent:
                    await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.stub.Embed(request, metadata=bearer("rated"), timeout=LIMIT_S)
    assert isinstance(from_rpc_error(refused.value), Overloaded)


async def test_a_request_that_finds_no_worker_gives_everything_back(world: World, settings: Any) -> None:
    worker = await world.worker()
    worker.refuse = Overloaded("full")
    await begin(world, static=True, **settings)
    call = world.chat(metadata=bearer("counted"), timeout=1.0)
    await end_of(call)
    before = (await figures(world, "counted")).spent
    async with asyncio.timeout(LIMIT_S):
        while (await figures(world, "counted"))[1:] != (0, 0):
            await asyncio.sleep(0.01)
    assert (await figures(world, "counted")).spent == before


async def test_what_best_of_computes_is_what_it_costs(world: World, settings: Any) -> None:
    await world.worker()
    await begin(world, static=True, **settings)
    end = (await world.ask(metadata=bearer("counted"), sampling={"n": 1, "best_of": 4, "max_tokens": 6}))[-1].finished
    assert end.usage.completion_tokens > 0
    cost = end.usage.prompt_tokens + 4 * end.usage.completion_tokens
    async with asyncio.timeout(LIMIT_S):
        while await figures(world, "counted") != (cost, 0, 0):
            await asyncio.sleep(0.01)


async def test_an_answer_that_costs_nothing_takes_nothing_more(
    world: World, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be cut where the budget ends."""
    told: list[int] = []
    monkeypatch.setattr("services.gateway.limits.hold.TenantHold.used", lambda hold, tokens: told.append(tokens))
    await world.worker(max_model_len=8192)
    router = await world.router()

    async def decide(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        token_ids = [120] * 3000 + [257]
        choice = router_pb2.CachedChoice(text="x" * 3000, token_ids=token_ids, finish_reason=pb.FINISH_REASON_STOP)
        answer = router_pb2.CachedAnswer(kind="exact", choices=[choice], score=1.0, revision="rev-1", prompt_tokens=3)
        return router_pb2.RouteResponse(answer=answer, model="scripted", decision_id="d")

    router.decide = decide
    await begin(world, **settings)
    events = await rest(world.chat(metadata=bearer("long"), sampling={"max_tokens": 4000}))
    assert kinds(events)[-1] == "finished"
    assert told == []
    async with asyncio.timeout(LIMIT_S):
        while await figures(world, "long") != (0, 0, 0):
            await asyncio.sleep(0.01)


async def test_who_leaves_while_a_worker_is_at_the_prompt_pays_for_it(world: World, settings: Any) -> None:
    """To have prompts computed for nothing, again and again, would be cheap otherwise."""
    worker = await world.worker()

    async def nothing_yet(request: Any) -> None:
        """A long prompt."""

    worker.on_submit = nothing_yet
    await begin(world, static=True, **settings)
    call = world.chat(metadata=bearer("counted"))
    accepted = await next_event(call)
    assert accepted.WhichOneof("event") == "accepted"
    call.cancel()
    async with asyncio.timeout(LIMIT_S):
        while await figures(world, "counted") != (accepted.accepted.prompt_tokens, 0, 0):
            await asyncio.sleep(0.01)
    await worker.aborts.wait()
