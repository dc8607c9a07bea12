"""Spans of traces that are not sampled: kept until it is known whether anything of them failed.

Sampling decides when a trace begins, and the flag travels with it: each process exports a sampled trace as it comes.
The other traces are recorded all the same and held here until the last of their spans in this process has ended. If one
of them failed, all are exported, under the same trace id; otherwise they are forgotten. Each process decides for
itself by what it saw, so a failure that one process hides from the next is exported where it was seen.

What is held is bounded in traces, spans and bytes; the oldest go first. So that a storm of failures is no storm of
spans, exported traces are bounded in number a second, those that only were refused (a wrong request, no room) apart
from those that broke.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

from kvmesh.telemetry import metrics, names

MAX_TRACES = 65_536
MAX_SPANS = 65_536
MAX_BYTES = 64 << 20
RECENT = 4096
"""Traces that were exported or not wanted for their number: what ends late of them goes the same way."""
SPAN_BYTES = 1500
"""Of a span without attributes, as the SDK keeps it."""


class Out(Protocol):
    """Where spans go that are exported."""

    def on_end(self, span: ReadableSpan) -> None:
        """One of a sampled trace."""

    def put(self, spans: Iterable[ReadableSpan]) -> None:
        """Those of one trace that failed."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what there is."""

    def shutdown(self) -> None:
        """Send what there is, and nothing more."""


class RecordAll(Sampler):
    """What `inner` would drop is recorded, and not marked as sampled: so it travels on as what it is."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See Sampler."""
        result = self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is not Decision.DROP:
            return result
        return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)

    def get_description(self) -> str:
        """See Sampler."""
        return f"RecordAll({self._inner.get_description()})"


class _Trace:
    """One trace in this process. `open`: spans that have not ended; `lost`: spans that were forgotten for room."""

    __slots__ = ("bytes", "failed", "lost", "open", "refused", "spans")

    def __init__(self) -> None:
        self.open = self.bytes = self.lost = 0
        self.spans: list[ReadableSpan] = []
        self.failed = self.refused = False


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


class Held(SpanProcessor):
    """See the module. `failures_per_s`: traces exported because they failed; ten seconds' worth may come at once."""

    def __init__(
        self,
        out: Out,
        *,
        failures_per_s: float,
        max_traces: int = MAX_TRACES,
        max_spans: int = MAX_SPANS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._max = max_traces, max_spans, max_bytes
        self._lock = threading.Lock()
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

    def keep(self, trace_id: int) -> None:
        """Export this trace though none of its spans failed here."""
        with self._lock:
            trace = self._traces.get(trace_id)
            if trace is not None:
                trace.failed = True

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See SpanProcessor."""
        context = span.get_span_context()
        if context is None or context.trace_flags.sampled:
            return
        with self._lock:
            trace = self._traces.get(context.trace_id)
            if trace is None:
                trace = self._traces[context.trace_id] = _Trace()
                if len(self._traces) > self._max[0]:
                    oldest, gone = self._traces.popitem(last=False)
                    self._forget(oldest, gone)
            trace.open += 1

    def on_end(self, span: ReadableSpan) -> None:
        """See SpanProcessor."""
        context = span.context
        if context is None:
            return
        if context.trace_flags.sampled:
            self._out.on_end(span)
            return
        failed = span.status.status_code is StatusCode.ERROR
        with self._lock:
            ready = self._ended(context.trace_id, span, failed)
        if ready:
            self._out.put([_sampled(each) for each in ready])

    def _ended(self, trace_id: int, span: ReadableSpan, failed: bool) -> list[ReadableSpan]:
        """What is to be exported now."""
        trace = self._traces.get(trace_id)
        if trace is None:
            # It was forgotten while this span was open.
            trace = _Trace()
            trace.open = 1
        trace.open -= 1
        if failed:
            refused = _error_type(span) in names.REFUSALS
            trace.failed, trace.refused = trace.failed or not refused, trace.refused or refused
        self._hold(trace_id, trace, span)
        if trace.open > 0:
            return []
        self._traces.pop(trace_id, None)
        self._with_spans.pop(trace_id, None)
        self._spans -= len(trace.spans)
        self._bytes -= trace.bytes
        known = self._recent.get(trace_id)
        if known is None:
            if not (trace.failed or trace.refused):
                return []
            known = (self._broken if trace.failed else self._refusals).take()
            self._recent[trace_id] = known
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        if not known:
            self._dropped["rate"].inc(len(trace.spans))
            return []
        if trace.lost:
            self._dropped["held_too_long"].inc(trace.lost)
        return trace.spans

    def _hold(self, trace_id: int, trace: _Trace, span: ReadableSpan) -> None:
        size = _size(span)
        if not trace.spans:
            self._with_spans[trace_id] = trace
        trace.spans.append(span)
        trace.bytes += size
        self._spans += 1
        self._bytes += size
        while self._spans > self._max[1] or self._bytes > self._max[2]:
            self._forget(*next(iter(self._with_spans.items())))

    def _forget(self, trace_id: int, trace: _Trace) -> None:
        """Its spans so far; it is still known how many there were, should it fail."""
        self._with_spans.pop(trace_id, None)
        self._spans -= len(trace.spans)
        self._bytes -= trace.bytes
        trace.lost += len(trace.spans)
        trace.spans, trace.bytes = [], 0

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Of what is exported; what is held stays."""
        return self._out.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Nothing more comes: traces that are under way and failed already are exported as far as they are known."""
        with self._lock:
            failed = [trace.spans for trace in self._traces.values() if trace.failed]
            self._traces.clear()
            self._with_spans.clear()
        for spans in failed:
            self._out.put([_sampled(each) for each in spans])
        self._out.shutdown()


def _error_type(span: ReadableSpan) -> object:
    return (span.attributes or {}).get(names.ERROR_TYPE)


def _size(span: ReadableSpan) -> int:
    size = SPAN_BYTES + 400 * (len(span.events) + len(span.links))
    for value in (span.attributes or {}).values():
        size += 120 + (len(value) if isinstance(value, str) else 0)
    return size


def _sampled(span: ReadableSpan) -> ReadableSpan:
    """The same span, of a trace that is exported."""
    context = span.context
    assert context is not None
    return ReadableSpan(
        span.name,
        context=SpanContext(
            context.trace_id, context.span_id, False, TraceFlags(TraceFlags.SAMPLED), context.trace_state
        ),
        parent=span.parent,
        resource=span.resource,
        attributes={**(span.attributes or {}), names.ATTR_KEPT: "failed"},
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
