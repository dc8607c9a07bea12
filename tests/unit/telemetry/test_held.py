"""Traces that are not sampled: exported whole when anything of them failed, forgotten otherwise, bounded in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvmesh.errors import Cancelled, Internal, Overloaded
from kvmesh.telemetry import metrics, names, tracing
from kvmesh.telemetry.held import SPAN_BYTES, Held

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
SAMPLED = UNSAMPLED[:-2] + "01"


@dataclass
class Out:
    """Where a `Held` puts what is exported."""

    spans: list[ReadableSpan] = field(default_factory=list)

    def put(self, spans) -> None:  # type: ignore[no-untyped-def]
        self.spans.extend(spans)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Nothing is sampled by its own chance."""
    memory = InMemorySpanExporter()
    tracing.setup("test", ratio=0.0, exporter=memory)
    yield memory
    tracing.shutdown()


@pytest.fixture
def held(exporter: InMemorySpanExporter) -> Held:
    found = tracing._held
    assert found is not None
    return found


def dropped(cause: str) -> float:
    return metrics.value(names.TRACE_SPANS_DROPPED, cause=cause)


def request(error: Exception | None = None, parent: str | None = None) -> None:
    """One with two spans inside, the second of which meets the error."""
    with tracing.span("request", parent=parent):
        with tracing.span("first"):
            pass
        if error is None:
            return
        try:
            with tracing.span("second"):
                raise error
        except type(error):
            pass


def test_what_went_well_is_forgotten(exporter: InMemorySpanExporter, held: Held) -> None:
    request()
    assert exporter.get_finished_spans() == ()
    assert held.held == (0, 0, 0)


def test_one_failed_span_takes_all_others_along(exporter: InMemorySpanExporter, held: Held) -> None:
    request(Internal("it broke"))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"request", "first", "second"}
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert spans["first"].parent.span_id == spans["request"].context.span_id
    assert all(span.context.trace_flags.sampled for span in spans.values())
    assert all(span.attributes[names.ATTR_KEPT] == "failed" for span in spans.values())
    assert spans["second"].attributes[names.ERROR_TYPE] == "INTERNAL"
    assert held.held == (0, 0, 0)


def test_the_flag_from_upstream_is_kept_and_passed_on(exporter: InMemorySpanExporter) -> None:
    with tracing.span("joined", parent=UNSAMPLED):
        assert tracing.traceparent().split("-")[1::2] == [UNSAMPLED.split("-")[1], "00"]
    assert exporter.get_finished_spans() == ()
    request(parent=SAMPLED)
    assert {span.name for span in exporter.get_finished_spans()} == {"request", "first"}
    assert all(names.ATTR_KEPT not in (span.attributes or {}) for span in exporter.get_finished_spans())


def test_what_failed_here_is_exported_under_the_id_from_upstream(exporter: InMemorySpanExporter) -> None:
    request(Internal("it broke"), parent=UNSAMPLED)
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {UNSAMPLED.split("-")[1]}
    (root,) = [span for span in spans if span.name == "request"]
    assert f"{root.parent.span_id:016x}" == UNSAMPLED.split("-")[2]


@pytest.mark.parametrize("error", [Cancelled("the client left"), GeneratorExit()])
def test_a_client_that_leaves_is_no_failure(exporter: InMemorySpanExporter, error: Exception) -> None:
    request(error)
    assert exporter.get_finished_spans() == ()


def test_a_span_that_outlives_its_parent_is_waited_for(exporter: InMemorySpanExporter) -> None:
    with tracing.span("call"):
        inner = tracing.start_span("work")
    tracing.past_span("phase", 1.0, 2.0, parent=tracing.trace.set_span_in_context(inner))
    assert exporter.get_finished_spans() == ()
    tracing.mark_failed(inner, "UNAVAILABLE")
    inner.end()
    assert {span.name for span in exporter.get_finished_spans()} == {"call", "work", "phase"}


def test_what_comes_late_of_a_failed_trace_follows_it(exporter: InMemorySpanExporter) -> None:
    with tracing.span("request") as root:
        tracing.mark_failed(root, "INTERNAL")
    tracing.past_span("cleanup", 1.0, 2.0, parent=tracing.trace.set_span_in_context(root))
    assert [span.name for span in exporter.get_finished_spans()] == ["request", "cleanup"]


def test_a_trace_may_be_kept_without_failing(exporter: InMemorySpanExporter) -> None:
    with tracing.span("healed") as root:
        tracing.keep(root)
    assert [span.name for span in exporter.get_finished_spans()] == ["healed"]


def test_none_is_held_where_failures_are_not_wanted() -> None:
    memory = InMemorySpanExporter()
    tracing.setup("test", ratio=0.0, failures_per_s=0.0, exporter=memory)
    try:
        with tracing.span("x") as opened:
            assert not opened.is_recording()
            tracing.mark_failed(opened, "INTERNAL")
        assert memory.get_finished_spans() == ()
    finally:
        tracing.shutdown()


class TestBounds:
    """With limits and a clock of the test's."""

    def make(self, **limits: object) -> tuple[Held, Out]:
        out = Out()
        self.now = 0.0
        given: Any = {"failures_per_s": 10.0, "clock": lambda: self.now, **limits}
        self.held = Held(out, Resource({}), InstrumentationScope("test"), **given)
        return self.held, out

    def inside(self, root, name: str = "inner") -> None:  # type: ignore[no-untyped-def]
        self.held.start(name, root).end()

    def fail(self, root) -> None:  # type: ignore[no-untyped-def]
        tracing.mark_failed(root, "INTERNAL")
        root.end()

    def test_the_oldest_spans_go_first_and_are_counted_when_they_are_missed(self) -> None:
        held, out = self.make(max_spans=3)
        old, new = self.held.start("old"), self.held.start("new")
        before = dropped("held_too_long")
        for root in (old, old, new, new):
            self.inside(root)
        assert held.held[1] == 2, "both of the older trace made room"
        self.fail(old)
        assert [span.name for span in out.spans] == ["old"]
        assert dropped("held_too_long") == before + 2
        new.end()
        assert held.held == (0, 0, 0)
        assert len(out.spans) == 1

    def test_bytes_are_bounded(self) -> None:
        held, _ = self.make(max_bytes=4 * SPAN_BYTES)
        for _ in range(50):
            root = self.held.start("open", attributes={"text": "x" * 1000})
            self.inside(root)
            assert held.held[2] <= 4 * SPAN_BYTES
        assert held.held[0] == 50

    def test_traces_that_never_end_are_forgotten(self) -> None:
        held, out = self.make(max_traces=4)
        roots = [self.held.start("open") for _ in range(10)]
        assert held.held[0] == 4
        self.fail(roots[0])
        assert [span.name for span in out.spans] == ["open"], "its own failure is known all the same"

    def test_a_storm_of_failures_is_bounded(self) -> None:
        _, out = self.make(failures_per_s=2.0)
        before = dropped("rate")
        for _ in range(100):
            self.fail(self.held.start("broken"))
        assert len(out.spans) == 20
        assert dropped("rate") == before + 80
        self.now += 1.0
        for _ in range(100):
            self.fail(self.held.start("broken"))
        assert len(out.spans) == 22

    def test_refusals_leave_room_for_what_breaks(self) -> None:
        _, out = self.make(failures_per_s=1.0)
        for _ in range(100):
            root = self.held.start("refused")
            tracing.mark_failed(root, Overloaded.reason)
            root.end()
        self.fail(self.held.start("broken"))
        assert [span.name for span in out.spans] == ["refused"] * 10 + ["broken"]

    def test_what_is_under_way_at_the_end_is_exported_if_it_failed(self) -> None:
        held, out = self.make()
        root, other = self.held.start("request"), self.held.start("other")
        self.inside(other)
        failing = self.held.start("part", root)
        self.fail(failing)
        assert not out.spans
        held.close()
        assert [span.name for span in out.spans] == ["part"]


def test_spans_that_end_after_the_end_are_harmless(exporter: InMemorySpanExporter, held: Held) -> None:
    outer = tracing.start_span("outer")
    with pytest.raises(ValueError, match="no"), tracing.span("inner", parent=trace.set_span_in_context(outer)):
        raise ValueError("no")
    late = tracing.start_span("late", parent=trace.set_span_in_context(outer))
    tracing.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["inner"]
    late.end()
    outer.end()
    assert held.held == (0, 0, 0)


def test_a_span_that_garbage_collection_ends_holds_nobody_up(exporter: InMemorySpanExporter, held: Held) -> None:
    def collected() -> None:
        # As if an allocation in there had collected the coroutine that was in this span.
        with held._lock:
            with tracing.span("outer"), tracing.span("inner"):
                pass

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert held.held == (0, 0, 0)
