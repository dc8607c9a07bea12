"""One answer on its way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio
from opentelemetry.trace import SpanKind

from kvmesh.client.answer import Answer
from kvmesh.client.retry import Attempts, Retry, was_ours
from kvmesh.errors import Cancelled, KvmeshError, Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.channel import cancelling
from kvmesh.rpc.status import from_frame, from_rpc_error
from kvmesh.telemetry import names, tracing

Start = Callable[[float | None], Any]
"""Begins the call; is given the seconds that are left."""


class Stream:
    """Async iterator of `GenerateEvent`, from `accepted` to the terminal `finished` or `error`.

    A request that the gateway refuses raises a KvmeshError; one that fails later ends with the event `error`, and
    `raise_for_error` or `result` raises it. Leaving the loop early and then closing (`aclose`, or `async with`)
    cancels the request on the mesh.

    What came so far is in `text`, `reasoning`, `tool_calls`, `finish_reason`, `usage` (of choice 0; `choice(i)` has the
    others'), in `accepted` and in `finished` or `error`.

    One task reads; any may close.
    """

    def __init__(
        self,
        start: Start,
        *,
        operation: str,
        model: str,
        retry: Retry,
        timeout_s: float | None,
        restart: bool = False,
    ) -> None:
        self._start = start
        self._operation = operation
        self._model = model
        self._retry = retry
        self._timeout_s = timeout_s
        self._restart = restart
        self._events: AsyncGenerator[pb.GenerateEvent, None] | None = None
        self._call: Any = None
        self._closed = False
        self._begun: float | None = None
        self._forget()
        self.restarts = 0
        """Times that the answer began anew (only where that was asked for)."""
        self.ttft_s: float | None = None
        """Seconds from the call to the first delta with a token, as this client saw it."""

    def _forget(self) -> None:
        self._answers: dict[int, Answer] = {}
        self.accepted: pb.Accepted | None = None
        self.prompt: pb.PromptScored | None = None
        self.finished: pb.Finished | None = None
        self.error: pb.StreamError | None = None

    # --- what came so far
    def choice(self, index: int) -> Answer:
        """What came of a choice so far."""
        return self._answers.setdefault(index, Answer())

    @property
    def choices(self) -> list[Answer]:
        """What came so far, by choice."""
        return [self.choice(index) for index in range(max(self._answers, default=-1) + 1)]

    @property
    def text(self) -> str:
        """Text of choice 0 so far. Not an answer unless `finished` is set."""
        return self.choice(0).text

    def text_of(self, choice: int) -> str:
        """Text of a choice so far."""
        return self.choice(choice).text

    @property
    def reasoning(self) -> str:
        """Reasoning of choice 0 so far, where the model's template marks it."""
        return self.choice(0).reasoning

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Tool calls of choice 0 so far; the arguments of the last one may not be whole before `finished`."""
        return self.choice(0).tool_calls

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls once choice 0 has ended, else ""."""
        return self.choice(0).finish_reason

    @property
    def request_id(self) -> str:
        """Id of the request (for `abort`), "" before it was accepted."""
        return self.accepted.request_id if self.accepted is not None else ""

    @property
    def usage(self) -> pb.Usage | None:
        """Tokens used, once there is a terminal event."""
        end = self.finished or self.error
        return end.usage if end is not None else None

    def message(self) -> pb.ChatMessage:
        """Choice 0 as the assistant's message, to go on with the conversation."""
        return self.choice(0).message()

    def raise_for_error(self) -> None:
        """Raise the KvmeshError of a failed stream; Unavailable when it ended without a terminal event."""
        if self.error is not None:
            raise _of_event(self.error)
        if self.finished is None:
            raise Unavailable("the stream ended without a terminal event")

    async def result(self) -> str:
        """Read to the end and return the text of choice 0; raises the error of a failed request."""
        async for _ in self:
            pass
        self.raise_for_error()
        return self.text

    async def json(self) -> Any:
        """Read to the end and return the value of the JSON text, as after `json_schema`. ValueError where it is none,
        as after an output that was cut off at max_tokens."""
        return json.loads(await self.result())

    # --- iteration
    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> pb.GenerateEvent:
        if self._events is None:
            if self._closed:
                raise StopAsyncIteration
            self._events = self._traced()
        return await anext(self._events)

    async def texts(self) -> AsyncIterator[str]:
        """The pieces of text of choice 0, as they come; raises the error of a failed request at its end."""
        async for event in self:
            if event.HasField("delta") and event.delta.choice == 0 and event.delta.text:
                yield event.delta.text
        self.raise_for_error()

    async def aclose(self) -> None:
        """End the request if it still runs. Idempotent. Where another task is reading, that one gets Cancelled."""
        self._closed = True
        events: Any = self._events
        if events is None:
            return
        if not events.ag_running:
            await events.aclose()
        elif self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _traced(self) -> AsyncGenerator[pb.GenerateEvent, None]:
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

        def start(timeout_s: float | None) -> Any:
            with tracing.use_span(span):
                return self._start(timeout_s)

        try:
            # Closed with this one, and not some time later by the collector of garbage.
            async with aclosing(self._attempts(start)) as events:
                async for event in events:
                    yield event
        except KvmeshError as error:
            tracing.mark_failed(span, error.reason)
            raise
        finally:
            if self.error is not None:
                tracing.mark_failed(span, self.error.reason)
            span.end()

    async def _attempts(self, start: Start) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Events of the first attempt that is accepted; of a further one where a restart is asked for and helps."""
        attempts = Attempts(self._retry, self._timeout_s)
        while True:
            if self._closed:
                raise Cancelled("the stream is closed")
            try:
                # To be begun outside of `with`: a channel that is closed has no call to cancel.
                call = self._call = start(attempts.timeout())
                with cancelling(call):
                    async for response in call:
                        event = response.event
                        if event.HasField("error") and self._restart and event.error.retryable:
                            await attempts.after(_of_event(event.error))
                            break
                        self._note(event)
                        yield event
                    else:
                        return
            except grpc.aio.AioRpcError as exc:
                # What has been shown cannot be taken back, so that only a caller who said so gets it anew.
                if self.accepted is not None and not self._restart:
                    raise from_rpc_error(exc) from exc
                await attempts.again(exc)
            except grpc.aio.UsageError as exc:
                raise Cancelled("the client is closed") from exc
            except asyncio.CancelledError:
                if was_ours(asyncio.current_task()):
                    raise
                raise Cancelled(f"the {'stream' if self._closed else 'client'} was closed") from None
            if self.accepted is not None:
                self.restarts += 1
            self._forget()

    def _note(self, event: pb.GenerateEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "delta":
            self.choice(event.delta.choice).add(event.delta)
            if self.ttft_s is None and event.delta.token_ids and self._begun is not None:
                self.ttft_s = time.monotonic() - self._begun
        elif kind == "accepted":
            self.accepted = event.accepted
        elif kind == "prompt":
            self.prompt = event.prompt
        elif kind == "finished":
            self.finished = event.finished
        elif kind == "error":
            self.error = event.error


def _of_event(error: pb.StreamError) -> KvmeshError:
    return from_frame(error.code, error.reason, error.message, error.retryable)
