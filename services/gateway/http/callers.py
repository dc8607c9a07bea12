"""The HTTP face's ends of the front: one for each run, all of them into one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmesh.errors import KvmeshError, TooLarge
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import from_frame
from services.gateway.http.exchange import Exchange, limit_headers
from services.gateway.limits.contract import LimitState

# Of an answer that is not streamed: text, and what log-probabilities take.
MAX_WHOLE_BYTES = 64 << 20


class Render(Protocol):
    """Makes bytes of events; what collects instead returns none."""

    def accepted(self, event: pb.Accepted) -> None:
        """First of all."""

    def prompt(self, event: pb.PromptScored) -> bytes:
        """Scores of the prompt."""

    def delta(self, delta: pb.Delta) -> bytes:
        """New output."""


class HttpCaller:
    """A run as a `Caller`. `streams`: what is rendered goes out at once."""

    def __init__(self, exchange: Exchange, render: Render, *, streams: bool) -> None:
        self._exchange = exchange
        self._render = render
        self._streams = streams
        self._size = 0
        self.finished: pb.Finished | None = None
        self.error: KvmeshError | None = None
        self.cache: list[tuple[str, str]] = []

    def admitted(self, state: LimitState) -> None:
        """See Caller."""
        if not self._exchange.started:
            # Of several prompts the last one's count.
            self._exchange.headers = limit_headers(state)

    async def waiting(self) -> None:
        """See Caller."""
        if self._streams:
            await self._exchange.sign_of_life()

    async def send(self, event: pb.GenerateEvent) -> None:
        """See Caller."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            if self._streams:
                body = self._render.delta(event.delta)
                if body:
                    await self._exchange.write(body)
            else:
                self._collect(event.delta)
        elif kind == "accepted":
            self._render.accepted(event.accepted)
        elif kind == "prompt":
            self._render.prompt(event.prompt)
        elif kind == "finished":
            self.finished = event.finished
        else:
            failed = event.error
            self.error = from_frame(failed.code, failed.reason, failed.message, failed.retryable)

    def _collect(self, delta: pb.Delta) -> None:
        self._size += len(delta.text) + len(delta.reasoning)
        if delta.logprobs:
            self._size += delta.ByteSize()
        if self._size > MAX_WHOLE_BYTES:
            self.error = TooLarge("the answer is too large to be sent in one piece: ask for a stream")
            raise self.error
        self._render.delta(delta)

    def trailing(self, pairs: Sequence[tuple[str, str]]) -> None:
        """See Caller."""
        self.cache = list(pairs)
