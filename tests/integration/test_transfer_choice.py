"""Which transport is taken and why, what is seen of it from outside, and faults in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.errors import FailedPrecondition, TransferFailed
from kvmesh.transfer.handles import SlotResult
from transfer_kit import Engine, SidecarProcess, make_layout, sidecars, soon

SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]


@contextlib.asynccontextmanager
async def two(
    folder: Path, source_flags: tuple[str, ...], target_flags: tuple[str, ...]
) -> AsyncIterator[tuple[Engine, Engine]]:
    a = SidecarProcess("src", folder, *source_flags)
    b = SidecarProcess("dst", folder, *target_flags)
    try:
        await asyncio.gather(a.start(), b.start())
        source = await Engine("p", a, make_layout()).connect()
        target = await Engine("d", b, make_layout()).connect()
        source.fill(1)
        yield source, target
        await source.close()
        await target.close()
    finally:
        a.stop()
        b.stop()


async def whole(source: Engine, target: Engine, traceparent: str = "") -> SlotResult:
    target.pages[:, DST] = 0
    slot = await target.client.open_slot(
        expected_bytes=target.expected(DST), groups={"main": DST}, request_id="r", ttl_s=30, traceparent=traceparent
    )
    descriptor = target.describe(slot, DST)
    transfer = await soon(
        source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=0, traceparent=traceparent)
    )
    source.step(transfer, 0, 6)
    result: Any = await soon(slot.completed)
    await soon(transfer.done)
    np.testing.assert_array_equal(target.pages[:, DST], source.pages[:, SRC])
    return result  # type: ignore[no-any-return]


async def test_order_of_the_destination_decides(tmp_path: Path) -> None:
    async with two(tmp_path, ("--transports=shm,tcp",), ("--transports=tcp,shm",)) as (source, target):
        assert (await whole(source, target)).transport == "tcp"
        (link,) = (await target.sidecar.status()).links
        assert (link.direction, link.transport, link.reason, link.state) == ("in", "tcp", "reaches any host", "up")
        assert (link.transfers, link.bytes, link.peer_engine_id) == (1, target.expected(DST), "p")


async def test_unreachable_socket_falls_back_and_says_so(tmp_path: Path) -> None:
    async with two(tmp_path, (), ()) as (source, target):
        os.unlink(f"{target.sidecar.socket}.shm")
        assert (await whole(source, target)).transport == "tcp"
        (link,) = (await source.sidecar.status()).links
        assert link.direction == "out"
        assert link.reason.startswith("reaches any host; shm: cannot connect to")
        assert "shm cannot be opened" in source.sidecar.log()


async def test_no_common_transport(tmp_path: Path) -> None:
    async with two(tmp_path, ("--transports=shm",), ("--transports=tcp",)) as (source, target):
        with pytest.raises(FailedPrecondition, match="no common transport: tcp: not offered by the writer"):
            await whole(source, target)


async def health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)).status)


async def test_health_metrics_and_status(tmp_path: Path) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with sidecars(tmp_path, "--metrics-listen=127.0.0.1:0") as (a, b):
        assert await health(b.address, "") == serving
        assert await health(b.address, "kvmesh.v1.KvTransfer") == not_serving
        source = await Engine("p", a, make_layout()).connect()
        target = await Engine("d", b, make_layout()).connect()
        assert await health(b.address, "kvmesh.v1.KvTransfer") == serving
        source.fill(3)
        await whole(source, target)
        text = {}
        for process in (a, b):
            ready = json.loads((tmp_path / f"{process.name}.1.json").read_text())
            url = f"http://{ready['metrics']}/metrics"
            text[process.name] = await asyncio.to_thread(lambda u: urllib.request.urlopen(u, timeout=60).read(), url)
        nbytes = float(target.expected(DST))
        assert f'kvmesh:transfer_bytes_total{{direction="out",transport="shm"}} {nbytes}'.encode() in text["src"]
        assert f'kvmesh:transfer_bytes_total{{direction="in",transport="shm"}} {nbytes}'.encode() in text["dst"]
        assert b'kvmesh:transfers_total{outcome="done",transport="shm"} 1.0' in text["src"]
        assert b'kvmesh:transfer_peers{transport="shm"} 1.0' in text["dst"]
        status = await b.status()
        assert status.engine_connected
        assert (status.engine_id, status.engine_incarnation) == ("d", 1)
        assert {t.name: t.usable for t in status.transports} == {"shm": True, "tcp": True}
        assert status.counters.bytes_received == nbytes
        assert status.counters.slots_completed == 1
        await target.close()
        async with asyncio.timeout(60):
            while await health(b.address, "kvmesh.v1.KvTransfer") != not_serving:
                await asyncio.sleep(0.02)
        await source.close()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.more = asyncio.Event()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.name] = span
        self.more.set()
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_join_the_trace(tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    flag = (f"--otlp-endpoint=http://127.0.0.1:{port}",)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with two(tmp_path, flag, flag) as (source, target):
        await whole(source, target, f"00-{trace}-{parent}-01")
        async with asyncio.timeout(30):
            while not {"kvtransfer.send", "kvtransfer.receive"} <= collector.spans.keys():
                collector.more.clear()
                await collector.more.wait()
    for name in ("kvtransfer.send", "kvtransfer.receive"):
        span = collector.spans[name]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
        attributes = {a.key: a.value for a in span.attributes}
        assert attributes["kvmesh.transfer.bytes"].int_value == target.expected(DST)
        assert attributes["kvmesh.transfer.transport"].string_value == "shm"
    await server.stop(0)


async def test_faults_of_a_file_in_real_processes(tmp_path: Path) -> None:
    """Reordered, torn, duplicated, late; then failing; then holding: each end is the right one."""
    faults = tmp_path / "faults.json"
    flags = ("--transports=fake", f"--fake-faults={faults}", "--heartbeat-s=0.2", "--lease-s=3")
    faults.write_text(
        json.dumps(
            {"delay_s": [0, 0.02], "pieces": 4, "duplicate_rate": 0.5, "stale_rate": 0.5, "arrival_delay_s": [0, 0.02]}
        )
    )
    async with two(tmp_path, flags, flags) as (source, target):
        for _ in range(15):
            assert (await whole(source, target)).transport == "fake"
        for text, reason in (('{"error_rate": 1}', "the fake network failed"), ('{"hold_after_writes": 1}', "")):
            faults.write_text(text)
            # The file is read when a link opens.
            await source.client.close()
            source.incarnation += 1
            await source.connect()
            slot = await target.open(DST)
            descriptor = target.describe(slot, DST)
            transfer = await soon(source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=6))
            if not reason:
                reason = "cancelled"
                await target.client.close_slot(slot, reason)
            with pytest.raises(TransferFailed, match=reason):
                await soon(transfer.done)
            await soon(slot.drained)
            if slot.completed.exception() is None:
                # A write that failed at the writer may have landed all the same; then it is all there.
                assert reason == "the fake network failed"
                np.testing.assert_array_equal(target.pages[:, DST], source.pages[:, SRC])
            else:
                assert reason in str(slot.completed.exception())
        assert (await target.sidecar.status()).slots_open == 0
