"""What a request sees of its tenant's limits.

Life: `take` once the prompt is counted and before anything is asked of a router or a worker; `used` while tokens come
(never waits); `settle` once at the end, whatever the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Protocol

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Principal


@dataclass(frozen=True, slots=True)
class Window:
    """One rate limit as a client is told of it: how many a minute, how many are left, seconds until all are back."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class LimitState:
    """A tenant's rates just after its request was let in; None = no limit."""

    requests: Window | None = None
    tokens: Window | None = None


class Hold(Protocol):
    """What one request has taken."""

    @property
    def state(self) -> LimitState:
        """The tenant's rates just after."""

    def used(self, completion_tokens: int) -> None:
        """Output so far, all choices together. More is taken in the background when the hold runs short; where that is
        refused, the request's `stop` is called."""

    def short(self, completion_tokens: int) -> bool:
        """Whether that much output is more than was taken, so that `cover` is due before anybody sees it."""

    async def cover(self, completion_tokens: int) -> None:
        """Wait until that much is taken, or the request was stopped; for about as long as Redis may take."""

    def settle(self, usage: pb.Usage, served: pb.Served | None, code: int) -> None:
        """The end: what was used is charged, the rest given back. Returns at once; idempotent. `code`: google.rpc.Code,
        0 = it went well. `served`: None where nobody had taken it yet."""


class Counted(Protocol):
    """What limits are about in a request: a Job, or something like it. `served` may change while it runs."""

    @property
    def token_ids(self) -> Sized:
        """The prompt; only how long it is counts."""

    @property
    def sampling(self) -> pb.SamplingParams:
        """With `max_tokens`, `n` and `best_of`; 0 = no output."""

    @property
    def served(self) -> str:
        """The model that is paid for."""

    @property
    def request_id(self) -> str:
        """The client's own."""


class Limiter(Protocol):
    """Lets requests in. One for a gateway process."""

    async def take(self, principal: Principal, job: Counted, stop: Callable[[KvmeshError], None]) -> Hold:
        """Raises Overloaded (with `retry_after`; details name the limit), BudgetExceeded, or Unavailable where a budget
        cannot be checked."""


class NoHold:
    """Of a tenant without limits."""

    state = LimitState()

    def used(self, completion_tokens: int) -> None:
        """See Hold."""

    def short(self, completion_tokens: int) -> bool:
        """See Hold."""
        return False

    async def cover(self, completion_tokens: int) -> None:
        """See Hold."""

    def settle(self, usage: pb.Usage, served: pb.Served | None, code: int) -> None:
        """See Hold."""


class NoLimits:
    """Lets everything in."""

    async def take(self, principal: Principal, job: Counted, stop: Callable[[KvmeshError], None]) -> Hold:
        """See Limiter."""
        return NoHold()
