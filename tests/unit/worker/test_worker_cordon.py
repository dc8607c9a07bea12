"""Cordon: a mark that routers see. What runs goes on, what comes is served, and worse states show instead."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.engine.worker.state import WorkerStatus
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc
from kvmesh.rpc.limits import Deadline
from test_worker_attach import Served
from worker_harness import Gateway, prompt, running, sampling, until

CORDONED, SERVING = pb.WORKER_STATE_CORDONED, pb.WORKER_STATE_SERVING


async def test_a_cordoned_worker_tells_routers_and_serves_what_comes() -> None:
    async with (
        Served() as served,
        running(routers=[f"127.0.0.1:{served.port}"], report_interval_s=0.05, scripted_step_ms=2) as worker,
        Gateway(worker) as gateway,
    ):
        router = served.router
        stub = engine_pb2_grpc.EngineStub(worker.channel)
        await until(lambda: router.states == [SERVING], "not registered")
        before = await gateway.submit(gateway.request(prompt(5), sampling=sampling(100)))
        for _ in range(2):
            answer = await stub.Cordon(pb.CordonRequest(cordoned=True), timeout=60)
            assert answer.info.state == CORDONED
        await until(lambda: router.states == [SERVING, CORDONED], "the router is not told, or told twice")
        described = await stub.Describe(pb.DescribeRequest(), timeout=60)
        assert described.info.state == CORDONED
        assert (await gateway.ask(prompt(6), sampling=sampling(3))).error is None
        assert (await before.wait()).error is None
        health = health_pb2_grpc.HealthStub(worker.channel)
        for service in ("kvmesh.v1.Engine", "kvmesh.v1.Decode"):
            status = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert status.status == health_pb2.HealthCheckResponse.SERVING
        answer = await stub.Cordon(pb.CordonRequest(cordoned=False), timeout=60)
        assert answer.info.state == SERVING
        await until(lambda: router.states == [SERVING, CORDONED, SERVING], "the router is not told")
        await stub.Cordon(pb.CordonRequest(cordoned=True), timeout=60)
        await worker.worker.finish_work(Deadline.after(5))
        answer = await stub.Cordon(pb.CordonRequest(cordoned=False), timeout=60)
        assert answer.info.state == pb.WORKER_STATE_DRAINING, "no way back from a drain"


def test_the_worse_state_shows() -> None:
    told: list[Any] = []
    status = WorkerStatus("prefill", needs_sidecar=True)
    status.listen(lambda: told.append(status.state))
    status.update(cordoned=True)
    assert status.state == pb.WORKER_STATE_STARTING
    status.update(loaded=True, sidecar_up=True)
    assert status.state == CORDONED
    assert status.ready("kvmesh.v1.Prefill")
    status.check_accepting()
    status.update(stalled=True)
    assert status.state == pb.WORKER_STATE_STALLED
    status.update(stalled=False, sidecar_up=False)
    assert status.state == pb.WORKER_STATE_STALLED
    status.update(sidecar_up=True)
    assert status.state == CORDONED
    heard = len(told)
    status.update(cordoned=True)
    assert len(told) == heard, "nothing changed"
    status.update(draining=True)
    assert status.state == pb.WORKER_STATE_DRAINING
    status.update(cordoned=False)
    assert status.state == pb.WORKER_STATE_DRAINING


async def test_a_worker_that_loads_cannot_be_marked_yet() -> None:
    async with running() as worker:
        worker.worker.engine.ctx = None
        stub = engine_pb2_grpc.EngineStub(worker.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cordon(pb.CordonRequest(cordoned=True), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
