"""Embed: the routers' embedder under its own id, with failover, limits and one clear sentence for what is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_fakes import WAIT_S
from gateway_world import World
from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, NotFound, Overloaded, Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import hash_key
from kvmesh.rpc.status import from_rpc_error
from services.gateway.embed import MAX_TEXT_CHARS, MAX_TEXTS

MODEL = "mini"


async def start(world: World, routers: int = 1, **settings: Any) -> World:
    await world.worker()
    for _ in range(routers):
        (await world.router()).embedder = MODEL
        world.routers[-1].tell()
    await world.start(**settings)
    await world.until(lambda: all(replica.embedder for replica in world.gateway.routers._replicas))
    return world


async def embed(world: World, texts: list[str], model: str = MODEL, **fields: Any) -> pb.EmbedResponse:
    timeout = fields.pop("timeout", WAIT_S)
    metadata = fields.pop("metadata", None)
    return await world.stub.Embed(
        pb.EmbedRequest(model=model, input=texts, **fields), timeout=timeout, metadata=metadata
    )


async def error_of(call: Any) -> KvmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_texts_become_vectors(world: World) -> None:
    await start(world)
    reply = await embed(world, ["ab", "c"], user="u")
    assert reply.model == MODEL
    assert [list(e.values) for e in reply.embeddings] == [[2, ord("a")], [1, ord("c")]]
    assert reply.usage.prompt_tokens == 2
    listed = (await world.stub.ListModels(pb.ListModelsRequest(), timeout=WAIT_S)).models
    assert [(m.name, m.embeds) for m in listed] == [("scripted", False), (MODEL, True)]
    assert (await world.stub.GetModel(pb.GetModelRequest(name=MODEL), timeout=WAIT_S)).model.embeds
    assert world.idle()


async def test_another_router_is_asked_when_one_fails(world: World) -> None:
    await start(world, routers=2)
    one, two = world.routers
    for broken, sound in ((one, two), (two, one)):
        broken.embed_error, sound.embed_error = Unavailable("loading"), None
        for _ in range(2):
            assert len((await embed(world, ["x"])).embeddings) == 1
    one.embed_error = two.embed_error = Overloaded("full", retry_after=2.0)
    error = await error_of(embed(world, ["x"]))
    assert type(error) is Overloaded
    assert error.retry_after == 2.0
    # What is wrong with the request is wrong everywhere.
    one.embed_error = two.embed_error = InvalidArgument("no", details={"field": "texts"})
    before = len(one.embeds.items) + len(two.embeds.items)
    assert type(await error_of(embed(world, ["x"]))) is InvalidArgument
    assert len(one.embeds.items) + len(two.embeds.items) == before + 1


async def test_without_an_embedder(world: World) -> None:
    await world.worker()
    await world.router()
    await world.start()
    error = await error_of(embed(world, ["x"]))
    assert type(error) is FailedPrecondition
    # It may come later, and go with its router.
    world.routers[0].embedder = MODEL
    await world.until(lambda: world.gateway.routers.embedders() == [MODEL])
    await embed(world, ["x"])
    await world.routers[0].stop()
    await world.until(lambda: not world.gateway.routers.embedders())
    assert type(await error_of(embed(world, ["x"]))) is FailedPrecondition


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"texts": []}, InvalidArgument, "input"),
        ({"texts": ["x"] * (MAX_TEXTS + 1)}, InvalidArgument, "input"),
        ({"texts": ["x", ""]}, InvalidArgument, "input[1]"),
        ({"texts": ["x" * (MAX_TEXT_CHARS + 1)]}, InvalidArgument, "input[0]"),
        ({"texts": ["x"], "model": ""}, InvalidArgument, "model"),
        ({"texts": ["x"], "model": "m" * 1000}, InvalidArgument, "model"),
        ({"texts": ["x"], "user": "u" * 1000}, InvalidArgument, "user"),
        ({"texts": ["x"], "model": "scripted"}, NotFound, "model"),
    ],
)
async def test_bad_requests(world: World, fields: dict[str, Any], kind: type[KvmeshError], field: str) -> None:
    await start(world)
    error = await error_of(embed(world, **fields))
    assert type(error) is kind
    assert error.details["field"] == field
    assert not world.routers[0].embeds.items


async def test_all_texts_together_are_bounded(world: World) -> None:
    await start(world, max_prompt_bytes=10)
    await embed(world, ["12345", "67890"])
    error = await error_of(embed(world, ["12345", "678901"]))
    assert error.reason == "TOO_LARGE"


async def test_a_tenant_s_limits_hold(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of models, and its name on the hop to the router."""
    token = tmp_path / "token"
    token.write_text("mesh-token-for-tests\n")
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(token))
    keys = tmp_path / "keys.toml"
    keys.write_text(f"""
[[keys]]
sha256 = "{hash_key("key-acme")}"
tenant = "acme"
[[keys]]
sha256 = "{hash_key("key-narrow")}"
tenant = "narrow"
[tenants.narrow]
models = ["scripted"]
""")
    await start(world, credentials_file=keys)
    await embed(world, ["x"], metadata=[("authorization", "Bearer key-acme")])
    assert world.routers[0].embeds.items[-1][0] == "acme"
    error = await error_of(embed(world, ["x"], metadata=[("authorization", "Bearer key-narrow")]))
    assert error.reason == "PERMISSION_DENIED"
    assert (await error_of(embed(world, ["x"]))).reason == "UNAUTHENTICATED"


async def test_a_caller_that_leaves_leaves_nothing(world: World) -> None:
    await start(world)
    reached, release = asyncio.Event(), asyncio.Event()
    router = world.routers[0]
    original = router.EmbedTexts

    async def slow(request: Any, context: Any) -> Any:
        reached.set()
        await release.wait()
        return await original(request, context)

    world.gateway.routers._replicas[0].stub.EmbedTexts = lambda request, **kw: slow(request, None)
    call = asyncio.ensure_future(embed(world, ["x"]))
    async with asyncio.timeout(WAIT_S):
        await reached.wait()
    assert len(world.gateway.registry) == 1
    call.cancel()
    await world.until(lambda: not len(world.gateway.registry))
    release.set()
