"""The way to the collector: bounded, counted, never waited for; TLS."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvmesh.telemetry import metrics, names, tracing
from kvmesh.telemetry.export import ExportQueue

WAIT_S = 60.0


class Collector(SpanExporter):
    """Holds every batch until `go` is set; then takes or refuses it."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), threading.Event()
        self.takes = True
        self.batches: list[list[str]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        assert self.go.wait(WAIT_S)
        self.batches.append([span.name for span in spans])
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE

    @property
    def names(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


def dropped(cause: str) -> float:
    return metrics.value(names.TRACE_SPANS_DROPPED, cause=cause)


def queue(collector: Collector, **given: Any) -> tuple[ExportQueue, Any]:
    made = ExportQueue(collector, **({"every_s": 0.01} | given))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(made)
    tracer = provider.get_tracer("test")
    return made, lambda *spans: [tracer.start_span(name).end() for name in spans]


def test_a_collector_that_hangs_is_never_waited_for() -> None:
    collector = Collector()
    made, end = queue(collector, max_spans=10, batch=4)
    before = dropped("queue_full")
    end("first")
    assert collector.asked.wait(WAIT_S)
    # On this thread, which would hang with it.
    end(*(f"{number}" for number in range(25)))
    assert dropped("queue_full") == before + 15
    assert not made.force_flush(10)
    collector.go.set()
    assert made.force_flush(60_000)
    assert collector.names == ["first", *(f"{number}" for number in range(10))]
    assert max(map(len, collector.batches)) == 4
    made.shutdown()
    end("late")
    assert "late" not in collector.names


def test_what_is_not_taken_is_counted() -> None:
    collector = Collector()
    collector.takes = False
    collector.go.set()
    made, end = queue(collector)
    before = dropped("collector")
    end("a", "b")
    assert not made.force_flush(60_000)
    assert dropped("collector") == before + 2
    collector.takes = True
    end("c")
    assert made.force_flush(60_000)
    made.shutdown()


def test_the_rest_is_sent_at_the_end() -> None:
    collector = Collector()
    collector.go.set()
    made, end = queue(collector, every_s=3600.0)
    end("a", "b")
    made.shutdown()
    assert collector.names == ["a", "b"]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps names of spans that came over the wire."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.mark.parametrize("signed", [True, False])
def test_spans_go_over_tls_to_whom_the_file_has_signed(tmp_path: Path, signed: bool) -> None:
    ca, other = trustme.CA(), trustme.CA()
    certificate = ca.issue_cert("localhost")
    trusted = tmp_path / "ca.pem"
    (ca if signed else other).cert_pem.write_to_path(str(trusted))
    server = grpc.server(ThreadPoolExecutor(1))
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]),
    )
    server.start()
    try:
        tracing.setup("test", f"https://localhost:{port}", ca_file=trusted)
        with tracing.span("secret"):
            pass
        assert tracing.shutdown(timeout_s=WAIT_S) is signed
    finally:
        server.stop(0).wait()
    assert receiver.names == (["secret"] if signed else [])
