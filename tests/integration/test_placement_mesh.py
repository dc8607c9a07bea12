"""Placement over real processes: requests go where their prefix is, and away from a cordoned worker."""

from __future__ import annotations

import contextlib
import secrets

import grpc

from kvmesh.errors import FailedPrecondition
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc, router_admin_pb2, router_admin_pb2_grpc
from mesh_kit import Mesh, answer, mesh_up, until

LONG = "The quick brown fox jumps over the lazy dog. " * 10


async def cordon(mesh: Mesh, name: str, cordoned: bool) -> engine_pb2.WorkerInfo:
    async with grpc.aio.insecure_channel(mesh.address(name)) as channel:
        request = engine_pb2.CordonRequest(cordoned=cordoned)
        reply = await engine_pb2_grpc.EngineStub(channel).Cordon(request, timeout=30, metadata=mesh.token)
        return reply.info


async def holders(mesh: Mesh, text: str) -> set[str]:
    """Workers of which the router knows that they hold the prompt; asking for it places nothing."""
    request_id = f"trial-{secrets.token_hex(8)}"
    with contextlib.suppress(FailedPrecondition):
        async with mesh.client() as client:
            await client.chat(
                [("user", text)], model=mesh.model, request_id=request_id, cache_control={"only_if_cached": True}
            ).result()
    async with grpc.aio.insecure_channel(mesh.state.router) as channel:
        request = router_admin_pb2.ExplainRequest(request_id=request_id)
        stub = router_admin_pb2_grpc.RouterAdminStub(channel)
        explained = await stub.Explain(request, timeout=30, metadata=mesh.token)
    return {row.worker_id for row in explained.workers if row.matched_tokens >= 128}


# What is tested is that a prompt's chain finds its blocks, not how much load outweighs them.
PREFIX_FIRST = {"router.beta_decode": "0.1"}


async def test_a_prefix_attracts_and_a_cordon_keeps_away() -> None:
    async with mesh_up(cache=False, prefill=0, decode=0, unified=2, settings=PREFIX_FIRST) as mesh:
        _, first = await answer(mesh, LONG)
        home = first.served.decode_worker

        async def known() -> bool:
            return await holders(mesh, LONG) == {home}

        await until(known, "the router does not hear who holds the prefix")
        served = [await answer(mesh, LONG + str(i)) for i in range(4)]
        assert {finished.served.decode_worker for _, finished in served} == {home}
        assert all(finished.usage.cached_tokens >= 128 for _, finished in served)

        info = await cordon(mesh, home, True)
        assert info.state == engine_pb2.WORKER_STATE_CORDONED

        async def moved() -> bool:
            _, finished = await answer(mesh, LONG)
            return bool(finished.served.decode_worker != home)

        await until(moved, "a cordoned worker still gets requests")
        _, finished = await answer(mesh, LONG)
        assert finished.served.decode_worker != home
        info = await cordon(mesh, home, False)
        assert info.state == engine_pb2.WORKER_STATE_SERVING
