"""One answer on its way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from opentelemetry.trace import SpanKind

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.channel import cancelling
from kvmesh.rpc.status import from_frame, from_rpc_error
from kvmesh.telemetry import names, tracing


class Stream:
    """Async iterator of `GenerateEvent`, from `accepted` to the terminal `finished` or `error`.

    A request that the gateway refuses raises a KvmeshError; one that fails later ends with the event `error`, and
    `raise_for_error` or `result` raises it. Leaving the loop early and then closing (`aclose`, or `async with`)
    cancels the request on the mesh.
    """

    def __init__(self, start: Callable[[], Any], *, operation: str, model: str) -> None:
        self._start = start
        self._operation = operation
        self._model = model
        self._events: AsyncIterator[pb.GenerateEvent] | None = None
        self._texts: dict[int, list[str]] = {}
        self._begun: float | None = None
        self.accepted: pb.Accepted | None = None
        self.finished: pb.Finished | None = None
        self.error: pb.StreamError | None = None
        self.ttft_s: float | None = None
        """Seconds from the call to the first delta with a token, as this client saw it."""

    # --- what came so far
    @property
    def text(self) -> str:
        """Text of choice 0 so far. Not an answer unless `finished` is set."""
        return self.text_of(0)

    def text_of(self, choice: int) -> str:
        """Text of a choice so far."""
        return "".join(self._texts.get(choice, ()))

    def raise_for_error(self) -> None:
        """Raise the KvmeshError of a failed stream; Unavailable when it ended without a terminal event."""
        if self.error is not None:
            raise from_frame(self.error.code, self.error.reason, self.error.message, self.error.retryable)
        if self.finished is None:
            raise Unavailable("the stream ended without a terminal event")

    async def result(self) -> str:
        """Read to the end and return the text of choice 0; raises the error of a failed request."""
        async for _ in self:
            pass
        self.raise_for_error()
        return self.text

    # --- iteration
    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> pb.GenerateEvent:
        if self._events is None:
            self._events = self._read()
        return await anext(self._events)

    async def aclose(self) -> None:
        """End the request if it still runs. Idempotent."""
        closing: Any = self._events
        if closing is not None:
            await closing.aclose()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _read(self) -> AsyncIterator[pb.GenerateEvent]:
        self._begun = time.monotonic()
        span = tracing.start_span(
            names.SPAN_CLIENT_REQUEST,
            kind=SpanKind.CLIENT,
            attributes={
                names.GEN_AI_OPERATION_NAME: self._operation,
                names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
                names.GEN_AI_REQUEST_MODEL: self._model,
            },
        )
        try:
            with tracing.use_span(span):
                call = self._start()
            with cancelling(call):
                async for response in call:
                    self._note(response.event)
                    yield response.event
        except grpc.aio.AioRpcError as exc:
            error: KvmeshError = from_rpc_error(exc)
            tracing.mark_failed(span, error.reason)
            raise error from exc
        finally:
            if self.error is not None:
                tracing.mark_failed(span, self.error.reason)
            span.end()

    def _note(self, event: pb.GenerateEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "delta":
            if event.delta.text:
                self._texts.setdefault(event.delta.choice, []).append(event.delta.text)
            if self.ttft_s is None and event.delta.token_ids and self._begun is not None:
                self.ttft_s = time.monotonic() - self._begun
        elif kind == "accepted":
            self.accepted = event.accepted
        elif kind == "finished":
            self.finished = event.finished
        elif kind == "error":
            self.error = event.error
