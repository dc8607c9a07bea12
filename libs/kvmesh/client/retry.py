"""When a call is made again, and after what pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvmesh.errors import AlreadyExists, Cancelled, KvmeshError, Overloaded, Unavailable
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.status import DETAILS_KEY, from_rpc_error, retry_after

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call that failed before its first event is made again, and when.

    `attempts`: calls in all, the first included. The pause before attempt k is drawn from 0 to
    min(`max_pause_s`, `pause_s` · 2^(k-2)); a gateway that says when to come back is taken at its word. A call never
    goes on past its deadline: where the pause does not fit, the error is raised at once.
    """

    attempts: int = 4
    pause_s: float = 0.1
    max_pause_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.pause_s < 0 or self.max_pause_s < 0:
            raise ValueError("attempts must be at least 1, pauses at least 0")

    def pause(self, failed: int, error: KvmeshError) -> float:
        """Seconds after `failed` attempts, of which the last ended with `error`."""
        drawn = random.uniform(0.0, min(self.max_pause_s, self.pause_s * 2.0 ** min(failed - 1, 30)))
        after = retry_after(error)
        return drawn if after is None else after + drawn


NO_RETRY = Retry(attempts=1)


class Attempts:
    """The attempts of one call. After a failure, `again` pauses and returns, or raises the failure."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        self._retry = retry
        self._deadline = Deadline.after(timeout_s)
        self._reconnected = False
        self.failed = 0

    def timeout(self) -> float | None:
        """Seconds left; None = no limit. DeadlineExceeded when none are."""
        self._deadline.check("the call's timeout")
        return self._deadline.timeout()

    async def again(self, cause: grpc.aio.AioRpcError) -> None:
        """Return once the call may be made again; else raise the KvmeshError of `cause`."""
        error = from_rpc_error(cause)
        if _connection_ended(cause):
            if not self._reconnected:
                # A gateway that goes away says GOAWAY, and the calls that cross it never reached anybody: another
                # connection is all that they need. It counts as no attempt.
                self._reconnected = True
                return
            if isinstance(error, Cancelled):
                error = Unavailable("the gateway went away before it had read the call")
        await self.after(error, cause)

    async def after(self, error: KvmeshError, cause: BaseException | None = None) -> None:
        """Like `again`, for a failure that is a KvmeshError already."""
        self.failed += 1
        # The request's own id is still in use where the gateway has not noticed yet that its first call is dead.
        passes = isinstance(error, Unavailable | Overloaded) or (
            isinstance(error, AlreadyExists) and (self.failed > 1 or self._reconnected)
        )
        pause = self._retry.pause(self.failed, error)
        if not passes or self.failed >= self._retry.attempts or pause >= self._deadline.remaining():
            raise error from cause
        await asyncio.sleep(pause)


def _connection_ended(cause: grpc.aio.AioRpcError) -> bool:
    """Whether it was the connection's end, and no service's answer: that would bring details.

    CANCELLED is what a server's library answers to calls that come while it shuts down; one's own is no such error.
    """
    if cause.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return False
    trailing: Any = cause.trailing_metadata() or ()
    return all(key != DETAILS_KEY for key, _ in trailing)


def was_ours(task: asyncio.Task[Any] | None) -> bool:
    """Whether the CancelledError at hand was meant for this task; else the call was cancelled below it."""
    return task is None or task.cancelling() > 0


async def call(
    retry: Retry, timeout_s: float | None, attempt: Callable[[float | None], Awaitable[T]], closed: KvmeshError
) -> T:
    """A unary call that may be made twice. `attempt` gets the seconds left; `closed` is raised where the channel is
    closed meanwhile."""
    attempts = Attempts(retry, timeout_s)
    while True:
        try:
            return await attempt(attempts.timeout())
        except grpc.aio.AioRpcError as exc:
            await attempts.again(exc)
        except grpc.aio.UsageError as exc:
            raise closed from exc
        except asyncio.CancelledError:
            if was_ours(asyncio.current_task()):
                raise
            raise closed from None
