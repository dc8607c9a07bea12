"""What whoever runs a generation agrees on with it: where its events go, how it ends, and within which limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.errors import DeadlineExceeded, KvmeshError, Overloaded
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.limits import RequestLimits


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Sizes and times of every request."""

    first_metadata_s: float = 10.0
    buffer_tokens: int = 8192
    buffer_bytes: int = 4 << 20
    max_attempts: int = 3


class Sink(Protocol):
    """Where a generation's events go, in their order. An awaited write is back pressure; what it raises ends it all."""

    async def waiting(self) -> None:
        """No worker has taken the request for a while."""

    async def accepted(self, event: pb.Accepted) -> None:
        """A worker took it; once, before all else."""

    async def prompt(self, event: pb.PromptScored) -> None:
        """Scores of the prompt; at most once."""

    async def delta(self, event: pb.Delta) -> None:
        """New output of one choice."""


class SinkClosed(Exception):
    """A write failed: there is nobody left to tell anything."""


@dataclass(slots=True)
class End:
    """How a generation ended that went well. `answer`: what to remember, if it may be. One finish reason a choice.

    `generated`: output tokens of all choices, also of those that best_of left out; 0 = as `usage` has it."""

    usage: pb.Usage
    served: pb.Served
    finish_reasons: list[str] = field(default_factory=list)
    answer: router_pb2.CachedAnswer | None = None
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """Of a generation that is taken over: a choice that had ended, and why."""

    finish: pb.FinishReason.ValueType
    stop_reason: str = ""


class Timers:
    """Calls `expire` with a limit's name when it runs out."""

    def __init__(self, limits: RequestLimits, expire: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        ttft, total = limits.ttft.remaining(), limits.total.remaining()
        self._timers = [loop.call_later(total, expire, "total")]
        if ttft < total:
            self._timers.append(loop.call_later(ttft, expire, "time to first token"))

    def cancel(self) -> None:
        """Let none of them fire. Idempotent."""
        for timer in self._timers:
            timer.cancel()


def out_of_time(limit: str, retry_after: float | None) -> KvmeshError:
    """The error of a limit that ran out. `retry_after`: in seconds, of a request that found no room."""
    if retry_after is not None:
        return Overloaded(f"no worker had room within the limit ({limit})", retry_after=retry_after)
    return DeadlineExceeded(f"the limit ({limit}) ran out", details={"limit": limit})
