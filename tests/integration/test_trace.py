"""One request, one trace: spans of the client and all five services, received over real OTLP/gRPC."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.telemetry.tracing import setup, shutdown
from mesh_kit import answer, mesh_up, until

SERVICES = {"gateway", "router", "decode", "prefill", "kvtransfer"}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span by trace id as (service, name, span id, parent id)."""

    def __init__(self) -> None:
        self.traces: dict[bytes, list[tuple[str, str, bytes, bytes]]] = defaultdict(list)

    async def Export(self, request, context):  # type: ignore[no-untyped-def]
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            service = names[0].removeprefix("kvmesh.").removeprefix("kvmesh-") if names else "?"
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.traces[span.trace_id].append((service, span.name, span.span_id, span.parent_span_id))
        return trace_service_pb2.ExportTraceServiceResponse()


def orphans(spans: list[tuple[str, str, bytes, bytes]]) -> list[tuple[str, str, bytes, bytes]]:
    """Spans whose parent is not there."""
    ids = {span[2] for span in spans}
    return [span for span in spans if span[3] and span[3] not in ids]


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    server = grpc.aio.server()
    servicer = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    await server.stop(0)


async def test_one_trace_joins_client_and_all_five_services(receiver: tuple[Receiver, str]) -> None:
    servicer, endpoint = receiver
    setup("client", otlp_endpoint=endpoint)
    async with mesh_up(cache=False, otlp_endpoint=endpoint) as mesh:
        _, finished = await answer(mesh, "trace me " * 20)
        assert finished.served.transfer_bytes > 0
        await asyncio.to_thread(shutdown, 30.0)

        def complete() -> list[tuple[str, str, bytes, bytes]]:
            """The spans of the trace that the client started, once all services have sent theirs.

            Each sends in batches, so a span may come before its parent.
            """
            for spans in servicer.traces.values():
                if {span[0] for span in spans} >= SERVICES | {"client"} and not orphans(spans):
                    return spans
            return []

        try:
            spans = await until(complete, "one trace with spans of the client and all services", timeout_s=90)
        except AssertionError as error:
            seen = {trace.hex(): sorted({span[:2] for span in spans}) for trace, spans in servicer.traces.items()}
            alone = [span for spans in servicer.traces.values() for span in orphans(spans)]
            raise AssertionError(f"{error}; traces: {seen}; spans without their parent: {alone}") from None
    assert [span[0] for span in spans if not span[3]] == ["client"], "the root is the client's span"
    sidecar_spans = {span[1] for span in spans if span[0] == "kvtransfer"}
    assert any("send" in name for name in sidecar_spans)
    assert any("receive" in name for name in sidecar_spans)
