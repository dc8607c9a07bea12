"""Placement over real processes: requests go where their prefix is, and away from a cordoned worker."""

from __future__ import annotations

import grpc

from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc
from mesh_kit import Mesh, answer, mesh_up, until

LONG = "The quick brown fox jumps over the lazy dog. " * 10


async def cordon(mesh: Mesh, name: str, cordoned: bool) -> engine_pb2.WorkerInfo:
    async with grpc.aio.insecure_channel(mesh.address(name)) as channel:
        request = engine_pb2.CordonRequest(cordoned=cordoned)
        reply = await engine_pb2_grpc.EngineStub(channel).Cordon(request, timeout=30, metadata=mesh.token)
        return reply.info


async def test_a_prefix_attracts_and_a_cordon_keeps_away() -> None:
    async with mesh_up(cache=False, prefill=0, decode=0, unified=2) as mesh:

        async def held() -> str:
            """The worker that has the prompt, once the router knows."""
            _, first = await answer(mesh, LONG)
            _, second = await answer(mesh, LONG)
            same = first.served.decode_worker == second.served.decode_worker
            return first.served.decode_worker if same and second.usage.cached_tokens >= 128 else ""

        home = await until(held, "requests do not go where their prefix is")
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
