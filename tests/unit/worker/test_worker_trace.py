"""One trace joins Submit, the request's life on decode, prefill and both sidecars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.telemetry import names, tracing
from test_worker_remote import mesh
from worker_harness import prompt, until


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    tracing.setup("test", exporter=memory)
    yield memory
    tracing.shutdown()


async def test_one_trace_joins_decode_prefill_and_sidecars(exporter: InMemorySpanExporter) -> None:
    async with mesh() as m:
        with tracing.span("the caller") as caller:
            trace_id = caller.get_span_context().trace_id
            await m.ask(prompt(100))
        await m.all_back()
        await until(lambda: len([s for s in exporter.get_finished_spans() if s.name == "kvmesh.v1.Prefill/Run"]) == 1)
        spans = {s.name: s for s in exporter.get_finished_spans() if s.context.trace_id == trace_id}

        def parent(name: str) -> str:
            wanted = spans[name].parent
            return next((s.name for s in spans.values() if wanted and s.context.span_id == wanted.span_id), "")

        assert parent("kvmesh.v1.Decode/Submit") == "the caller"
        assert parent(names.SPAN_DECODE_REQUEST) == "kvmesh.v1.Decode/Submit"
        assert parent(names.SPAN_DECODE_REMOTE_PREFILL) == names.SPAN_DECODE_REQUEST
        assert parent("kvmesh.v1.Prefill/Run") == names.SPAN_DECODE_REMOTE_PREFILL
        assert parent(names.SPAN_ENGINE_PREFILL) == "kvmesh.v1.Prefill/Run"
        told = m.decode.sidecar.traceparents + m.prefill.sidecar.traceparents
        assert len(told) == 3
        assert {header.split("-")[1] for header in told} == {f"{trace_id:032x}"}
        # The request's span lives until its end, not until Submit's answer.
        assert spans[names.SPAN_DECODE_REQUEST].end_time > spans["kvmesh.v1.Decode/Submit"].end_time
        attributes = spans[names.SPAN_DECODE_REQUEST].attributes
        assert attributes[names.ATTR_TRANSPORT] == "fake"
        assert attributes[names.ATTR_PREFILL_WORKER] == "prefill-0"


async def test_each_phase_is_one_span_on_the_worker_that_did_it(exporter: InMemorySpanExporter) -> None:
    async with mesh() as m:
        await m.ask(prompt(100))
        await m.all_back()
        wanted = {names.SPAN_ENGINE_QUEUE: 2, names.SPAN_ENGINE_COMPUTE: 1, names.SPAN_ENGINE_DECODE: 1}

        def found(name: str) -> list[ReadableSpan]:
            return [span for span in exporter.get_finished_spans() if span.name == name]

        await until(lambda: all(len(found(name)) == count for name, count in wanted.items()))
        await until(lambda: len(found(names.SPAN_ENGINE_PREFILL)) == 1)
        (request,), (run,) = found(names.SPAN_DECODE_REQUEST), found(names.SPAN_ENGINE_PREFILL)
        (decode,), (compute,) = found(names.SPAN_ENGINE_DECODE), found(names.SPAN_ENGINE_COMPUTE)
        assert {span.parent.span_id for span in found(names.SPAN_ENGINE_QUEUE) if span.parent} == {
            request.context.span_id,
            run.context.span_id,
        }
        assert decode.parent is not None
        assert decode.parent.span_id == request.context.span_id
        assert compute.parent is not None
        assert compute.parent.span_id == run.context.span_id
        # Two readings of two clocks are not one.
        slack = 50_000_000
        for inner, outer in ((decode, request), (compute, run)):
            assert outer.start_time - slack <= inner.start_time <= inner.end_time <= outer.end_time + slack
        assert compute.end_time <= decode.start_time + slack
        # A short prompt is computed where it is decoded.
        exporter.clear()
        await m.ask(prompt(5))
        await until(lambda: len(found(names.SPAN_DECODE_REQUEST)) == 1)
        (request,), (compute,) = found(names.SPAN_DECODE_REQUEST), found(names.SPAN_ENGINE_COMPUTE)
        (decode,) = found(names.SPAN_ENGINE_DECODE)
        assert compute.parent is not None
        assert compute.parent.span_id == request.context.span_id
        assert compute.end_time <= decode.start_time + slack


async def test_without_an_exporter_the_callers_trace_still_travels() -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with mesh() as m:
        request = m.gateway.request(prompt(100), prefill=[m.prefill.target()])
        answer = m.gateway.answers.setdefault((request.request_id, 0), type(await m.ask(prompt(5)))())
        await m.gateway.stub.Submit(request, timeout=10, metadata=[("traceparent", header)])
        await answer.wait()
        told = m.decode.sidecar.traceparents + m.prefill.sidecar.traceparents
        assert len(told) == 3
        assert {value.split("-")[1] for value in told} == {header.split("-")[1]}
