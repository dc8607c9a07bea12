"""Lines know their request, in other threads too; what repeats too often is left out, and counted."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.telemetry import about, metrics, names, setup_logs, tracing
from kvmesh.telemetry.flood import ACCESS, FloodGate

log = logging.getLogger("kvmesh.test.about")


@pytest.fixture
def lines() -> Iterator[Any]:
    """Call it for the lines so far, parsed."""
    stream = io.StringIO()
    handler = setup_logs("test", fmt="json", stream=stream)
    handler.addFilter(logging.Filter("kvmesh.test"))
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def spans() -> Iterator[None]:
    tracing.setup("test", ratio=0.0, exporter=InMemorySpanExporter())
    yield
    tracing.shutdown()


def test_a_line_knows_the_request_that_is_being_served(lines: Any, spans: None) -> None:
    with about.of_request("r-1"), tracing.span("x") as span:
        log.info("inside")
    log.info("outside")
    inside, outside = lines()
    context = span.get_span_context()
    assert inside["request_id"] == "r-1"
    assert (inside["trace_id"], inside["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert not {"request_id", "trace_id", "span_id"} & set(outside)


def test_a_line_of_another_thread_is_told(lines: Any, spans: None) -> None:
    span = tracing.start_span("x")
    thread = threading.Thread(target=lambda: log.warning("from a thread", extra=about.about("r-2", span)))
    thread.start()
    thread.join()
    (line,) = lines()
    assert (line["request_id"], line["trace_id"]) == ("r-2", f"{span.get_span_context().trace_id:032x}")
    assert not [key for key in line if key.startswith("_")]


def test_text_lines_have_them_too() -> None:
    stream = io.StringIO()
    handler = setup_logs("test", stream=stream)
    handler.addFilter(logging.Filter("kvmesh.test"))
    with about.of_request("r-3\nfake line"):
        log.info("hello")
    logging.getLogger().removeHandler(handler)
    assert stream.getvalue().count("\n") == 1
    assert "request=r-3\\nfake line" in stream.getvalue()


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_what_a_client_chose_cannot_make_a_line_long(fmt: Any) -> None:
    stream = io.StringIO()
    handler = setup_logs("test", fmt=fmt, stream=stream)
    handler.addFilter(logging.Filter("kvmesh.test"))
    with about.of_request("r" * 1_000_000):
        log.info("x" * 1_000_000, extra={"model": "m" * 1_000_000})
    logging.getLogger().removeHandler(handler)
    assert 256 < len(stream.getvalue()) < 160_000


class Gate:
    """A gate with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gate = FloodGate(lambda: self.now)

    def passes(self, line: int = 1, name: str = "kvmesh.x", level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.LogRecord(name, level, "x.py", line, "text", None, None)
        return record if self.gate.filter(record) else None


def test_a_flood_of_one_line_is_bounded_and_told() -> None:
    gate, before = Gate(), metrics.value(names.LOGS_SUPPRESSED)
    assert sum(gate.passes() is not None for _ in range(1000)) == 50
    assert metrics.value(names.LOGS_SUPPRESSED) == before + 950
    assert gate.passes(line=2) is not None, "another place is not kept back"
    gate.now += 1.0
    told = [record for _ in range(10) if (record := gate.passes()) is not None]
    assert len(told) == 5
    assert told[0].suppressed == 950  # type: ignore[attr-defined]
    assert not hasattr(told[1], "suppressed")


def test_debug_is_never_kept_back_and_access_lines_have_their_own_rate() -> None:
    gate = Gate()
    assert all(gate.passes(level=logging.DEBUG) for _ in range(1000))
    assert sum(gate.passes(name=ACCESS, level=logging.INFO) is not None for _ in range(1000)) == 200


def test_a_value_with_control_characters_stays_in_its_line() -> None:
    stream = io.StringIO()
    handler = setup_logs("test", stream=stream)
    try:
        logging.getLogger("kvmesh.test").warning("a\r\x1b[2Jb\nc", extra={"model": "x\x1b]0;y\x07\u009bz"})
    finally:
        logging.getLogger().removeHandler(handler)
    (line,) = stream.getvalue().splitlines()
    assert "a\\r\\x1b[2Jb\\nc model=x\\x1b]0;y\\x07\\x9bz" in line
