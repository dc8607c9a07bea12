"""Traces: W3C trace context in and out, spans, and OTLP export when an endpoint is configured.

A share of the traces is sampled, and of all others those that failed are exported too (`held`). Without an endpoint no
SDK is loaded and spans record nothing, but an incoming trace context still travels on.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvmesh import __version__
from kvmesh.errors import KvmeshError
from kvmesh.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from kvmesh.telemetry.held import Held

log = logging.getLogger(__name__)

AttributeValue = str | bool | int | float | list[str]
Attributes = Mapping[str, AttributeValue]

TRACEPARENT = "traceparent"
EXPORT_TIMEOUT_S = 3
_propagator = TraceContextTextMapPropagator()
_noop = NoOpTracer()
_provider: TracerProvider | None = None
_traced: Tracer = _noop
_held: Held | None = None
_ratio = 1.0
_endpoint = ""


def setup(
    service_name: str,
    otlp_endpoint: str = "",
    ratio: float = 1.0,
    *,
    failures_per_s: float = 50.0,
    ca_file: Path | None = None,
    instance: str = "",
    exporter: SpanExporter | None = None,
) -> None:
    """Start exporting spans of this process.

    `otlp_endpoint`: OTLP/gRPC, "http://host:port" (plaintext) or "https://host:port"; "" and no `exporter` = no-op.
    `ratio`: share of the traces that start here; a trace that starts elsewhere keeps its sampling decision.
    `failures_per_s`: traces that are exported though not sampled since they failed, at most; 0 = none.
    `ca_file`: who signed the collector's certificate; None = the system's roots, or the standard OTEL_ variables.
    `exporter`: used instead of OTLP, synchronously (tests).
    """
    global _provider, _traced, _held, _endpoint, _ratio
    shutdown(timeout_s=1.0)
    _endpoint = otlp_endpoint if exporter is None else ""
    if not otlp_endpoint and exporter is None:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from kvmesh.telemetry.export import AtOnce, ExportQueue
    from kvmesh.telemetry.held import MAX_CHARS, MAX_EVENTS, MAX_LINKS, Held

    resource = Resource.create(
        {
            names.SERVICE_NAME: f"kvmesh-{service_name}",
            names.SERVICE_INSTANCE: instance,
            names.SERVICE_VERSION: __version__,
        }
    )
    out = AtOnce(exporter) if exporter is not None else ExportQueue(_otlp(otlp_endpoint, ca_file))
    provider = TracerProvider(
        # Where a trace starts, `start_span` has decided.
        sampler=ParentBased(ALWAYS_ON),
        resource=resource,
        span_limits=SpanLimits(max_attribute_length=MAX_CHARS, max_links=MAX_LINKS, max_events=MAX_EVENTS),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(out)
    _ratio = ratio
    if failures_per_s > 0:
        _held = Held(out, resource, InstrumentationScope("kvmesh", __version__), failures_per_s=failures_per_s)
    _provider, _traced = provider, provider.get_tracer("kvmesh", __version__)


def _otlp(endpoint: str, ca_file: Path | None) -> SpanExporter:
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=endpoint,
        insecure=not endpoint.startswith("https://"),
        credentials=grpc.ssl_channel_credentials(ca_file.read_bytes()) if ca_file is not None else None,
        timeout=EXPORT_TIMEOUT_S,
    )


def shutdown(timeout_s: float = 1.0) -> bool:
    """Flush and stop exporting; gives up after `timeout_s` (the collector may be gone). True when all was sent."""
    global _provider, _traced, _held
    provider, held = _provider, _held
    _provider, _traced, _held = None, _noop, None
    if provider is None:
        return True
    if held is not None:
        held.close()
    flushed = threading.Event()

    def run() -> None:
        try:
            if provider.force_flush(timeout_millis=int(timeout_s * 1000)):
                flushed.set()
            provider.shutdown()
        except Exception:
            log.warning("flushing spans failed", exc_info=True)

    thread = threading.Thread(target=run, name="kvmesh-trace-flush", daemon=True)
    thread.start()
    # Of a mesh on one machine the collector may be one of those that end together: it is not worth any time then.
    thread.join(0.0 if _refused(_endpoint) else timeout_s)
    return flushed.is_set()


def _refused(endpoint: str) -> bool:
    """Whether nobody listens at a collector's address; where that cannot be told at once, somebody does."""
    try:
        parts = urlsplit(endpoint)
        if not parts.hostname or not parts.port:
            return False
        socket.create_connection((parts.hostname, parts.port), timeout=0.1).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False


def traceparent(context: Context | None = None) -> str:
    """W3C `traceparent` of the current span (or of `context`), "" when there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context=context)
    return carrier.get(TRACEPARENT, "")


def inject(
    metadata: Iterable[tuple[str, str | bytes]] = (), context: Context | None = None
) -> list[tuple[str, str | bytes]]:
    """gRPC metadata with the trace context of the current span (or `context`) added."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context=context)
    return [*metadata, *carrier.items()]


def extract(parent: str | Iterable[tuple[str, str | bytes]] | None) -> Context:
    """Context from a `traceparent` string or from gRPC metadata; an absent or malformed value gives an empty one."""
    if not parent:
        return Context()
    if isinstance(parent, str):
        carrier = {TRACEPARENT: parent}
    else:
        carrier = {k: v for k, v in parent if k in (TRACEPARENT, "tracestate") and isinstance(v, str)}
    return _propagator.extract(carrier, context=Context()) if carrier else Context()


def start_span(
    name: str,
    *,
    parent: Context | str | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
    links: Sequence[SpanContext] = (),
    start_time_ns: int | None = None,
) -> Span:
    """A span that the caller ends with `.end()`, for work that crosses threads or outlives a call.

    `parent`: a context, a `traceparent` string, or None for the current span. `links`: spans that it has to do with,
    of its own trace or of others.
    """
    context = extract(parent) if isinstance(parent, str) else parent
    if _provider is None:
        return _noop.start_span(name, context)
    made = [Link(each) for each in links if each.is_valid] if links else []
    above: Span | None = trace.get_current_span(context)
    if above is not None and not above.get_span_context().is_valid:
        above = None
    sampled = random.random() < _ratio if above is None else above.get_span_context().trace_flags.sampled
    if sampled:
        return _traced.start_span(
            name, context=context, kind=kind, attributes=attributes, links=made, start_time=start_time_ns
        )
    if _held is not None:
        return _held.start(name, above, kind=kind, attributes=attributes, links=made, start_time_ns=start_time_ns)
    return _unsampled(above)


def _unsampled(above: Span | None) -> Span:
    """A span that records nothing: its parent's context travels on, or that of a new trace that is not sampled."""
    if above is not None:
        return NonRecordingSpan(above.get_span_context())
    return NonRecordingSpan(SpanContext(random.getrandbits(128) or 1, random.getrandbits(64) or 1, False))


def link(opened: Span, other: SpanContext | str | None, what: str) -> None:
    """Link an open span to another, by its context or `traceparent`; `what`: what the other is to it. Any string, also
    one that names no span, is harmless."""
    context = trace.get_current_span(extract(other)).get_span_context() if isinstance(other, str) else other
    if context is not None and context.is_valid and opened.is_recording():
        opened.add_link(context, {names.ATTR_LINK: what})


def keep(opened: Span) -> None:
    """Export the trace of an open span though nothing of it fails in the end."""
    if _held is not None:
        _held.keep(opened)


def past_span(name: str, begun_s: float, ended_s: float, *, parent: Context | str | None = None) -> None:
    """A span of something that is over, between two readings of `time.monotonic`."""
    if _provider is None:
        return
    to_epoch = _to_epoch_ns()
    opened = start_span(name, parent=parent, start_time_ns=int(begun_s * 1e9) + to_epoch)
    opened.end(int(max(begun_s, ended_s) * 1e9) + to_epoch)


def _to_epoch_ns() -> int:
    """What a reading of the monotonic clock lacks to the wall clock's. Of a few tries the one in which least time went
    by: between two readings another thread may run for long."""
    best, apart = 0, 0
    for _ in range(3):
        before = time.monotonic_ns()
        now = time.time_ns()
        after = time.monotonic_ns()
        if not best or after - before < apart:
            best, apart = now - before, after - before
        if apart < 20_000:
            break
    return best


@contextmanager
def span(
    name: str,
    *,
    parent: Context | str | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
    links: Sequence[SpanContext] = (),
) -> Iterator[Span]:
    """A span around a block, current inside it; an exception marks it failed by class name, without its message."""
    opened = start_span(name, parent=parent, kind=kind, attributes=attributes, links=links)
    try:
        with use_span(opened):
            yield opened
    except BaseException as exc:
        mark_failed(opened, exc.reason if isinstance(exc, KvmeshError) else type(exc).__name__)
        raise
    finally:
        opened.end()


@contextmanager
def use_span(opened: Span) -> Iterator[Span]:
    """Make `opened` the current span of a block, without ending it."""
    token = otel_context.attach(trace.set_span_in_context(opened))
    try:
        yield opened
    finally:
        otel_context.detach(token)


def mark_failed(opened: Span, error_type: str) -> None:
    """Record failure on a span: `error.type`, and status ERROR unless it ended because its client left."""
    opened.set_attribute(names.ERROR_TYPE, error_type)
    if error_type not in names.LEAVINGS:
        opened.set_status(Status(StatusCode.ERROR))


def current_trace_id() -> str:
    """Trace id of the current span as 32 hex digits, "" when there is none."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""
