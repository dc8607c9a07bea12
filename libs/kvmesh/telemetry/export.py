"""The queue between ending spans and the collector. Whoever ends a span never waits, whatever the collector does: the
queue is bounded, what does not fit or is not taken is dropped and counted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

from opentelemetry import context as otel_context
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)

MAX_SPANS = 8192
BATCH = 512
EVERY_S = 0.5


class ExportQueue(SpanProcessor):
    """Spans of sampled traces, sent by one thread of its own: `every_s` after the first came, or when there is a batch.

    The thread sleeps while there is nothing.
    """

    def __init__(
        self, exporter: SpanExporter, *, max_spans: int = MAX_SPANS, batch: int = BATCH, every_s: float = EVERY_S
    ) -> None:
        self._exporter = exporter
        self._max = max_spans
        self._batch = batch
        self._every_s = every_s
        self._spans: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._sending = self._lost = 0
        self._hurry = self._closed = False
        self._full = metrics.counter(names.TRACE_SPANS_DROPPED).labels("queue_full")
        self._refused = metrics.counter(names.TRACE_SPANS_DROPPED).labels("collector")
        self._thread = threading.Thread(target=self._run, name="kvmesh-spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """See SpanProcessor."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.put((span,))

    def put(self, spans: Iterable[ReadableSpan]) -> None:
        """To be sent; where there is no room the newest are dropped."""
        with self._changed:
            before = len(self._spans)
            for span in spans:
                if self._closed or len(self._spans) >= self._max:
                    self._full.inc()
                else:
                    self._spans.append(span)
            if not before or len(self._spans) >= self._batch > before:
                self._changed.notify_all()

    def _run(self) -> None:
        # What the exporter itself calls is no part of any trace.
        otel_context.attach(otel_context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._spans or self._closed)
                self._changed.wait_for(self._due, self._every_s)
                taken = [self._spans.popleft() for _ in range(min(self._batch, len(self._spans)))]
                if not taken:
                    return
                self._sending = len(taken)
            sent = self._send(taken)
            with self._changed:
                self._sending = 0
                if not sent:
                    self._lost += len(taken)
                    self._refused.inc(len(taken))
                self._hurry = self._hurry and bool(self._spans)
                self._changed.notify_all()

    def _due(self) -> bool:
        return self._hurry or self._closed or len(self._spans) >= self._batch

    def _send(self, spans: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as exc:
            log.warning("spans are not exported: %s", type(exc).__name__)
            return False

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what there is; False when that takes longer, or when not all of it was taken."""
        with self._changed:
            before = self._lost
            self._hurry = bool(self._spans)
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._spans and not self._sending, timeout_millis / 1e3)
            return done and self._lost == before

    def shutdown(self) -> None:
        """Take nothing more; what there is is sent as long as the collector takes it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=30.0)
        self._exporter.shutdown()


class AtOnce(SimpleSpanProcessor):
    """The same without a queue: who ends a span exports it (tests)."""

    def put(self, spans: Iterable[ReadableSpan]) -> None:
        """See ExportQueue."""
        for span in spans:
            self.on_end(span)
