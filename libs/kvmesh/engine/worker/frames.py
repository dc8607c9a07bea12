"""Frames: the one stream from this worker to each gateway process, and what merges while a write is outstanding.

The step loop never awaits a write. Whatever happens for a gateway goes into its ONE pending frame; the stream's own
coroutine takes that frame whole and writes it. A slow reader therefore costs one frame in flight (grpc.aio's `write`
returns when HTTP/2 flow control has taken the message) plus a pending one bounded by its own sequences, and after
`write_timeout_s` its sequences are aborted. There is no resume.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvmesh.errors import Cancelled, FailedPrecondition, KvmeshError, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2 as pb

MAX_GATEWAYS = 1024
# A delta grows by merging up to this size; what comes then starts another one, so that a frame can be cut between them.
MAX_DELTA_BYTES = 64 * 1024
_OVERHEAD = 16

Write = Callable[[pb.FramesResponse], Awaitable[None]]


class PendingFrame:
    """What happened for one gateway since the last frame that was taken."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], tuple[pb.SequenceDelta, int]] = {}
        self._empty()

    def _empty(self) -> None:
        self._prompts: list[pb.PromptLogprobs] = []
        self._deltas: list[pb.SequenceDelta] = []
        self._ends: list[pb.RequestEnd] = []
        self._open.clear()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._deltas or self._ends or self._prompts)

    @property
    def nbytes(self) -> int:
        """Upper bound of the frame's serialized size."""
        return self._bytes

    def add_tokens(self, delta: pb.SequenceDelta) -> None:
        """Append to what is pending for the same (request, attempt, choice), or start a new delta."""
        size = delta.ByteSize() + _OVERHEAD
        self._bytes += size
        key = (delta.request_id, delta.attempt, delta.choice)
        last = self._open.get(key)
        if last is not None:
            merged, merged_size = last
            contiguous = merged.first_position + len(merged.token_ids) == delta.first_position
            same_kind = bool(merged.logprobs) == bool(delta.logprobs) or not (merged.token_ids and delta.token_ids)
            if contiguous and same_kind and merged_size + size <= MAX_DELTA_BYTES:
                # Repeated fields are concatenated by MergeFrom; scalars of the newer delta win where set.
                first = merged.first_position
                merged.MergeFrom(delta)
                merged.first_position = first
                self._open[key] = (merged, merged_size + size)
                return
        self._deltas.append(delta)
        self._open[key] = (delta, size)

    def add_prompt(self, prompt: pb.PromptLogprobs) -> None:
        """Prompt log-probabilities, once a request, before its first token."""
        self._bytes += prompt.ByteSize() + _OVERHEAD
        self._prompts.append(prompt)

    def add_end(self, end: pb.RequestEnd) -> None:
        """The terminal of a request."""
        self._bytes += end.ByteSize() + _OVERHEAD
        self._ends.append(end)

    def take(self, max_bytes: int) -> pb.FramesResponse:
        """The next frame, at most about `max_bytes` long; what does not fit stays, in order.

        A request's end leaves only when all its tokens have left.
        """
        if self._bytes <= max_bytes:
            frame = pb.FramesResponse(prompts=self._prompts, deltas=self._deltas, ends=self._ends)
            self._empty()
            return frame
        frame = pb.FramesResponse()
        room = max_bytes
        prompts, deltas, ends = self._prompts, self._deltas, self._ends
        self._empty()
        held: set[tuple[str, int]] = set()
        for prompt in prompts:
            size = prompt.ByteSize() + _OVERHEAD
            if size <= room or not frame.prompts:
                frame.prompts.append(prompt)
                room -= size
            else:
                self.add_prompt(prompt)
                held.add((prompt.request_id, prompt.attempt))
        for delta in deltas:
            size = delta.ByteSize() + _OVERHEAD
            fits = size <= room or not (frame.deltas or frame.prompts)
            if fits and (delta.request_id, delta.attempt) not in held:
                frame.deltas.append(delta)
                room -= size
            else:
                self.add_tokens(delta)
                held.add((delta.request_id, delta.attempt))
        for end in ends:
            size = end.ByteSize() + _OVERHEAD
            if size <= room and (end.request_id, end.attempt) not in held:
                frame.ends.append(end)
                room -= size
            else:
                self.add_end(end)
        return frame


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Timing and size of the streams. Seconds and bytes."""

    heartbeat_s: float = 1.0
    write_timeout_s: float = 5.0
    max_frame_bytes: int = 4 << 20


class GatewayStream:
    """One open Frames stream. `run` is its writer; everything else only fills the pending frame."""

    def __init__(
        self, gateway_id: str, *, incarnation: int, limits: FrameLimits, load: Callable[[], pb.WorkerLoad]
    ) -> None:
        self.gateway_id = gateway_id
        self.pending = PendingFrame()
        self.sequence = 0
        self.closed = False
        self._incarnation = incarnation
        self._limits = limits
        self._load = load
        self._wake = asyncio.Event()
        self._error: KvmeshError | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, delta: pb.SequenceDelta) -> None:
        """Tokens for the next frame; dropped once the stream is closed."""
        if not self.closed:
            self.pending.add_tokens(delta)
            self._wake.set()

    def prompt(self, prompt: pb.PromptLogprobs) -> None:
        """Prompt log-probabilities for the next frame."""
        if not self.closed:
            self.pending.add_prompt(prompt)
            self._wake.set()

    def end(self, end: pb.RequestEnd) -> None:
        """A terminal for the next frame."""
        if not self.closed:
            self.pending.add_end(end)
            self._wake.set()

    def close(self, error: KvmeshError | None = None) -> None:
        """Take nothing more; `run` writes what is pending (only without an error) and ends, raising `error`."""
        self.closed = True
        self._wake.set()
        if error is not None and self._error is None:
            self._error = error
            if not self._gone.done():
                self._gone.set_result(None)

    async def run(self, write: Write) -> None:
        """Write frames until closed: one whenever something is pending, else a heartbeat.

        Returns when closed without an error. Raises the error it was closed with, or Unavailable where a write stayed
        outstanding for `write_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        next_beat = loop.time()
        while not (self.closed and not self.pending):
            if self._error is not None:
                raise self._error
            if not self.pending and not self.closed:
                try:
                    async with asyncio.timeout_at(next_beat):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                if self.closed:
                    continue
                if not self.pending and loop.time() < next_beat:
                    continue
            self._wake.clear()
            frame = self.pending.take(self._limits.max_frame_bytes)
            self.sequence += 1
            frame.sequence = self.sequence
            frame.incarnation = self._incarnation
            frame.load.CopyFrom(self._load())
            await self._write(write, frame)
            next_beat = loop.time() + self._limits.heartbeat_s
        if self._error is not None:
            raise self._error

    async def _write(self, write: Write, frame: pb.FramesResponse) -> None:
        """One write under the timeout; closing with an error cuts it short: a stalled reader holds nobody up."""
        writing = asyncio.ensure_future(write(frame))
        try:
            await asyncio.wait(
                {writing, self._gone}, timeout=self._limits.write_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if writing.done():
                writing.result()
            elif self._error is not None:
                raise self._error
            else:
                raise Unavailable(
                    f"a frame stayed unread for {self._limits.write_timeout_s:g} s",
                    details={"gateway_id": self.gateway_id},
                )
        finally:
            if not writing.done():
                writing.cancel()
                await asyncio.wait({writing}, timeout=1.0)


class FramesHub:
    """All open Frames streams of this worker, by gateway id."""

    def __init__(
        self,
        *,
        incarnation: int,
        limits: FrameLimits,
        load: Callable[[], pb.WorkerLoad],
        on_end: Callable[[GatewayStream, KvmeshError], None],
    ) -> None:
        """`on_end(stream, why)` is called once for each stream that ended; the owner aborts its sequences."""
        self._incarnation = incarnation
        self._limits = limits
        self._load = load
        self._on_end = on_end
        self._streams: dict[str, GatewayStream] = {}
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._running = 0

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, gateway_id: str) -> GatewayStream:
        """The open stream of a gateway. Raises FailedPrecondition when there is none."""
        stream = self._streams.get(gateway_id)
        if stream is None or stream.closed:
            raise FailedPrecondition(
                "this gateway has no open Frames stream on this worker", details={"field": "gateway_id"}
            )
        return stream

    def streams(self) -> list[GatewayStream]:
        """The open streams."""
        return list(self._streams.values())

    async def serve(self, gateway_id: str, write: Write) -> None:
        """The life of one Frames call: opens (ending an older one of the same id), writes, and reports its end."""
        if self._closing:
            raise Unavailable("the worker is stopping")
        old = self._streams.pop(gateway_id, None)
        if old is None and len(self._streams) >= MAX_GATEWAYS:
            raise Overloaded(f"this worker already serves {MAX_GATEWAYS} gateways")
        if old is not None:
            why = Cancelled("a newer Frames stream of the same gateway_id was opened")
            old.close(why)
            self._on_end(old, why)
        stream = GatewayStream(gateway_id, incarnation=self._incarnation, limits=self._limits, load=self._load)
        self._streams[gateway_id] = stream
        self._running += 1
        self._empty.clear()
        reason: KvmeshError = Cancelled("the Frames stream of this gateway ended")
        try:
            await stream.run(write)
        except KvmeshError as error:
            reason = error
            raise
        finally:
            stream.close(reason)
            self._running -= 1
            if self._running == 0:
                self._empty.set()
            if self._streams.get(gateway_id) is stream:
                del self._streams[gateway_id]
                self._on_end(stream, reason)

    async def close(self, timeout_s: float) -> bool:
        """End all streams after what is pending was written; True when all had ended in time."""
        self._closing = True
        for stream in self.streams():
            stream.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            for stream in self.streams():
                stream.close(Unavailable("the worker is stopping"))
            return False
        return True
