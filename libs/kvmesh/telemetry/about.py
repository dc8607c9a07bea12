"""Which request a log line belongs to. A line that is written while a request is served gets its ids by itself; where
there is no such context (an engine's thread, a callback) the line is given them: `log.warning(…, extra=about(…))`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext

REQUEST_ID = "request_id"
MAX_CHARS = 256
"""Of a request id in a line: clients choose them, and a line may be written before theirs is refused."""
_SPAN = "_kvmesh_span"
_request: ContextVar[str] = ContextVar("kvmesh_request", default="")


@contextmanager
def of_request(request_id: str) -> Iterator[None]:
    """Lines of the block, and of tasks that it starts, belong to this request."""
    token = _request.set(request_id)
    try:
        yield
    finally:
        # A generator that is closed from elsewhere ends in another context.
        with suppress(ValueError):
            _request.reset(token)


def about(request_id: str, span: Span | None = None) -> dict[str, Any]:
    """`extra` of a line about a request that is not being served here and now."""
    return {REQUEST_ID: request_id, _SPAN: span.get_span_context() if span is not None else None}


def ids(record: logging.LogRecord) -> tuple[str, str, str]:
    """Request id, trace id and span id of a line, each "" where there is none."""
    context: SpanContext | None = getattr(record, _SPAN, None)
    if context is None:
        context = trace.get_current_span().get_span_context()
    request_id = (getattr(record, REQUEST_ID, "") or _request.get())[:MAX_CHARS]
    if not context.is_valid:
        return request_id, "", ""
    return request_id, trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
