"""The client for programs without an event loop: the asyncio one on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kvmesh.client.client import Client, Message
from kvmesh.client.stream import Stream
from kvmesh.proto.v1 import inference_pb2 as pb

T = TypeVar("T")
STOP_TIMEOUT_S = 5.0


class SyncStream:
    """Iterator of `GenerateEvent`; the attributes are those of `Stream`. `close` ends a request early."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], stream: Stream) -> None:
        self._run = run
        self.stream = stream

    @property
    def text(self) -> str:
        """Text of choice 0 so far."""
        return self.stream.text

    @property
    def finished(self) -> pb.Finished | None:
        """The terminal of an answer that ended well."""
        return self.stream.finished

    @property
    def error(self) -> pb.StreamError | None:
        """The terminal of one that failed."""
        return self.stream.error

    def result(self) -> str:
        """Read to the end and return the text; raises the error of a failed request."""
        text: str = self._run(self.stream.result())
        return text

    def __iter__(self) -> Iterator[pb.GenerateEvent]:
        return self

    def __next__(self) -> pb.GenerateEvent:
        try:
            event: pb.GenerateEvent = self._run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        return event

    def close(self) -> None:
        """End the request if it still runs."""
        self._run(self.stream.aclose())

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SyncClient:
    """`Client` with blocking methods; arguments are the same. Usable from several threads."""

    def __init__(self, address: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmesh-client", daemon=True)
        self._thread.start()
        self._client: Client = self._run(_make(address, options))

    def _run(self, coro: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result()

    def chat(self, messages: Iterable[Message], **options: Any) -> SyncStream:
        """See `Client.chat`."""
        return SyncStream(self._run, self._client.chat(messages, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> SyncStream:
        """See `Client.generate`."""
        return SyncStream(self._run, self._client.generate(prompt, **options))

    def abort(self, request_id: str) -> bool:
        """See `Client.abort`."""
        return self._run(self._client.abort(request_id))

    def models(self) -> list[pb.Model]:
        """See `Client.models`."""
        return self._run(self._client.models())

    def close(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _make(address: str, options: dict[str, Any]) -> Client:
    """grpc.aio binds a channel to the loop that is running when it is made."""
    return Client(address, **options)
