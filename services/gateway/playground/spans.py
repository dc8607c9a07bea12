"""A small OTLP/gRPC receiver of traces in memory: what the playground's strips are made of.

It listens on a loopback address, takes spans from every service of the mesh and keeps few of them, for a while. Who
may ask for a trace is told by the trace itself: the gateway's span of a request names its tenant.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from kvmesh.errors import FailedPrecondition
from kvmesh.telemetry import names
from services.gateway.playground.phases import KEPT, Span, root_of

MAX_EXPORT_BYTES = 4 << 20
MAX_TEXT = 256
# Of a look at a trace. Each would be a trace of its own, and push out those that are looked at.
TRACE_SPAN = "GET /playground/trace"


@dataclass(slots=True)
class _Trace:
    begun: float
    spans: list[Span] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    keys: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """Requests of this trace, with their gateway spans."""


class Spans:
    """Traces by (tenant, request id). At most `max_traces` of `max_spans` each (and as many of the gateway's own),
    `max_total` spans in all, none older than `ttl_s` seconds; the oldest traces go first. A span costs a few hundred
    bytes, 4 KiB at most: names and attributes are cut to 256 characters."""

    def __init__(
        self,
        *,
        max_traces: int = 512,
        max_spans: int = 256,
        max_total: int = 16_384,
        ttl_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._max_total = max_total
        self._total = 0
        self._ttl_s = ttl_s
        self._clock = clock
        self._traces: OrderedDict[bytes, _Trace] = OrderedDict()
        self._ids: dict[tuple[str, str], bytes] = {}

    def __len__(self) -> int:
        """Traces kept."""
        return len(self._traces)

    def add(self, trace_id: bytes, span: Span) -> None:
        """Keep a span, once. The gateway's own comes last and must find room in a full trace."""
        self._expire()
        if len(trace_id) != 16:
            return
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = _Trace(self._clock())
            while len(self._traces) > self._max_traces:
                self._drop(next(iter(self._traces)))
        root = root_of((span,))
        room = self._max_spans if root is None else 2 * self._max_spans
        if span.span_id in trace.seen or len(trace.spans) >= room:
            return
        if root is not None:
            key = (root.attributes[names.ATTR_TENANT], root.attributes.get(names.ATTR_REQUEST_ID, ""))
            # Of two requests with one id, one after the other, the later one is meant.
            trace.keys[key] = span.span_id
            self._ids[key] = trace_id
        trace.seen.add(span.span_id)
        trace.spans.append(span)
        self._total += 1
        while self._total > self._max_total and len(self._traces) > 1:
            self._drop(next(iter(self._traces)))

    def of(self, tenant: str, request_id: str) -> list[Span]:
        """Spans of a tenant's request so far; [] before the gateway's own has come, and of other tenants' requests."""
        self._expire()
        key = (tenant, request_id)
        trace = self._traces.get(self._ids.get(key, b""))
        return _below(trace.spans, trace.keys[key]) if trace is not None else []

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._traces:
            trace_id, trace = next(iter(self._traces.items()))
            if trace.begun > oldest:
                return
            self._drop(trace_id)

    def _drop(self, trace_id: bytes) -> None:
        trace = self._traces.pop(trace_id)
        self._total -= len(trace.spans)
        for key in trace.keys:
            if self._ids.get(key) == trace_id:
                del self._ids[key]


def _below(spans: list[Span], root_id: bytes) -> list[Span]:
    """The span of that id and all that descend from it: a client may put many requests into one trace."""
    children: dict[bytes, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    found = [span for span in spans if span.span_id == root_id]
    for span in found:
        # A child is met once: it has one parent, and a root that is its own ancestor is none.
        found += [child for child in children.pop(span.span_id, ()) if child.span_id != root_id]
    return found


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """The TraceService of OTLP into `spans`."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    async def Export(  # type: ignore[override,unused-ignore]
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take what one process sends."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.name != TRACE_SPAN:
                        self._spans.add(span.trace_id, _kept(span))
        return trace_service_pb2.ExportTraceServiceResponse()


def _kept(span: trace_pb2.Span) -> Span:
    attributes = {
        item.key: item.value.string_value[:MAX_TEXT]
        for item in span.attributes
        if item.key in KEPT and item.value.string_value
    }
    return Span(
        span.name[:MAX_TEXT],
        span.span_id[:8],
        span.parent_span_id[:8],
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def listen(spans: Spans, address: str) -> tuple[grpc.aio.Server, str]:
    """A started server and its address ("host:port"). FailedPrecondition where the address is in use, or where others
    than this machine could send to it: whoever can is believed."""
    host = address.rpartition(":")[0].strip("[]")
    if host != "localhost" and not _is_loopback(host):
        raise FailedPrecondition(f"playground_spans must be a loopback address, not {address}")
    options = [("grpc.max_receive_message_length", MAX_EXPORT_BYTES), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(spans), server)  # type: ignore[no-untyped-call,unused-ignore]
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise FailedPrecondition(f"the playground cannot listen for spans at {address}")
    await server.start()
    return server, f"{address.rpartition(':')[0]}:{port}"
