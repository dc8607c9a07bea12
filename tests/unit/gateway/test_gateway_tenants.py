"""Keys, tenants, their limits, and the answer cache per tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_world import World, end_of, kinds, next_event, rest, text_of
from kvmesh.config import GatewaySettings, ServiceSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc import BackgroundTasks, RpcServer, ServiceContext
from kvmesh.rpc.credentials import hash_key
from kvmesh.rpc.status import from_rpc_error
from services.gateway.app import Gateway
from services.gateway.job import inner_salt

TOKEN = "mesh-token-for-tests"

CREDENTIALS = f"""
[[keys]]
sha256 = "{hash_key("key-a")}"
tenant = "a"
[[keys]]
sha256 = "{hash_key("key-b")}"
tenant = "b"
[tenants.a]
max_concurrent = 1
max_tokens = 20
cache = "exact"
tau = 0.5
[tenants.b]
models = ["other"]
"""


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def secured(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Mesh token on every hop, keys at the gateway."""
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    keys = tmp_path / "keys.toml"
    keys.write_text(CREDENTIALS)
    # The fakes take their settings from the environment, like real services.
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(token))
    assert ServiceSettings().mesh_token_file == token
    return {"credentials_file": keys}


async def hold(request: Any) -> None:
    """Accept and send nothing."""


async def test_the_tenant_comes_from_the_key_and_travels_inside(world: World, secured: Any) -> None:
    worker = await world.worker()
    router = await world.router()
    await world.start(**secured)
    for metadata in (None, bearer("wrong"), (("x-kvmesh-tenant", "a"),)):
        assert (await end_of(world.chat(metadata=metadata))).code() is grpc.StatusCode.UNAUTHENTICATED
    forged = (*bearer("key-a"), ("x-kvmesh-tenant", "b"))
    assert (await end_of(world.chat(metadata=forged))).code() is grpc.StatusCode.PERMISSION_DENIED
    assert not worker.tenants.items
    assert text_of(await world.ask(metadata=bearer("key-a"))) == "hello"
    assert worker.tenants.items == ["a"]
    assert len(router.routes.items) == 1
    await router.reports.wait()
    for call in (world.stub.ListModels(pb.ListModelsRequest()), world.stub.Abort(pb.AbortRequest(request_id="x"))):
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await call


async def test_tenants_without_proof_of_the_gateway_do_not_start(secured: Any, monkeypatch: Any) -> None:
    """Every tenant would be refused by the workers, each request with a status that blames its key."""
    monkeypatch.delenv("KVMESH_MESH_TOKEN_FILE")
    config = GatewaySettings(**secured)
    server = RpcServer(config)
    try:
        with pytest.raises(FailedPrecondition, match="mesh_token_file"):
            Gateway(ServiceContext(config, server, server.auth, BackgroundTasks()))
    finally:
        await server.close()


async def test_rights_to_models(world: World, secured: Any) -> None:
    await world.worker()
    await world.start(static=True, **secured)
    key = bearer("key-b")
    assert (await end_of(world.chat(metadata=key))).code() is grpc.StatusCode.PERMISSION_DENIED
    assert not (await world.stub.ListModels(pb.ListModelsRequest(), metadata=key)).models
    with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
        await world.stub.GetModel(pb.GetModelRequest(name="scripted"), metadata=key)


async def test_a_tenants_limits_hold_and_are_given_back(world: World, secured: Any) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, **secured)
    key = bearer("key-a")
    first = world.chat(metadata=key)
    await next_event(first)
    error = await end_of(world.chat(metadata=key))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(error).retry_after is not None
    first.cancel()
    await world.until(lambda: world.gateway.registry.held("a") == 0)
    worker.on_submit = None
    await world.ask(metadata=key)
    assert worker.submits.items[-1].sampling.max_tokens == 20
    error = await end_of(world.chat(metadata=key, sampling={"max_tokens": 21}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert world.gateway.registry.held("a") == 0


async def test_tenants_share_no_prefix_cache(world: World, secured: Any) -> None:
    """A worker keys prefixes by salt alone, so the same prompt of two tenants must not carry the same one."""
    secured["credentials_file"].write_text(CREDENTIALS.replace('models = ["other"]', ""))
    worker = await world.worker()
    router = await world.router()
    await world.start(**secured)
    for key in ("key-a", "key-b", "key-a"):
        await world.ask("the same prompt", metadata=bearer(key))
    a, b, again = [request.cache_salt for request in worker.submits.items]
    assert a == again
    assert a != b
    assert [request.cache_salt for request in router.routes.items] == [a, b, a]
    # Nor can a tenant reach another's by choosing the salt that stands for it.
    await world.ask("the same prompt", metadata=bearer("key-b"), cache_salt=a)
    assert worker.submits.items[-1].cache_salt not in (a, b)


def test_inner_salts_are_apart_and_short_enough() -> None:
    pairs = [
        ("local", ""),
        ("local", "a"),
        ("a", ""),
        ("a", "b"),
        ("ab", ""),
        ("a", "b" * 128),
        ("local", inner_salt("a", "")),
    ]
    salts = [inner_salt(*pair) for pair in pairs]
    assert len(set(salts)) == len(pairs)
    assert salts[0] == ""
    assert all(len(salt.encode()) <= 128 for salt in salts)


async def test_ids_belong_to_tenants(world: World, secured: Any, tmp_path: Path) -> None:
    secured["credentials_file"].write_text(CREDENTIALS.replace('models = ["other"]', ""))
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, **secured)
    a = world.chat(metadata=bearer("key-a"), request_id="same")
    b = world.chat(metadata=bearer("key-b"), request_id="same")
    await next_event(a)
    await next_event(b)
    requests = await worker.submits.wait(2)
    # Inside the mesh the two are different requests.
    assert requests[0].request_id != requests[1].request_id
    abort = pb.AbortRequest(request_id="same")
    assert (await world.stub.Abort(abort, metadata=bearer("key-a"))).found
    assert kinds(await rest(a)) == ["error"]
    worker.answer(requests[0], "b")
    worker.answer(requests[1], "b")
    assert text_of(await rest(b)) == "b"


# --- the answer cache


def answer(*texts: str, kind: str = "exact") -> router_pb2.RouteResponse:
    choices = [
        router_pb2.CachedChoice(text=text, token_ids=[*text.encode(), 257], finish_reason=pb.FINISH_REASON_STOP)
        for text in texts
    ]
    cached = router_pb2.CachedAnswer(kind=kind, choices=choices, score=1.0, revision="rev-1", prompt_tokens=3)
    return router_pb2.RouteResponse(answer=cached, model="scripted", decision_id="d")


async def test_a_remembered_answer_streams_like_any_other(world: World) -> None:
    worker = await world.worker()
    router = await world.router()

    async def cached(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        return answer("one", "two", kind="semantic")

    router.decide = cached
    await world.start()
    events = await world.ask(sampling={"n": 2})
    assert kinds(events) == ["accepted", "delta", "finished"]
    assert [text_of(events, 0), text_of(events, 1)] == ["one", "two"]
    finished = events[-1].finished
    assert finished.served.cache == "semantic"
    assert finished.served.decode_worker == ""
    assert finished.usage.completion_tokens == 8
    assert finished.usage.prompt_tokens == events[0].accepted.prompt_tokens
    assert finished.served.ttft_ms > 0
    assert not worker.submits.items
    (report,) = await router.reports.wait()
    assert not report.HasField("answer")
    assert (report.decision_id, report.code) == ("d", 0)


@pytest.mark.parametrize("kind", ["follow", "wrong-n"])
async def test_what_cannot_be_used_is_asked_again_without_the_cache(world: World, kind: str) -> None:
    await world.worker()
    router = await world.router()

    async def first_something_else(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        if request.cache == pb.CACHE_MODE_OFF:
            return router.placement(request)
        if kind == "follow":
            return router_pb2.RouteResponse(follow=router_pb2.Flight(flight_id="f"), decision_id="f")
        return answer("one", "two")

    router.decide = first_something_else
    await world.start()
    assert text_of(await world.ask()) == "hello"
    assert [request.cache for request in router.routes.items] == [pb.CACHE_MODE_SEMANTIC, pb.CACHE_MODE_OFF]


async def test_cache_controls_reach_the_router_within_the_tenants_rights(world: World, secured: Any) -> None:
    await world.worker()
    router = await world.router()
    await world.start(**secured)
    key = bearer("key-a")
    control = pb.CacheControl(no_store=True, max_age_s=60, tau=0.75)
    await world.ask("x", metadata=key, cache_control=control, user="ann", session_id="one")
    asked = router.routes.items[0]
    assert (asked.cache_control, asked.user, asked.session_id) == (control, "ann", "one")
    # 0.5 is what the tenant's own policy says.
    below = world.chat("x", metadata=key, cache_control=pb.CacheControl(tau=0.4))
    assert (await end_of(below)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(router.routes.items) == 1


async def test_what_the_cache_key_is_made_of(world: World, secured: Any) -> None:
    await world.worker()
    router = await world.router()
    await world.start(**secured)
    key = bearer("key-a")
    await world.ask("x", metadata=key, cache_salt="salt", sampling={"temperature": 0.5})
    await world.ask("x", metadata=key, sampling={"seed": 7, "logprobs": 0, "max_tokens": 5})
    first, second = router.routes.items
    # A drawn seed would make every request new, a default length every prompt; the rest has its effective value.
    assert not first.sampling.HasField("seed")
    assert first.sampling.temperature == 0.5
    assert not first.sampling.HasField("max_tokens")
    assert first.sampling.top_p == 1.0
    assert first.messages[0].content == "x"
    assert (first.cache, first.tau, first.cache_salt) == (pb.CACHE_MODE_EXACT, 0.5, inner_salt("a", "salt"))
    assert (second.sampling.seed, second.sampling.max_tokens) == (7, 5)
    # Remembered answers hold no log-probabilities.
    assert second.cache == pb.CACHE_MODE_OFF


@pytest.mark.parametrize(
    ("reason", "fields", "stored"),
    [
        (pb.FINISH_REASON_STOP, {}, True),
        (pb.FINISH_REASON_LENGTH, {}, False),
        (pb.FINISH_REASON_STOP, {"cache": pb.CACHE_MODE_OFF}, False),
        (pb.FINISH_REASON_STOP, {"sampling": {"logprobs": 1}}, False),
    ],
)
async def test_only_complete_answers_are_remembered(world: World, reason: int, fields: Any, stored: bool) -> None:
    worker = await world.worker()

    async def respond(request: Any) -> None:
        worker.answer(request, "text", reason=reason)

    worker.on_submit = respond
    router = await world.router()
    await world.start()
    events = await world.ask(**fields)
    assert text_of(events) == "text"
    (report,) = await router.reports.wait()
    assert report.HasField("answer") == stored
    assert report.usage == events[-1].finished.usage
    if stored:
        assert report.answer.revision == "rev-1"
        assert list(report.answer.choices[0].token_ids) == [*b"text", 257]


async def test_reports_of_a_dead_router_cost_nothing(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    router = await world.router()
    await world.start()
    call = world.chat()
    await next_event(call)
    await router.stop()
    worker.answer(worker.submits.items[0], "x")
    assert text_of(await rest(call)) == "x"
    async with asyncio.timeout(60):
        await world.until(world.idle)
