"""The playground's strip: phases out of spans, and the receiver that keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: F401  (its protos are used)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.errors import FailedPrecondition
from kvmesh.telemetry import names
from services.gateway.playground.phases import OTHER, PHASES, Span, complete, phases
from services.gateway.playground.spans import Spans, listen

MS = 1_000_000
_ids = itertools.count(1)


def root(start: int, end: int, *, tenant: str = "t", request: str = "r", **attributes: str) -> Span:
    given = {names.ATTR_TENANT: tenant, names.ATTR_REQUEST_ID: request, names.GEN_AI_OPERATION_NAME: "chat"}
    return Span("chat m", next(_ids).to_bytes(8, "big"), b"", start * MS, end * MS, given | attributes)


def span(name: str, start: int, end: int, parent: bytes = b"", **attributes: str) -> Span:
    return Span(name, next(_ids).to_bytes(8, "big"), parent, start * MS, end * MS, attributes)


def test_a_prompt_sent_while_it_is_computed_is_counted_once() -> None:
    spans = [
        root(0, 100),
        span(names.SPAN_GATEWAY_PLACE, 2, 12),
        span(names.SPAN_CACHE_EXACT, 4, 6),
        span(names.SPAN_GATEWAY_ATTEMPT, 12, 16),
        span(names.SPAN_DECODE_REQUEST, 15, 99),
        span(names.SPAN_ENGINE_QUEUE, 15, 20),
        span(names.SPAN_DECODE_REMOTE_PREFILL, 20, 50),
        span(names.SPAN_TRANSFER_RECEIVE, 21, 48),
        span(names.SPAN_ENGINE_PREFILL, 22, 47),
        span(names.SPAN_ENGINE_COMPUTE, 25, 40),
        span(names.SPAN_TRANSFER_SEND, 24, 46),
        span(names.SPAN_ENGINE_DECODE, 50, 96),
    ]
    # 0-2 and 96-100 belong to nobody; 40-50 is what sending adds to computing, 20-25 is the way to prefill.
    assert phases(spans) == {
        "cache": 2.0, "queue": 16.0, "prefill": 15.0, "transfer": 15.0, "decode": 46.0, "other": 6.0
    }  # fmt: skip


def test_an_answer_from_the_cache_is_time_of_the_cache() -> None:
    place = span(names.SPAN_GATEWAY_PLACE, 1, 4, **{names.ATTR_DECISION: "answer"})
    spans = [root(0, 6), place, span(names.SPAN_GATEWAY_REPLAY, 4, 5)]
    assert phases(spans)["cache"] == 4.0
    assert complete(spans)


def test_a_place_that_was_only_looked_for_is_waiting() -> None:
    spans = [root(0, 6), span(names.SPAN_GATEWAY_PLACE, 1, 4, **{names.ATTR_DECISION: "placement"})]
    assert phases(spans) == {
        "cache": 0.0, "queue": 3.0, "prefill": 0.0, "transfer": 0.0, "decode": 0.0, "other": 3.0
    }  # fmt: skip


def test_without_the_gateways_span_there_is_no_strip() -> None:
    assert phases([span(names.SPAN_ENGINE_DECODE, 0, 5)]) == {}
    assert not complete([span(names.SPAN_ENGINE_DECODE, 0, 5)])


KNOWN = sorted(value for name, value in vars(names).items() if name.startswith("SPAN_"))


@given(
    st.integers(0, 50),
    st.integers(51, 100),
    st.lists(st.tuples(st.sampled_from(KNOWN), st.integers(-20, 120), st.integers(-20, 120)), max_size=30),
)
def test_parts_always_add_up_to_the_whole(start: int, end: int, pieces: list[tuple[str, int, int]]) -> None:
    found = phases([root(start, end), *(span(*piece) for piece in pieces)])
    assert tuple(found) == PHASES
    assert sum(found.values()) == pytest.approx(end - start)
    assert all(value >= 0 for value in found.values())
    covered = {at for name, a, b in pieces for at in range(max(a, start), min(b, end)) if _counts(name)}
    assert found[OTHER] == pytest.approx(end - start - len(covered))


def _counts(name: str) -> bool:
    return phases([root(0, 1), span(name, 0, 1)])[OTHER] == 0


def test_complete_waits_for_every_service() -> None:
    served = span(names.SPAN_DECODE_REQUEST, 1, 9, **{names.ATTR_PREFILL_WORKER: "prefill-0"})
    spans = [root(0, 10), served, span(names.SPAN_ENGINE_DECODE, 5, 9)]
    assert not complete(spans)
    for name in (names.SPAN_ENGINE_COMPUTE, names.SPAN_TRANSFER_RECEIVE):
        spans.append(span(name, 2, 4))
        assert not complete(spans)
    spans.append(span(names.SPAN_DECODE_REMOTE_PREFILL, 2, 4))
    assert complete(spans)
    assert complete([root(0, 10), span(names.SPAN_DECODE_REQUEST, 1, 9), span(names.SPAN_ENGINE_DECODE, 5, 9)])
    assert complete([root(0, 10, **{names.ERROR_TYPE: "OVERLOADED"})])


# --- what is kept
def trace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_tenant_sees_its_own_requests_alone() -> None:
    spans = Spans()
    mine, theirs = root(0, 5, tenant="a"), root(0, 5, tenant="b", request="other")
    for each in (mine, theirs, span("x", 0, 1, mine.span_id), span("y", 0, 1, theirs.span_id), span("z", 0, 1)):
        spans.add(trace(1), each)
    assert [each.name for each in spans.of("a", "r")] == ["chat m", "x"]
    assert [each.name for each in spans.of("b", "other")] == ["chat m", "y"]
    assert spans.of("b", "r") == []
    assert spans.of("a", "other") == []


def test_a_circle_of_parents_ends() -> None:
    spans = Spans()
    mine = root(0, 5)
    spans.add(trace(1), Span("chat m", mine.span_id, b"child", 0, 5, mine.attributes))
    spans.add(trace(1), Span("x", b"child", mine.span_id, 0, 1))
    assert len(spans.of("t", "r")) == 2


def test_memory_is_bounded() -> None:
    now = 0.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    spans = Spans(max_traces=3, max_spans=4, ttl_s=10.0, clock=clock)
    for number in range(5):
        for _ in range(9):
            spans.add(trace(number), span("x", 0, 1))
        spans.add(trace(number), root(0, 1, request=f"r{number}"))
    assert len(spans) == 3
    assert spans.of("t", "r1") == []
    assert len(spans.of("t", "r4")) == 1, "the gateway's own span comes last and finds room"
    for _ in range(20):
        spans.add(trace(4), root(0, 1, request="again"))
    assert len(spans._traces[trace(4)].spans) <= 4 + 4
    now = 11.0
    assert spans.of("t", "r4") == []
    assert len(spans) == 0
    assert spans._ids == {}


def test_all_traces_together_are_bounded() -> None:
    spans = Spans(max_traces=100, max_spans=50, max_total=60)
    for number in range(5):
        for _ in range(30):
            spans.add(trace(number), span("x", 0, 1))
    assert list(spans._traces) == [trace(3), trace(4)]
    assert spans._total == sum(len(each.spans) for each in spans._traces.values()) == 60


def test_a_span_that_is_sent_twice_counts_once() -> None:
    spans = Spans()
    mine = root(0, 5)
    spans.add(trace(1), mine)
    spans.add(trace(1), mine)
    spans.add(b"short", root(0, 5, request="odd"))
    assert len(spans.of("t", "r")) == 1
    assert len(spans) == 1


async def test_spans_come_over_otlp() -> None:
    spans = Spans()
    server, address = await listen(spans, "127.0.0.1:0")
    try:
        request = trace_service_pb2.ExportTraceServiceRequest()
        sent = request.resource_spans.add().scope_spans.add().spans.add()
        sent.trace_id, sent.span_id, sent.name = trace(7), b"12345678", "n" * 5000
        sent.start_time_unix_nano, sent.end_time_unix_nano = 5, 9
        for key, value in root(0, 1).attributes.items():
            item = sent.attributes.add(key=key)
            item.value.string_value = value
        async with grpc.aio.insecure_channel(address) as channel:
            await trace_service_pb2_grpc.TraceServiceStub(channel).Export(request, timeout=30)
        (kept,) = spans.of("t", "r")
        assert (kept.start_ns, kept.end_ns, len(kept.name)) == (5, 9, 256)
        for wrong in (address, "0.0.0.0:0", "example.org:4317"):
            with pytest.raises(FailedPrecondition):
                await listen(spans, wrong)
    finally:
        await server.stop(None)
