"""Every error kvmesh raises on purpose, free of any transport.

`kvmesh.rpc.status` holds the one table from these classes to gRPC and HTTP statuses. `reason` is the stable,
machine-readable name that travels in `google.rpc.ErrorInfo`; the message is for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class KvmeshError(Exception):
    """Base of all errors.

    `retry_after` is in seconds and only meaningful for overload; `details` are short strings that are safe to
    show to the caller (never secrets, never prompt text).
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, retry_after: float | None = None, details: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.details: dict[str, str] = dict(details or {})


class InvalidArgument(KvmeshError):
    """The request itself is wrong; sending it again cannot help."""

    reason = "INVALID_ARGUMENT"


class NotFound(KvmeshError):
    """A named model, request or worker does not exist."""

    reason = "NOT_FOUND"


class AlreadyExists(KvmeshError):
    """The id is in use by something that still runs."""

    reason = "ALREADY_EXISTS"


class Unauthenticated(KvmeshError):
    """No valid credential."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(KvmeshError):
    """A valid credential without the right."""

    reason = "PERMISSION_DENIED"


class Overloaded(KvmeshError):
    """No room now; `retry_after` says when to come back."""

    reason = "OVERLOADED"


class BudgetExceeded(KvmeshError):
    """The tenant's budget is spent: no retry helps before the next period or a larger budget."""

    reason = "BUDGET_EXCEEDED"


class TooLarge(KvmeshError):
    """A message or prompt over a fixed limit: a retry is pointless."""

    reason = "TOO_LARGE"


class FailedPrecondition(KvmeshError):
    """The peer must do something else first (for example open its Frames stream)."""

    reason = "FAILED_PRECONDITION"


class NotCached(FailedPrecondition):
    """The request allows an answer from the cache alone, and there is none."""

    reason = "NOT_CACHED"


class DeadlineExceeded(KvmeshError):
    """A time limit ran out."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(KvmeshError):
    """The caller left or aborted."""

    reason = "CANCELLED"


class Unavailable(KvmeshError):
    """The service cannot answer now; another replica may."""

    reason = "UNAVAILABLE"


class WorkerLost(Unavailable):
    """A worker's stream ended or its heartbeats stopped."""

    reason = "WORKER_LOST"


class TransferFailed(Unavailable):
    """A KV transfer generation failed; the pages may be requested again under a new one."""

    reason = "TRANSFER_FAILED"


class Internal(KvmeshError):
    """A broken invariant of our own."""

    reason = "INTERNAL"


class DataLoss(KvmeshError):
    """Bytes that should be there are not: a truncated model file, a torn message."""

    reason = "DATA_LOSS"
