"""The ONE table between `kvmesh.errors` and gRPC and HTTP statuses, and the way errors cross the wire.

On the wire an error is a gRPC status with `google.rpc` details: ErrorInfo(reason, domain, metadata) always, RetryInfo
for overload only (a client retries RESOURCE_EXHAUSTED exactly when it is there), BadRequest for an invalid field.
Inside frames, where no gRPC status exists, it is a `FrameError`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvmesh import errors
from kvmesh.errors import KvmeshError

DOMAIN = "kvmesh.dev"
DETAILS_KEY = "grpc-status-details-bin"
# Together below 8 KiB after base64 and percent-encoding: the metadata limit that foreign clients have by default.
MAX_MESSAGE_BYTES = 512
MAX_DETAILS = 8
MAX_DETAIL_BYTES = 128
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 3600.0


class Row(NamedTuple):
    """How one class appears outside: gRPC status, HTTP status, and whether the same request may succeed elsewhere."""

    code: grpc.StatusCode
    http: int
    retryable: bool


TABLE: dict[type[KvmeshError], Row] = {
    errors.InvalidArgument: Row(grpc.StatusCode.INVALID_ARGUMENT, 400, False),
    errors.NotFound: Row(grpc.StatusCode.NOT_FOUND, 404, False),
    errors.AlreadyExists: Row(grpc.StatusCode.ALREADY_EXISTS, 409, False),
    errors.Unauthenticated: Row(grpc.StatusCode.UNAUTHENTICATED, 401, False),
    errors.PermissionDenied: Row(grpc.StatusCode.PERMISSION_DENIED, 403, False),
    errors.Overloaded: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, True),
    errors.BudgetExceeded: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, False),
    errors.TooLarge: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 413, False),
    errors.FailedPrecondition: Row(grpc.StatusCode.FAILED_PRECONDITION, 400, False),
    errors.NotCached: Row(grpc.StatusCode.FAILED_PRECONDITION, 400, False),
    errors.DeadlineExceeded: Row(grpc.StatusCode.DEADLINE_EXCEEDED, 504, False),
    errors.Cancelled: Row(grpc.StatusCode.CANCELLED, 499, False),
    errors.Unavailable: Row(grpc.StatusCode.UNAVAILABLE, 503, True),
    errors.WorkerLost: Row(grpc.StatusCode.UNAVAILABLE, 503, True),
    errors.TransferFailed: Row(grpc.StatusCode.UNAVAILABLE, 503, True),
    errors.Internal: Row(grpc.StatusCode.INTERNAL, 500, False),
    errors.DataLoss: Row(grpc.StatusCode.DATA_LOSS, 500, False),
}

_INTERNAL = TABLE[errors.Internal]
_BY_REASON: dict[str, type[KvmeshError]] = {cls.reason: cls for cls in TABLE}
# A status without our details: from grpc itself, a proxy, or a foreign server. RESOURCE_EXHAUSTED is not overload
# there, since overload always brings RetryInfo; grpc itself raises it for a message over the limit.
_BY_CODE: dict[grpc.StatusCode, type[KvmeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.TooLarge,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNIMPLEMENTED: errors.FailedPrecondition,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.ABORTED: errors.Unavailable,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.INTERNAL: errors.Internal,
    grpc.StatusCode.UNKNOWN: errors.Internal,
}
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def row(exc: KvmeshError | type[KvmeshError]) -> Row:
    """The table's row of an error; a subclass without one takes its nearest ancestor's."""
    cls = exc if isinstance(exc, type) else type(exc)
    for ancestor in cls.__mro__:
        found = TABLE.get(ancestor)
        if found is not None:
            return found
    return _INTERNAL


def grpc_code(exc: KvmeshError) -> grpc.StatusCode:
    """gRPC status of an error."""
    return row(exc).code


def http_status(exc: KvmeshError) -> int:
    """HTTP status of an error (499: the client left)."""
    return row(exc).http


def retry_after(exc: KvmeshError) -> float | None:
    """Seconds after which to come back: a number for overload (default 1), None for everything else."""
    if not isinstance(exc, errors.Overloaded):
        return None
    seconds = DEFAULT_RETRY_AFTER_S if exc.retry_after is None else exc.retry_after
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def _clip(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8; lone surrogates, which UTF-8 cannot carry, become "?"."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def sentence(message: str) -> str:
    """What a caller is told: at most MAX_MESSAGE_BYTES, on one line, whatever it quotes from a request."""
    message = message[:MAX_MESSAGE_BYTES]
    if not message.isprintable():
        message = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in message)
    return _clip(message, MAX_MESSAGE_BYTES)


def to_status_details(exc: KvmeshError) -> status_pb2.Status:
    """google.rpc.Status of an error, bounded so that it always fits into trailing metadata."""
    info = error_details_pb2.ErrorInfo(reason=exc.reason, domain=DOMAIN)
    for key, value in list(exc.details.items())[:MAX_DETAILS]:
        info.metadata[_clip(key, 64)] = _clip(value, MAX_DETAIL_BYTES)
    details: list[Any] = [info]
    after = retry_after(exc)
    if after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    message = sentence(exc.message)
    if isinstance(exc, errors.InvalidArgument) and exc.details.get("field"):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clip(exc.details["field"], MAX_DETAIL_BYTES), description=_clip(message, MAX_DETAIL_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=grpc_code(exc).value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def from_status_details(status: status_pb2.Status) -> KvmeshError:
    """Inverse of `to_status_details`; unknown or foreign details fall back on the code alone."""
    code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    cls: type[KvmeshError] | None = None
    details: dict[str, str] = {}
    after: float | None = None
    for packed in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        try:
            if packed.Is(info.DESCRIPTOR) and packed.Unpack(info) and info.domain == DOMAIN:
                known = _BY_REASON.get(info.reason)
                if known is not None and TABLE[known].code is code:
                    cls = known
                details = dict(info.metadata)
            elif packed.Is(retry.DESCRIPTOR) and packed.Unpack(retry):
                after = retry.retry_delay.ToNanoseconds() / 1e9
        except DecodeError:
            continue
    if cls is None:
        cls = _BY_CODE.get(code, errors.Internal)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and after is not None:
            cls = errors.Overloaded
    return cls(status.message, retry_after=after, details=details)


def from_rpc_error(exc: grpc.RpcError) -> KvmeshError:
    """The KvmeshError that a failed call stands for (`grpc.aio.AioRpcError`, or a synchronous `grpc.Call` error)."""
    call: Any = exc
    code: grpc.StatusCode = call.code() or grpc.StatusCode.UNKNOWN
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if status.code == code.value[0]:
                return from_status_details(status)
    return from_status_details(status_pb2.Status(code=code.value[0], message=call.details() or code.value[1]))


class FrameError(NamedTuple):
    """An error inside a frame: gRPC code number, reason, message, and whether another attempt may succeed."""

    code: int
    reason: str
    message: str
    retryable: bool


def to_frame(exc: BaseException) -> FrameError:
    """Tuple of an error for a frame; an exception that is not ours becomes a generic INTERNAL."""
    safe = public_error(exc)
    found = row(safe)
    return FrameError(found.code.value[0], safe.reason, sentence(safe.message), found.retryable)


def from_frame(code: int, reason: str, message: str, retryable: bool = False) -> KvmeshError:
    """Inverse of `to_frame`. `retryable` decides only where neither reason nor code is known here."""
    status_code = _CODE_BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN)
    cls = _BY_REASON.get(reason)
    if cls is None or TABLE[cls].code is not status_code:
        cls = _BY_CODE.get(status_code, errors.Internal)
        if retryable and not TABLE[cls].retryable:
            cls = errors.Overloaded if status_code is grpc.StatusCode.RESOURCE_EXHAUSTED else errors.Unavailable
    return cls(message)


def is_retryable(exc: BaseException) -> bool:
    """True when the same request may succeed on another worker or later."""
    return isinstance(exc, KvmeshError) and row(exc).retryable


def public_error(exc: BaseException) -> KvmeshError:
    """What a caller may see of any exception: KvmeshError as it is, everything else a generic INTERNAL."""
    return exc if isinstance(exc, KvmeshError) else errors.Internal("internal error")


async def abort(context: grpc.aio.ServicerContext[Any, Any], exc: KvmeshError) -> NoReturn:
    """End a call with the status of `exc`, details included; never returns."""
    status = to_status_details(exc)
    await context.abort(grpc_code(exc), status.message, ((DETAILS_KEY, status.SerializeToString()),))


def code_name(number: int) -> str:
    """Name of a numeric gRPC code; "UNKNOWN" for a number that is none."""
    return _CODE_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN).name
