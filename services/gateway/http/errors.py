"""The ONE table from errors to bodies of the HTTP face, in OpenAI's form.

`kvmesh.rpc.status` has the HTTP status of each class; here is what of it is said to whom.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvmesh import errors
from kvmesh.errors import KvmeshError
from kvmesh.rpc import status
from services.gateway.http.escape import text_bytes

CONTEXT_LENGTH = "context_length_exceeded"
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class HttpError(KvmeshError):
    """An error that only HTTP has: `http` is its status, `code` OpenAI's name of it."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, http: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.http = http
        self.code = code
        self.headers = dict(headers or {})


class Kind(NamedTuple):
    """OpenAI's `type` and `code` of a class of errors."""

    type: str
    code: str | None


TABLE: dict[type[KvmeshError], Kind] = {
    errors.InvalidArgument: Kind(INVALID_REQUEST, None),
    errors.NotFound: Kind(INVALID_REQUEST, "not_found"),
    errors.AlreadyExists: Kind(INVALID_REQUEST, "already_exists"),
    errors.Unauthenticated: Kind(INVALID_REQUEST, "invalid_api_key"),
    errors.PermissionDenied: Kind(INVALID_REQUEST, "permission_denied"),
    errors.Overloaded: Kind("rate_limit_error", "rate_limit_exceeded"),
    errors.TooLarge: Kind(INVALID_REQUEST, "too_large"),
    errors.FailedPrecondition: Kind(INVALID_REQUEST, "failed_precondition"),
    errors.NotCached: Kind(INVALID_REQUEST, "not_cached"),
    errors.DeadlineExceeded: Kind("timeout_error", "deadline_exceeded"),
    errors.Cancelled: Kind("cancelled_error", "cancelled"),
    errors.Unavailable: Kind(SERVER_ERROR, "unavailable"),
}
# By its stable name, so that a class which comes later needs no import here.
BY_REASON = {"BUDGET_EXCEEDED": Kind("insufficient_quota", "insufficient_quota")}
_HEAD = re.compile(r"[^.\[]*")
_OTHER = Kind(SERVER_ERROR, "internal_error")
# What a client may send again, whatever its own rules say of the status.
_NEVER_AGAIN = frozenset({"insufficient_quota", "too_large", CONTEXT_LENGTH})


def _kind(error: KvmeshError) -> Kind:
    if isinstance(error, HttpError):
        return Kind(INVALID_REQUEST if error.http < 500 else SERVER_ERROR, error.code)
    named = BY_REASON.get(error.reason)
    if named is not None:
        return named
    for cls in type(error).__mro__:
        if cls in TABLE:
            kind = TABLE[cls]
            break
    else:
        return _OTHER
    details = error.details
    if isinstance(error, errors.InvalidArgument):
        return Kind(kind.type, details.get("reason") or details.get("code"))
    if isinstance(error, errors.NotFound) and details.get("field") in ("model", "name"):
        return Kind(kind.type, "model_not_found")
    if isinstance(error, errors.Overloaded) and "limit" not in details:
        # Nobody asked too much: there is no room.
        return Kind(SERVER_ERROR, "overloaded")
    return kind


class Renamed:
    """Names of this face for fields that the front knows by others."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = dict(names or {})

    def field(self, name: str) -> str:
        """This face's name of a field; of "stop[3]" and "cache_control.tau" the beginning counts."""
        whole = self._names.get(name)
        if whole:
            return whole
        head = _HEAD.match(name)
        first = head[0] if head is not None else ""
        return (self._names.get(first) or first) + name[len(first) :]

    def message(self, error: KvmeshError) -> str:
        """The sentence, with the field by its name here."""
        field = error.details.get("field", "")
        if field and error.message.startswith(field + ":"):
            return self.field(field) + error.message[len(field) :]
        return error.message


PLAIN = Renamed()


def http_status(error: KvmeshError) -> int:
    """Status of an error."""
    return error.http if isinstance(error, HttpError) else status.http_status(error)


def error_object(error: KvmeshError, renamed: Renamed = PLAIN) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _kind(error)
    field = error.details.get("field")
    return {
        "message": status.sentence(renamed.message(error)),
        "type": kind.type,
        "param": renamed.field(field) if field else None,
        "code": kind.code,
    }


def error_body(error: KvmeshError, renamed: Renamed = PLAIN) -> bytes:
    """Body of an answer that is an error."""
    return text_bytes(json.dumps({"error": error_object(error, renamed)}, ensure_ascii=False, separators=(",", ":")))


def error_headers(error: KvmeshError) -> list[tuple[bytes, bytes]]:
    """What clients need to know beside the body: whether and when to come back, and how to prove who they are."""
    pairs: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpError):
        pairs += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    after = status.retry_after(error) if not isinstance(error, HttpError) else None
    if after is None and isinstance(error, errors.Unavailable):
        after = error.retry_after
    if after is not None:
        pairs.append((b"retry-after", b"%d" % max(1, math.ceil(after))))
        pairs.append((b"retry-after-ms", b"%d" % max(1, math.ceil(after * 1e3))))
    if isinstance(error, errors.Unauthenticated):
        pairs.append((b"www-authenticate", b"Bearer"))
    if _kind(error).code in _NEVER_AGAIN:
        pairs.append((b"x-should-retry", b"false"))
    return pairs
