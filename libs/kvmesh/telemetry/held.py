"""Spans of traces that are not sampled: kept until it is known whether anything of them failed.

Sampling decides when a trace begins, and the flag travels with it: each process exports a sampled trace as it comes.
The spans of all other traces are kept here until the last of them in this process has ended. If one of them failed, all
are exported, under the same trace id; otherwise they are forgotten. Each process decides for itself by what it saw, so
a failure that one process hides from the next is exported where it was seen.

What is held is bounded in traces, spans and bytes; the oldest go first. So that a storm of failures is no storm of
spans, exported traces are bounded in number a second, those that only were refused (a wrong request, no room) apart
from those that broke.

A span here is not the SDK's: nearly all of them are forgotten, and one that is only kept costs a tenth.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

from kvmesh.telemetry import metrics, names

MAX_TRACES = 65_536
MAX_SPANS = 65_536
MAX_BYTES = 64 << 20
RECENT = 4096
"""Traces that were exported or not wanted for their number: what ends late of them goes the same way."""
SPAN_BYTES = 700
"""Of a span without attributes."""
MAX_CHARS = 1024
"""Of an attribute's text."""
MAX_EVENTS = 128
MAX_LINKS = 64
_UNSAMPLED, _SAMPLED = TraceFlags(TraceFlags.DEFAULT), TraceFlags(TraceFlags.SAMPLED)


class Out(Protocol):
    """Where spans go that are exported."""

    def put(self, spans: Iterable[ReadableSpan]) -> None:
        """Those of one trace that failed."""


class _Trace:
    """One trace in this process. `open`: spans that have not ended; `lost`: spans that were dropped for room;
    `forgotten`: it keeps none any more."""

    __slots__ = ("bytes", "failed", "forgotten", "lost", "open", "refused", "spans")

    def __init__(self) -> None:
        self.open = self.bytes = self.lost = 0
        self.spans: list[HeldSpan] = []
        self.failed = self.refused = self.forgotten = False


class HeldSpan(Span):
    """A span of a trace that is not sampled."""

    __slots__ = (
        *("attributes", "context", "ended_ns", "error", "events", "kind", "links", "name", "parent", "started_ns"),
        *("status", "trace", "_held"),
    )

    def __init__(
        self,
        held: Held,
        trace: _Trace,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue] | None,
        links: list[Link],
        started_ns: int,
    ) -> None:
        self._held = held
        self.trace = trace
        self.name, self.context, self.parent, self.kind = name, context, parent, kind
        self.attributes: dict[str, AttributeValue] = dict(attributes) if attributes else {}
        self.links = links
        self.events: list[tuple[str, Attributes, int]] = []
        self.status = StatusCode.UNSET
        self.started_ns = started_ns
        self.ended_ns = 0

    def get_span_context(self) -> SpanContext:
        """See Span."""
        return self.context

    def is_recording(self) -> bool:
        """See Span."""
        return not self.ended_ns

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """See Span."""
        if not self.ended_ns:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """See Span."""
        if not self.ended_ns:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """See Span."""
        if not self.ended_ns and len(self.events) < MAX_EVENTS:
            self.events.append((name, attributes, timestamp or time.time_ns()))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """See Span."""
        if not self.ended_ns and len(self.links) < MAX_LINKS:
            self.links.append(Link(context, attributes))

    def update_name(self, name: str) -> None:
        """See Span."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """See Span. Descriptions are not kept: they may quote a request."""
        self.status = status.status_code if isinstance(status, Status) else status

    def record_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
        """See Span. By its class alone."""
        self.add_event("exception", {"exception.type": type(exception).__name__})

    def end(self, end_time: int | None = None) -> None:
        """See Span."""
        if not self.ended_ns:
            self.ended_ns = end_time or time.time_ns()
            self._held.ended(self)

    @property
    def size(self) -> int:
        """Bytes that it keeps, about. Long texts are cut."""
        size = SPAN_BYTES + 300 * (len(self.events) + len(self.links)) + 100 * len(self.attributes)
        for key, value in self.attributes.items():
            if type(value) is str and len(value) > 64:
                if len(value) > MAX_CHARS:
                    value = self.attributes[key] = value[:MAX_CHARS]
                size += len(value)
        return size

    def readable(self, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
        """As it is exported: of a trace that is sampled after all."""
        context = self.context
        return ReadableSpan(
            self.name,
            context=SpanContext(context.trace_id, context.span_id, False, _SAMPLED, context.trace_state),
            parent=self.parent,
            resource=resource,
            attributes={**self.attributes, names.ATTR_KEPT: "failed"},
            events=[Event(name, attributes, timestamp) for name, attributes, timestamp in self.events],
            links=self.links,
            kind=self.kind,
            status=Status(self.status),
            start_time=self.started_ns,
            end_time=self.ended_ns,
            instrumentation_scope=scope,
        )


class _Bucket:
    """So many a second, and as many seconds' worth at once."""

    def __init__(self, rate: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._rate, self._most = rate, rate * burst_s
        self._left, self._at, self._clock = self._most, clock(), clock

    def take(self) -> bool:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Held:
    """See the module. `failures_per_s`: traces exported because they failed; ten seconds' worth may come at once."""

    def __init__(
        self,
        out: Out,
        resource: Resource,
        scope: InstrumentationScope,
        *,
        failures_per_s: float,
        max_traces: int = MAX_TRACES,
        max_spans: int = MAX_SPANS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._resource, self._scope = out, resource, scope
        self._max_traces, self._max_spans, self._max_bytes = max_traces, max_spans, max_bytes
        # Garbage is collected at any allocation, also in here: a coroutine that nobody awaits any more ends its span.
        self._lock = threading.RLock()
        self._traces: OrderedDict[int, _Trace] = OrderedDict()
        self._with_spans: OrderedDict[int, _Trace] = OrderedDict()
        self._recent: OrderedDict[int, bool] = OrderedDict()
        self._spans = self._bytes = 0
        self._broken = _Bucket(failures_per_s, 10.0, clock)
        self._refusals = _Bucket(failures_per_s, 10.0, clock)
        self._dropped = {
            cause: metrics.counter(names.TRACE_SPANS_DROPPED).labels(cause) for cause in ("held_too_long", "rate")
        }

    @property
    def held(self) -> tuple[int, int, int]:
        """Traces, spans and bytes now."""
        return len(self._traces), self._spans, self._bytes

    def start(
        self,
        name: str,
        parent: Span | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Iterable[Link] = (),
        start_time_ns: int | None = None,
    ) -> HeldSpan:
        """A span of a trace that is not sampled; without a parent, of a new one."""
        above = parent.get_span_context() if parent is not None else None
        trace_id = above.trace_id if above is not None else random.getrandbits(128) or 1
        context = SpanContext(
            trace_id, random.getrandbits(64) or 1, False, _UNSAMPLED, above.trace_state if above is not None else None
        )
        with self._lock:
            trace = self._traces.get(trace_id) if above is not None else None
            if trace is None:
                trace = self._traces[trace_id] = _Trace()
                if len(self._traces) > self._max_traces:
                    self._forget(*self._traces.popitem(last=False))
            trace.open += 1
        return HeldSpan(
            self, trace, name, context, above, kind, attributes, list(links), start_time_ns or time.time_ns()
        )

    def keep(self, opened: Span) -> None:
        """Export the trace of this span though none of its spans fails."""
        if isinstance(opened, HeldSpan):
            opened.trace.failed = True

    def ended(self, span: HeldSpan) -> None:
        """Called by each span, once."""
        with self._lock:
            ready = self._ended(span.context.trace_id, span.trace, span)
        if ready:
            self._export(ready)

    def _ended(self, trace_id: int, trace: _Trace, span: HeldSpan) -> list[HeldSpan]:
        """What is to be exported now."""
        trace.open -= 1
        if span.status is StatusCode.ERROR:
            if span.attributes.get(names.ERROR_TYPE) in names.REFUSALS:
                trace.refused = True
            else:
                trace.failed = True
        if trace.open > 0:
            self._hold(trace_id, trace, span)
            return []
        if self._traces.get(trace_id) is trace:
            del self._traces[trace_id]
        if trace.spans:
            self._with_spans.pop(trace_id, None)
            self._spans -= len(trace.spans)
            self._bytes -= trace.bytes
        known = self._recent.get(trace_id)
        if known is None:
            if not (trace.failed or trace.refused):
                return []
            known = self._recent[trace_id] = (self._broken if trace.failed else self._refusals).take()
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        if not known:
            self._dropped["rate"].inc(len(trace.spans) + 1)
            return []
        if trace.lost:
            self._dropped["held_too_long"].inc(trace.lost)
        return [*trace.spans, span]

    def _hold(self, trace_id: int, trace: _Trace, span: HeldSpan) -> None:
        if trace.forgotten:
            trace.lost += 1
            return
        size = span.size
        if not trace.spans:
            self._with_spans[trace_id] = trace
        trace.spans.append(span)
        trace.bytes += size
        self._spans += 1
        self._bytes += size
        while self._with_spans and (self._spans > self._max_spans or self._bytes > self._max_bytes):
            self._drop(*next(iter(self._with_spans.items())))

    def _forget(self, trace_id: int, trace: _Trace) -> None:
        """A trace that others push out: what it still has open is known by that itself."""
        trace.forgotten = True
        if trace.spans:
            self._drop(trace_id, trace)

    def _drop(self, trace_id: int, trace: _Trace) -> None:
        """Its spans so far; how many there were is counted, should it fail."""
        self._with_spans.pop(trace_id, None)
        self._spans -= len(trace.spans)
        self._bytes -= trace.bytes
        trace.lost += len(trace.spans)
        trace.spans, trace.bytes = [], 0

    def _export(self, spans: Iterable[HeldSpan]) -> None:
        self._out.put([span.readable(self._resource, self._scope) for span in spans])

    def close(self) -> None:
        """Nothing more comes: traces that are under way and failed already are exported as far as they are known."""
        with self._lock:
            failed = [trace.spans for trace in self._traces.values() if trace.failed]
            # Spans that end later find nothing of theirs here.
            for trace in self._traces.values():
                trace.spans, trace.bytes, trace.forgotten = [], 0, True
            self._traces.clear()
            self._with_spans.clear()
            self._spans = self._bytes = 0
        for spans in failed:
            self._export(spans)
