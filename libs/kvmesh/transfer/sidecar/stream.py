"""What both ends of a Peer stream share: an outbox that one task empties, heartbeats, and the lease."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)
Out = TypeVar("Out", pb.PeerRequest, pb.PeerResponse)
In = TypeVar("In", pb.PeerRequest, pb.PeerResponse)

# Messages that wait for a peer which does not read; its lease runs out long before.
MAX_OUTBOX = 1 << 16


GIVEN_UP = frozenset({"cancelled", "prefill was given up", "the request ended while its slot was opened"})
"""What engines say when a request is over before its transfer."""


class LeaseExpired(Unavailable):
    """The peer was silent for a lease."""


class Outbox(Generic[Out]):
    """Messages for a stream, written in order by `run`, with a heartbeat whenever nothing else was to say."""

    def __init__(
        self, write: Callable[[Out], Awaitable[object]], heartbeat: Callable[[int], Out], every_s: float
    ) -> None:
        self._write: Callable[[Out], Awaitable[object]] = write
        self._heartbeat: Callable[[int], Out] = heartbeat
        self._every = every_s
        self._queue: asyncio.Queue[Out | None] = asyncio.Queue(MAX_OUTBOX)

    def put(self, message: Out) -> None:
        """Queue a message; on a stream that nobody reads any more it is dropped with the stream."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            log.error("a peer does not read its messages: dropped")

    def finish(self) -> None:
        """`run` returns once everything before this is written."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        """Write until `finish`, or until the stream fails."""
        numbers = itertools.count(1)
        while True:
            try:
                async with asyncio.timeout(self._every):
                    message = await self._queue.get()
            except TimeoutError:
                message = self._heartbeat(next(numbers))
            if message is None:
                return
            await self._write(message)


async def next_message(stream: AsyncIterator[In], lease_s: float, what: str) -> In | None:
    """The next message, None at the end of the stream. Raises LeaseExpired after a lease of silence."""
    try:
        async with asyncio.timeout(lease_s):
            return await anext(stream)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        metrics.counter(names.HEARTBEATS_MISSED).labels("kvtransfer").inc()
        metrics.counter(names.TRANSFER_LEASES).labels("peer").inc()
        raise LeaseExpired(f"{what} was silent for {lease_s:g} s") from None


async def first_of(*tasks: asyncio.Task[object]) -> None:
    """Wait for the first task to end, cancel the others, wait for them, and raise what the first one raised."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        error = task.exception() if not task.cancelled() else None
        if error is not None:
            raise error


def error_type(reason: str) -> str:
    """`error.type` of a transfer that ended for this reason: nothing failed where nobody wants it any more."""
    return "CANCELLED" if reason in GIVEN_UP else "TransferFailed"


def short(error: BaseException) -> str:
    """An error for a log line or a reason."""
    return error.message if isinstance(error, KvmeshError) else f"{type(error).__name__}: {error}"
