"""A request's body: read within its limits, then parsed as JSON of which there is only one reading."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.types import Receive, Scope

from kvmesh.errors import InvalidArgument, Overloaded
from services.gateway.http.errors import HttpError

# Parsing a larger one would hold up every stream of this process.
INLINE_BYTES = 64 * 1024
READING_BYTES = 256 << 20
# Of free-form parts, such as schemas.
MAX_DEPTH = 100
MAX_NODES = 65_536
MAX_OBJECTS = 16_384
MAX_NAMES = 4096


class Reading:
    """Bytes of bodies that are being read, all connections together."""

    def __init__(self, limit: int = READING_BYTES) -> None:
        self._limit = limit
        self.size = 0

    def add(self, count: int) -> None:
        """Overloaded when there is no room for them."""
        if count > 0 and self.size + count > self._limit:
            raise Overloaded("too many large requests are being read at once", retry_after=1.0)
        self.size += count


class Gone(Exception):
    """The client left before its request was whole."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """First value of a header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def check_type(scope: Scope) -> None:
    """Only JSON, and not packed. A page of another origin cannot send that type without asking first."""
    given = (header(scope, b"content-type") or b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        shown = f"the header 'Content-Type: {given[:64]}'" if given.isprintable() and given else "no Content-Type"
        raise HttpError(
            415,
            f"Unsupported content type: this method takes 'application/json', and the request has {shown}.",
            code="unsupported_content_type",
        )
    encoding = (header(scope, b"content-encoding") or b"identity").strip().lower()
    if encoding != b"identity":
        raise HttpError(415, "Unsupported content encoding: send the body as it is.", code="unsupported_encoding")


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float, reading: Reading) -> bytes:
    """The whole body. HttpError 413 as soon as it is known to be larger than `limit`, 408 when it takes too long;
    Overloaded where `reading` has no room."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                reading.add(len(part))
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                if part:
                    parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise HttpError(408, f"The body did not arrive within {timeout_s:g} seconds.", code="request_timeout") from None
    finally:
        reading.add(-size)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body is larger than {limit} bytes.", code="too_large")


async def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. InvalidArgument with one sentence for everything else."""
    value = parse_json(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse_json, raw)
    if not isinstance(value, dict):
        raise _bad("The body must be a JSON object.")
    return value


def parse_json(raw: bytes) -> Any:
    """JSON without duplicate names, NaN, or text that is not Unicode."""
    if not raw.strip():
        raise _bad("The body is empty; a JSON object is expected.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _bad(f"The body is not valid UTF-8 (byte {exc.start}).") from None
    try:
        value = json.loads(text, object_pairs_hook=_Objects(), parse_constant=_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half a surrogate pair is no text: nothing behind here could carry it.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as exc:
        raise _bad(f"The body is not valid JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}.") from None
    except RecursionError:
        raise _bad("The body is nested too deeply.") from None
    except UnicodeEncodeError:
        raise _bad("The body holds half of a surrogate pair.") from None
    except ValueError:
        # Digits without end.
        raise _bad("The body is not valid JSON: a number in it is too long.") from None
    return value


def check_free_form(value: Any, field: str) -> None:
    """InvalidArgument for a free-form value that is nested deeper than `MAX_DEPTH` or has more than `MAX_NODES` values:
    no more than that is ever allowed in text either."""
    level, nodes = [value], 1
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            nodes += len(item)
            if nodes > MAX_NODES:
                raise InvalidArgument(f"{field}: is too large", details={"field": field})
            children = item.values() if isinstance(item, dict) else item
            deeper.extend(child for child in children if isinstance(child, dict | list))
        if not deeper:
            return
        level = deeper
    raise InvalidArgument(f"{field}: is nested too deeply", details={"field": field})


class _Objects:
    """Takes each object as it is parsed; a body is no place for a million of them."""

    def __init__(self) -> None:
        self._left = MAX_OBJECTS

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            raise _bad(f"The body has more than {MAX_OBJECTS} objects.")
        if len(pairs) > MAX_NAMES:
            raise _bad(f"The body has an object of more than {MAX_NAMES} names.")
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise _bad(f"The body has the name {name[:64]!r} twice in one object.")
                seen.add(name)
        return value


def _constant(name: str) -> NoReturn:
    raise _bad(f"The body is not valid JSON: {name} is no number.")


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument(message, details={"code": "invalid_json"})
