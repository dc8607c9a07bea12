"""Names, metrics, log lines without secrets, trace context in strings, bounded shutdown."""

from __future__ import annotations

import io
import json
import logging
import socket
import time
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.rpc import new_key
from kvmesh.telemetry import genai, metrics, names, redact, setup_logs, tracing

KNOWN_NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds
request_prefill_time_seconds request_decode_time_seconds prefix_cache_queries_total prefix_cache_hits_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""


def test_names_are_unique_and_keep_the_rule() -> None:
    all_names = [metric.name for metric in names.all_metrics()]
    assert len(all_names) == len(set(all_names)) > 40
    for metric in names.all_metrics():
        assert list(metric.buckets) == sorted(set(metric.buckets))
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")


def test_dashboards_find_the_names_they_know() -> None:
    expected = set(KNOWN_NAMES.split())
    have = {metric.name for metric in names.all_metrics()}
    assert {f"kvmesh:{name}" for name in expected} <= have


def test_every_metric_can_be_made_and_is_served() -> None:
    for metric in names.all_metrics():
        made = {"counter": metrics.counter, "gauge": metrics.gauge, "histogram": metrics.histogram}[metric.kind](metric)
        child = made.labels(*["x"] * len(metric.labels)) if metric.labels else made
        if metric.kind == "histogram":
            child.observe(0.1)
        else:
            child.inc()
    server = metrics.start_http("127.0.0.1:0")
    assert server is not None
    try:
        # What Prometheus asks for; the library's answer in OpenMetrics would spoil the names.
        asked = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
        scrape = urllib.request.Request(f"http://{server.address}/metrics", headers=asked)
        page = urllib.request.urlopen(scrape, timeout=60).read().decode()
    finally:
        server.close()
    served = {family.name for family in text_string_to_metric_families(page)}
    assert {metric.name.removesuffix("_total") for metric in names.all_metrics()} <= served
    with pytest.raises(OSError):  # noqa: PT011
        urllib.request.urlopen(f"http://{server.address}/metrics", timeout=1)


def test_the_exporter_can_be_off_and_says_when_the_port_is_taken() -> None:
    assert metrics.start_http("") is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match=r"metrics cannot listen on .* in use"):
            metrics.start_http(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    tracing.setup("test", exporter=exporter)
    yield exporter
    tracing.shutdown()


def test_a_string_field_carries_the_trace(spans) -> None:
    with tracing.span(names.SPAN_ENGINE_SEQUENCE) as outer:
        carried = tracing.traceparent()
    sent = tracing.start_span(names.SPAN_TRANSFER_SEND, parent=carried)
    sent.end()
    inner = {s.name: s for s in spans.get_finished_spans()}[names.SPAN_TRANSFER_SEND]
    assert inner.parent.span_id == outer.get_span_context().span_id
    assert tracing.traceparent() == ""


@given(st.one_of(st.text(max_size=80), st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")))
def test_any_string_is_a_harmless_parent(text: str) -> None:
    tracing.start_span("x", parent=text).end()


def test_sampling_follows_the_parent() -> None:
    exporter = InMemorySpanExporter()
    tracing.setup("test", ratio=0.0, exporter=exporter)
    try:
        with tracing.span("own"):
            pass
        sampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        with tracing.span("joined", parent=sampled):
            pass
        assert [s.name for s in exporter.get_finished_spans()] == ["joined"]
    finally:
        tracing.shutdown()


def test_an_exception_marks_the_span_without_its_text(spans) -> None:
    with pytest.raises(KeyError), tracing.span("x"):
        raise KeyError("secret")
    (span,) = spans.get_finished_spans()
    assert span.attributes[names.ERROR_TYPE] == "KeyError"
    assert "secret" not in span.to_json()


def test_a_collector_that_refuses_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tracing.setup("test", f"http://127.0.0.1:{port}")
    with tracing.span("x"):
        pass
    started = time.monotonic()
    assert tracing.shutdown(timeout_s=120.0) is False
    assert time.monotonic() - started < 60


def test_shutdown_is_bounded_when_the_collector_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing.setup("test", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with tracing.span("x"):
            pass
        started = time.monotonic()
        assert tracing.shutdown(timeout_s=0.3) is False
        assert time.monotonic() - started < 15  # the exporter's own patience is a minute


def logged(fmt: str, *args: object, level: int = logging.INFO, **kwargs: object) -> str:
    stream = io.StringIO()
    handler = setup_logs("router", instance="r1", fmt=fmt, stream=stream)
    handler.addFilter(logging.Filter("kvmesh.test"))  # an exporter of an earlier test may still log its retries
    try:
        logging.getLogger("kvmesh.test").log(level, *args, **kwargs)
    finally:
        logging.getLogger().removeHandler(handler)
    return stream.getvalue()


def test_json_lines_have_service_trace_and_extras(spans) -> None:
    with tracing.span("x"):
        entry = json.loads(logged("json", "hello %s", "you", extra={"pages": 3, "worker": "w"}))
        assert entry["trace_id"] == tracing.current_trace_id()
    assert (entry["service"], entry["instance"], entry["level"]) == ("router", "r1", "info")
    assert (entry["message"], entry["pages"], entry["worker"]) == ("hello you", 3, "w")


def test_text_is_one_line_whatever_the_message() -> None:
    line = logged("text", "a\nb", extra={"k": "c\nd"})
    assert line.count("\n") == 1
    assert "a\\nb k=c\\nd" in line


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_secrets_do_not_reach_the_log(fmt: str) -> None:
    key = new_key()
    line = logged(fmt, "auth %s for %s", f"Bearer {key}", "redis://user:hunter2@host/0", extra={"api_key": key})
    assert key not in line
    assert "hunter2" not in line
    try:
        raise ValueError(f"x-kvmesh-mesh-token: {key[4:]}")
    except ValueError:
        line = logged(fmt, "failed", level=logging.ERROR, exc_info=True)
    assert "ValueError" in line
    assert key[4:] not in line


def test_redact_leaves_plain_text_alone() -> None:
    for text in ("prompt tokens: 12", "listening on 127.0.0.1:50051", "http://host:80/path", "secret garden"):
        assert redact(text) == text
    assert redact('{"password": "hunter2", "n": 1}') == '{"password": "[redacted]", "n": 1}'
    assert "MII" not in redact("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n")


def test_genai_metrics_have_the_names_and_buckets_of_the_conventions() -> None:
    reader = InMemoryMetricReader()
    genai.setup("gateway", reader=reader)
    try:
        genai.genai().record("chat", "m", duration_s=1.2, ttft_s=0.2, input_tokens=7, output_tokens=11)
        genai.genai().record("chat", "m", duration_s=0.1, input_tokens=7, error_type="OVERLOADED")
        data = reader.get_metrics_data()
    finally:
        genai.shutdown()
    points = {m.name: list(m.data.data_points) for m in data.resource_metrics[0].scope_metrics[0].metrics}
    assert set(points) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.token.usage",
    }
    (ttft,) = points["gen_ai.server.time_to_first_token"]
    assert tuple(ttft.explicit_bounds) == names.TTFT_BUCKETS
    (tpot,) = points["gen_ai.server.time_per_output_token"]
    assert tpot.sum == pytest.approx(0.1)
    errors = {point.attributes.get("error.type") for point in points["gen_ai.server.request.duration"]}
    assert errors == {None, "OVERLOADED"}
    usage = {point.attributes["gen_ai.token.type"]: point.sum for point in points["gen_ai.client.token.usage"]}
    assert usage == {"input": 14, "output": 11}


def test_genai_metrics_are_silent_when_off() -> None:
    genai.setup("gateway")
    genai.genai().record("chat", "m", duration_s=1.0)
