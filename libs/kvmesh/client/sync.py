"""The client for programs without an event loop: the asyncio one on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kvmesh.client.answer import Answer
from kvmesh.client.client import Client
from kvmesh.client.requests import Message
from kvmesh.client.stream import Stream
from kvmesh.errors import Cancelled
from kvmesh.proto.v1 import inference_pb2 as pb

T = TypeVar("T")
STOP_TIMEOUT_S = 5.0


class SyncStream:
    """Iterator of `GenerateEvent`; the properties are those of `Stream`. `close` ends a request early.

    An exception in the waiting thread, such as KeyboardInterrupt, ends the request too.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], stream: Stream) -> None:
        self._run = run
        self.stream = stream

    @property
    def text(self) -> str:
        """Text of choice 0 so far."""
        return self.stream.text

    @property
    def reasoning(self) -> str:
        """Reasoning of choice 0 so far."""
        return self.stream.reasoning

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Tool calls of choice 0 so far."""
        return self.stream.tool_calls

    @property
    def finish_reason(self) -> str:
        """How choice 0 ended, "" before."""
        return self.stream.finish_reason

    @property
    def choices(self) -> list[Answer]:
        """What came so far, by choice."""
        return self.stream.choices

    @property
    def accepted(self) -> pb.Accepted | None:
        """The first event, once it has come."""
        return self.stream.accepted

    @property
    def request_id(self) -> str:
        """Id of the request, "" before it was accepted."""
        return self.stream.request_id

    @property
    def finished(self) -> pb.Finished | None:
        """The terminal of an answer that ended well."""
        return self.stream.finished

    @property
    def error(self) -> pb.StreamError | None:
        """The terminal of one that failed."""
        return self.stream.error

    @property
    def usage(self) -> pb.Usage | None:
        """Tokens used, once there is a terminal event."""
        return self.stream.usage

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return self.stream.ttft_s

    def message(self) -> pb.ChatMessage:
        """Choice 0 as the assistant's message."""
        return self.stream.message()

    def raise_for_error(self) -> None:
        """See `Stream.raise_for_error`."""
        self.stream.raise_for_error()

    def result(self) -> str:
        """Read to the end and return the text; raises the error of a failed request."""
        text: str = self._run(self.stream.result())
        return text

    def json(self) -> Any:
        """See `Stream.json`."""
        return self._run(self.stream.json())

    def texts(self) -> Iterator[str]:
        """The pieces of text of choice 0, as they come; raises the error of a failed request at its end."""
        for event in self:
            if event.HasField("delta") and event.delta.choice == 0 and event.delta.text:
                yield event.delta.text
        self.raise_for_error()

    def __iter__(self) -> Iterator[pb.GenerateEvent]:
        return self

    def __next__(self) -> pb.GenerateEvent:
        try:
            event: pb.GenerateEvent = self._run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        return event

    def close(self) -> None:
        """End the request if it still runs. Where another thread is reading, that one gets Cancelled."""
        self._run(self.stream.aclose())

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SyncClient:
    """`Client` with blocking methods; arguments are the same. Usable from several threads at once.

    It ends by `close`, by `with`, or with the program. After that its calls raise Cancelled.
    """

    def __init__(self, address: str | Sequence[str], **options: Any) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="kvmesh-client", daemon=True)
        thread.start()
        clients: list[Client] = []
        # Also at the end of a program that never closes: gRPC must not be used while the interpreter goes.
        self._end = weakref.finalize(self, _end, loop, thread, clients)
        self._loop = loop
        try:
            self._client: Client = self._run(_make(address, options))
        except BaseException:
            self._end()
            raise
        clients.append(self._client)

    def __repr__(self) -> str:
        return f"Sync{self._client!r}"

    def _run(self, coro: Coroutine[Any, Any, T]) -> T:
        try:
            if not self._end.alive:
                raise RuntimeError
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
        except RuntimeError:
            coro.close()
            raise Cancelled("the client is closed") from None
        try:
            if not self._end.alive:
                # Another thread closes meanwhile: what comes after its last look at the tasks would never run.
                future.cancel()
            return future.result()
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            raise Cancelled("the client was closed") from None
        except BaseException:
            # KeyboardInterrupt: the work must not go on unseen. It has no effect on what has ended by itself.
            future.cancel()
            raise

    def chat(self, messages: Iterable[Message], **options: Any) -> SyncStream:
        """See `Client.chat`."""
        return SyncStream(self._run, self._client.chat(messages, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> SyncStream:
        """See `Client.generate`."""
        return SyncStream(self._run, self._client.generate(prompt, **options))

    def embed(self, texts: str | Sequence[str], **options: Any) -> list[list[float]]:
        """See `Client.embed`."""
        return self._run(self._client.embed(texts, **options))

    def tokenize(self, prompt: str | Iterable[Message], **options: Any) -> pb.TokenizeResponse:
        """See `Client.tokenize`."""
        return self._run(self._client.tokenize(prompt, **options))

    def abort(self, request_id: str) -> bool:
        """See `Client.abort`."""
        return self._run(self._client.abort(request_id))

    def models(self) -> list[pb.Model]:
        """See `Client.models`."""
        return self._run(self._client.models())

    def model(self, name: str) -> pb.Model:
        """See `Client.model`."""
        return self._run(self._client.model(name))

    def wait_ready(self, timeout_s: float) -> None:
        """See `Client.wait_ready`."""
        self._run(self._client.wait_ready(timeout_s))

    def close(self) -> None:
        """Close the connection and end the thread; calls of other threads raise Cancelled. Idempotent."""
        self._end()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _make(address: str | Sequence[str], options: dict[str, Any]) -> Client:
    """grpc.aio binds a channel to the loop that is running when it is made."""
    return Client(address, **options)


async def _finish(clients: list[Client]) -> None:
    for client in clients:
        await client.close()
    # Whoever waits in another thread is told.
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=STOP_TIMEOUT_S / 2) if others else None
    await asyncio.get_running_loop().shutdown_asyncgens()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, clients: list[Client]) -> None:
    if threading.current_thread() is thread:
        # The last reference went in a callback of its own loop, which cannot wait for itself.
        loop.stop()
        return
    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(_finish(clients), loop).result(STOP_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(STOP_TIMEOUT_S)
    if not thread.is_alive():
        loop.close()
