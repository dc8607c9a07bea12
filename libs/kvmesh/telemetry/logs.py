"""Logs on stderr, as text for people or JSON for machines, each line with the service, and with the request and the
trace that it belongs to (`about`). What repeats too often is left out (`flood`).

`redact` runs over every rendered line, so that a credential that slips into a message does not reach the disk.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any, Literal, TextIO

from kvmesh.telemetry import about
from kvmesh.telemetry.flood import FloodGate

_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 [redacted]"),
    (re.compile(r"\bkvm-[A-Za-z0-9_-]{16,}"), "kvm-[redacted]"),
    (re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"), "[redacted]"),
    (
        re.compile(
            r"(?i)(\b(?:x-kvmesh-mesh-token|mesh[_-]?token|api[_-]?key|authorization|password|passwd|secret)\b"
            r"[\"']?\s*[:=]\s*[\"']?)(?!\[redacted\]|bearer\b|basic\b)[^\s\"',;}]+"
        ),
        r"\1[redacted]",
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), "[redacted]"),
)
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", about.REQUEST_ID}
MAX_MESSAGE_CHARS = 16384
# Of each further value: prompts that are asked for may be that long.
MAX_VALUE_CHARS = 1 << 17


def redact(text: str) -> str:
    """Replace what looks like a credential: bearer values, kvmesh keys, URL passwords, `password=…`, private keys."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD and not key.startswith("_")}


# A line break in a value must not look like a line of its own, nor an escape move a terminal's cursor.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t", 10: "\\n", 13: "\\r"}


def plain(text: str) -> str:
    """Text in one line, its control characters shown by their codes."""
    return text.translate(_CONTROL)


class _Formatter(logging.Formatter):
    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self.service = service
        self.instance = instance

    def _message(self, record: logging.LogRecord) -> str:
        return redact(record.getMessage()[:MAX_MESSAGE_CHARS])

    def _stack(self, record: logging.LogRecord) -> str:
        return redact(self.formatException(record.exc_info)) if record.exc_info else ""


class TextFormatter(_Formatter):
    """`12:30:01.250 INFO  router kvmesh.router: message key=value trace=…`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        # A newline in a message must not look like a line of its own.
        message = plain(self._message(record))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self.service} {record.name}: {message}"
        for key, value in _extras(record).items():
            line += " " + plain(redact(f"{key}={value}"[:MAX_VALUE_CHARS]))
        request_id, trace_id, _ = about.ids(record)
        if request_id:
            line += plain(f" request={redact(request_id)}")
        if trace_id:
            line += f" trace={trace_id}"
        stack = self._stack(record)
        return f"{line}\n{stack}" if stack else line


class JsonFormatter(_Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, service, instance, logger, message, and of a request its
    request_id, trace_id, span_id."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "instance": self.instance,
            "logger": record.name,
            "message": self._message(record),
        }
        request_id, trace_id, span_id = about.ids(record)
        if request_id:
            entry[about.REQUEST_ID] = redact(request_id)
        if trace_id:
            entry["trace_id"], entry["span_id"] = trace_id, span_id
        for key, value in _extras(record).items():
            plain = value if isinstance(value, (int, float, bool)) or value is None else str(value)
            # Rendered with its key, since only the key tells that a value is secret.
            told = redact(f"{key}={plain}"[:MAX_VALUE_CHARS]).partition("=")[2] if isinstance(plain, str) else plain
            entry.setdefault(key, told)
        stack = self._stack(record)
        if stack:
            entry["stack"] = stack
        return json.dumps(entry, ensure_ascii=False, default=str)


def setup_logs(
    service: str,
    *,
    instance: str = "",
    level: str = "info",
    fmt: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
) -> logging.Handler:
    """Make the root logger write to `stream` (stderr) in the given format; replaces what an earlier call installed."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler.formatter, _Formatter)]:
        root.removeHandler(old)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter((JsonFormatter if fmt == "json" else TextFormatter)(service, instance))
    handler.addFilter(FloodGate())
    root.addHandler(handler)
    root.setLevel(level.upper())
    for noisy in ("asyncio", "urllib3", "opentelemetry", "grpc"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    return handler
