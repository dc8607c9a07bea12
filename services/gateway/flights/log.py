"""What a shared generation has put out so far, whole and in memory, and the cursors of those who read it.

The log never waits for anybody. It holds an answer and nothing else, so a request's own limits bound it. A reader that
joins late finds everything since the first token in its first batch; one that stops taking what comes is cut alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.inbox import TOKEN_BYTES, SlowReader


@dataclass(frozen=True, slots=True)
class Opened:
    """What serves the flight, known once a worker has taken it. `seed` is the one that noise comes from."""

    model: str
    revision: str
    fingerprint: str
    seed: int
    prompt_tokens: int
    traceparent: str = field(default="", compare=False)
    """Of the request that leads."""


@dataclass(slots=True)
class _Choice:
    """One choice's output: pieces of text, each with the number of tokens up to its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    chars: int = 0
    finish: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    stop_reason: str = ""


class FlightLog:
    """Append-only output of `choices` choices and, once, its end. All methods are plain calls from the event loop."""

    def __init__(self, choices: int) -> None:
        self._choices = [_Choice() for _ in range(choices)]
        self._readers: set[Reader] = set()
        self._tokens = 0
        self._bytes = 0
        self.opened: Opened | None = None
        self.finished: pb.Finished | None = None
        self.error: KvmeshError | None = None

    @property
    def choices(self) -> int:
        """How many choices there are."""
        return len(self._choices)

    @property
    def tokens(self) -> int:
        """Output tokens of all choices."""
        return self._tokens

    @property
    def ended(self) -> bool:
        """True after `finish` or `fail`."""
        return self.finished is not None or self.error is not None

    @property
    def complete(self) -> bool:
        """True when every choice has its finish reason."""
        return all(choice.finish for choice in self._choices)

    def position(self, choice: int) -> int:
        """Output tokens of a choice."""
        return len(self._choices[choice].token_ids)

    def chars(self, choice: int) -> int:
        """Characters of text of a choice."""
        return self._choices[choice].chars

    def token_ids(self, choice: int) -> list[int]:
        """Output tokens of a choice, as they are now."""
        return list(self._choices[choice].token_ids)

    def finish_of(self, choice: int) -> pb.FinishReason.ValueType:
        """Why a choice ended; unspecified while it goes on."""
        return self._choices[choice].finish

    def stop_reason(self, choice: int) -> str:
        """Which stop string or token ended a choice, if one did."""
        return self._choices[choice].stop_reason

    def finish_reasons(self) -> list[pb.FinishReason.ValueType]:
        """One a choice."""
        return [choice.finish for choice in self._choices]

    # --- writing
    def open(self, opened: Opened) -> None:
        """Tell what serves; the first call counts."""
        if self.opened is None and not self.ended:
            self.opened = opened
            self._tell()

    def append(self, delta: pb.Delta) -> None:
        """Add output of one choice that has not ended."""
        choice = self._choices[delta.choice]
        if self.ended or choice.finish:
            return
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.pieces.append(delta.text)
        choice.ends.append(len(choice.token_ids))
        choice.chars += len(delta.text)
        choice.finish, choice.stop_reason = delta.finish_reason, delta.stop_reason
        self._tokens += len(delta.token_ids)
        self._bytes += delta.ByteSize() if delta.logprobs else TOKEN_BYTES * len(delta.token_ids)
        self._tell()

    def finish(self, finished: pb.Finished) -> None:
        """The end of a whole answer."""
        if not self.ended:
            self.finished = finished
            self._tell()

    def fail(self, error: KvmeshError) -> None:
        """The end without one: readers get the error, and no more text."""
        if not self.ended:
            self.error = error
            self._tell()

    def _tell(self) -> None:
        for reader in list(self._readers):
            reader.told()

    # --- reading
    def reader(
        self,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        on_slow: Callable[[KvmeshError], None] | None = None,
    ) -> Reader:
        """A cursor before the first token. With limits it is cut (`on_slow` is called, once, from within `append`)
        when so much has come since it last took what there was, without what came first, in one go: frames of a long
        answer come together, and nobody can have taken any of them."""
        reader = Reader(self, max_tokens, max_bytes, on_slow)
        self._readers.add(reader)
        return reader


class Reader:
    """A cursor into a log, with one consumer."""

    def __init__(
        self,
        log: FlightLog,
        max_tokens: int | None,
        max_bytes: int | None,
        on_slow: Callable[[KvmeshError], None] | None,
    ) -> None:
        self._log = log
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._on_slow = on_slow
        self._pieces = [0] * log.choices
        self._taken_tokens = log._tokens
        self._taken_bytes = log._bytes
        self._wake = asyncio.Event()
        self._told = self._excused = False
        self.error: KvmeshError | None = None

    def told(self) -> None:
        """From the log: something has come."""
        self._wake.set()
        if self._max_tokens is None and self._max_bytes is None:
            return
        if not self._told:
            self._told = self._excused = True
            asyncio.get_running_loop().call_soon(self._count)
        if self._excused:
            self._taken_tokens, self._taken_bytes = self._log._tokens, self._log._bytes
            return
        tokens, size = self._log._tokens - self._taken_tokens, self._log._bytes - self._taken_bytes
        if (self._max_tokens is not None and tokens > self._max_tokens) or (
            self._max_bytes is not None and size > self._max_bytes
        ):
            self.cut(SlowReader("the client reads too slowly: its buffer is full", retry_after=1.0))

    def _count(self) -> None:
        """From the next turn of the loop on: what comes now counts."""
        self._excused = False

    def cut(self, error: KvmeshError) -> None:
        """End this reader alone; the first error counts."""
        if self.error is not None:
            return
        self.error = error
        self.close()
        self._wake.set()
        if self._on_slow is not None and isinstance(error, SlowReader):
            self._on_slow(error)

    def close(self) -> None:
        """Leave the log: nothing wakes this reader any more. Idempotent."""
        self._log._readers.discard(self)

    def attach(self) -> None:
        """Come back to the log after `close`. Idempotent."""
        self._log._readers.add(self)

    def wakes(self, event: asyncio.Event) -> None:
        """Set `event`, which is somebody else's to clear, when something has come. Only for readers that use `take`."""
        self._wake = event

    async def opened(self) -> Opened:
        """What serves, once that is known; raises what ended the flight or this reader before."""
        while self._log.opened is None:
            self._raise()
            await self._next()
        return self._log.opened

    async def get(self) -> list[pb.Delta]:
        """What has come since the last call, a delta a choice, at least one; [] at the end of a whole answer.

        Raises what ended the flight or this reader, at once: text before an error is no answer.
        """
        while True:
            self._raise()
            deltas = self.take()
            if deltas or self._log.finished is not None:
                return deltas
            await self._next()

    def take(self, limit: int | None = None) -> list[pb.Delta]:
        """What has come, without waiting; about `limit` tokens a choice at most."""
        self._told = False
        self._taken_tokens, self._taken_bytes = self._log._tokens, self._log._bytes
        deltas = []
        for index, choice in enumerate(self._log._choices):
            first, last = self._pieces[index], len(choice.pieces)
            start = choice.ends[first - 1] if first else 0
            while limit is not None and last - first > 1 and choice.ends[last - 1] - start > limit:
                last = first + max(1, (last - first) // 2)
            if last == first:
                continue
            end = choice.ends[last - 1]
            self._pieces[index] = last
            delta = pb.Delta(
                choice=index,
                text="".join(choice.pieces[first:last]),
                token_ids=choice.token_ids[start:end],
                logprobs=choice.logprobs[start:end],
            )
            if last == len(choice.pieces):
                delta.finish_reason, delta.stop_reason = choice.finish, choice.stop_reason
            deltas.append(delta)
        return deltas

    def position(self, choice: int) -> int:
        """Output tokens of a choice that were taken."""
        pieces = self._pieces[choice]
        return self._log._choices[choice].ends[pieces - 1] if pieces else 0

    @property
    def behind(self) -> bool:
        """True when there is something to take."""
        return any(taken < len(choice.pieces) for taken, choice in zip(self._pieces, self._log._choices, strict=True))

    def rewind(self) -> None:
        """Go back before the first token."""
        self._pieces = [0] * self._log.choices

    def _raise(self) -> None:
        error = self.error or self._log.error
        if error is not None:
            raise error

    async def _next(self) -> None:
        self._wake.clear()
        await self._wake.wait()
