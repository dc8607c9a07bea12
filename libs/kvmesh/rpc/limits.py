"""Deadlines as remaining time: they cross hops as milliseconds left, never as a clock reading."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.errors import DeadlineExceeded

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock (seconds); `math.inf` = none."""

    at: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = time.monotonic) -> Deadline:
        """The deadline `seconds` from now; None = never. Zero or less has already expired."""
        return cls(math.inf if seconds is None else clock() + seconds, clock)

    @classmethod
    def after_ms(cls, milliseconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The deadline `milliseconds` from now."""
        return cls.after(milliseconds / 1000.0, clock)

    def remaining(self) -> float:
        """Seconds left, never below 0; inf = no deadline."""
        return max(0.0, self.at - self.clock())

    def remaining_ms(self) -> int:
        """Whole milliseconds left, rounded down so that a hop never gains time; 2**31 - 1 at most."""
        # The nanosecond undoes float error: 600 ms must not read as 599.
        return int(min(self.remaining() * 1000.0 + 1e-6, 2**31 - 1))

    def timeout(self, cap: float | None = None) -> float | None:
        """Seconds left for `asyncio.timeout` or a gRPC call, `cap` at most; None = no deadline at all."""
        left = min(self.remaining(), math.inf if cap is None else cap)
        return None if math.isinf(left) else left

    @property
    def expired(self) -> bool:
        """True when no time is left."""
        return self.clock() >= self.at

    def check(self, what: str) -> None:
        """Raise DeadlineExceeded naming `what` when no time is left."""
        if self.expired:
            raise DeadlineExceeded(f"{what}: no time left", details={"limit": what})

    def earlier(self, other: Deadline) -> Deadline:
        """The one that ends first."""
        return self if self.at <= other.at else other


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The two limits of a request: until its first token, and in total."""

    ttft: Deadline
    total: Deadline

    @classmethod
    def start(cls, ttft_ms: float, total_ms: float, clock: Clock = time.monotonic) -> RequestLimits:
        """Limits that begin now with this many milliseconds left each."""
        return cls(Deadline.after_ms(ttft_ms, clock), Deadline.after_ms(total_ms, clock))

    def remaining_ms(self) -> tuple[int, int]:
        """(to first token, total) in whole milliseconds, as the next hop gets them."""
        return self.ttft.remaining_ms(), self.total.remaining_ms()

    def current(self, *, first_token_seen: bool) -> Deadline:
        """The limit that holds now: the earlier of both before the first token, the total after."""
        return self.total if first_token_seen else self.ttft.earlier(self.total)

    def check(self, *, first_token_seen: bool) -> None:
        """Raise DeadlineExceeded when the limit that holds now has run out."""
        self.total.check("total")
        if not first_token_seen:
            self.ttft.check("time to first token")
