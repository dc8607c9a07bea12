"""What a worker sends for one attempt of one request, between the demultiplexer (which never waits) and the client.

The buffer is bounded: a client that reads too slowly costs its own request and nobody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from kvmesh.errors import Internal, KvmeshError, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2
from kvmesh.rpc.status import from_frame, is_retryable

Item = engine_pb2.SequenceDelta | engine_pb2.PromptLogprobs | engine_pb2.WorkerFinished

TOKEN_BYTES = 4


class SlowReader(Overloaded):
    """The client did not take its tokens in time."""

    reason = "SLOW_READER"


class TokensMissing(Unavailable):
    """A worker left out tokens. What came before them is right, and another worker can go on from there."""


class Inbox:
    """Bounded queue with one consumer. All methods are plain calls from the event loop; none waits.

    The first failure wins. What was buffered before one that another worker can make good is right, and stays.
    `on_failure` is called once, at once, from within the failing call, so that a consumer stuck in a write to its
    client does not keep a worker busy. `max_tokens` and `max_bytes` bound what is buffered and not yet taken.

    `positions`: choice -> output index of the first token that is to come. `wake` is set whenever `take` has something
    to say; several inboxes of one consumer share it.
    """

    def __init__(
        self,
        *,
        positions: Mapping[int, int],
        max_tokens: int,
        max_bytes: int,
        on_failure: Callable[[KvmeshError], None],
        wake: asyncio.Event,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._on_failure = on_failure
        self._positions = dict(positions)
        self._items: deque[Item] = deque()
        self._tokens = 0
        self._bytes = 0
        self._wake = wake
        self.error: KvmeshError | None = None
        self.ended = False

    # --- producer
    def delta(self, delta: engine_pb2.SequenceDelta) -> None:
        """New tokens of a choice. Positions must follow on each other: a gap would be wrong text, unseen.

        Tokens that came before are left out.
        """
        if self.error is not None or self.ended:
            return
        expected = self._positions.get(delta.choice)
        if expected is None:
            self.fail(Internal(f"the worker sent choice {delta.choice}, which was not asked of it"))
            return
        if delta.first_position > expected:
            missing = f"tokens of choice {delta.choice} start at {delta.first_position}, not at {expected}"
            self.fail(TokensMissing(missing))
            return
        if delta.first_position < expected:
            known = expected - delta.first_position
            del delta.token_ids[:known]
            del delta.logprobs[:known]
            delta.first_position = expected
            if not delta.token_ids and not delta.finish_reason:
                return
        count = len(delta.token_ids)
        self._positions[delta.choice] = expected + count
        self._tokens += count
        self._bytes += delta.ByteSize() if delta.logprobs else TOKEN_BYTES * count
        self._put(delta)

    def prompt(self, scored: engine_pb2.PromptLogprobs) -> None:
        """Scores of the prompt's tokens."""
        if self.error is None and not self.ended:
            self._bytes += scored.ByteSize()
            self._put(scored)

    def end(self, end: engine_pb2.RequestEnd) -> None:
        """The worker's terminal: nothing follows."""
        if self.error is not None or self.ended:
            return
        if end.WhichOneof("end") == "finished":
            self.ended = True
            self._put(end.finished)
        else:
            error = end.error
            self.fail(from_frame(error.code, error.reason, error.message, error.retryable))

    def fail(self, error: KvmeshError) -> None:
        """End the attempt with an error; later calls change nothing."""
        if self.error is not None:
            return
        self.error = error
        if isinstance(error, Overloaded) or not is_retryable(error):
            self._items.clear()
            self._tokens = self._bytes = 0
        self._wake.set()
        self._on_failure(error)

    def _put(self, item: Item) -> None:
        # One item alone is no backlog, however large: the scores of a long prompt come in one piece.
        backlog = bool(self._items)
        self._items.append(item)
        self._wake.set()
        if not backlog:
            return
        if self._tokens > self._max_tokens or self._bytes > self._max_bytes:
            self.fail(SlowReader("the client reads too slowly: its buffer is full", retry_after=1.0))

    # --- consumer
    def take(self) -> list[Item]:
        """Everything that has come since the last call, maybe nothing. With `error` set, nothing follows."""
        items = list(self._items)
        self._items.clear()
        self._tokens = self._bytes = 0
        return items
