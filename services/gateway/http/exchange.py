"""One HTTP answer: when its head goes out, what its headers are, and who notices that its client has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.types import Receive, Scope, Send

from kvmesh.errors import KvmeshError
from services.gateway.http.errors import PLAIN, Renamed, error_body, error_headers, http_status
from services.gateway.limits.contract import LimitState, Window

Headers = list[tuple[bytes, bytes]]

_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON: Headers = [(b"content-type", b"application/json")]
CLIENT_GONE = 499
COMMENT = b": waiting\n\n"


class Exchange:
    """A request and its answer. `request_id` is told in every answer. `live`: answers that may want a sign of life."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, live: set[Exchange] | None = None) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._live = live if live is not None else set()
        self.request_id = ""
        self.headers: Headers = []
        self.status = 0
        self.started = False
        self.ended = False
        self.body_read = False
        self._begun = self._idle_since = asyncio.get_running_loop().time()
        # So far; a look that finds no more than the one before has found an idle stream.
        self._writes = 0
        self._seen_writes = 0

    # --- a stream
    async def open(self) -> None:
        """Send the head of a stream, once: from here on its status is 200."""
        if self.started:
            return
        self.started = True
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": self._head(_STREAM)})

    async def write(self, body: bytes) -> None:
        """Send a part of a stream; waits while the client does not read."""
        if not self.started:
            await self.open()
        self._writes += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        """Send the last part of a stream."""
        if not self.started:
            await self.open()
        self.ended = True
        self._live.discard(self)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def streams(self) -> None:
        """It will be a stream: whoever looks after those may open it."""
        self._live.add(self)

    async def look(self, now: float, *, first_s: float, idle_s: float) -> None:
        """A comment where nothing was written for `idle_s`, so that nobody between takes an idle stream for a dead one;
        the head where there is nothing to send for `first_s`. Not while its client does not read."""
        if self.ended or self._stalled:
            return
        if not self.started:
            if now - self._begun >= first_s:
                await self.sign_of_life()
        elif self._writes != self._seen_writes:
            self._seen_writes, self._idle_since = self._writes, now
        elif now - self._idle_since >= idle_s:
            self._idle_since = now
            await self.sign_of_life()

    async def sign_of_life(self) -> None:
        """A comment, which clients pass over. One that does not read needs none: nobody may wait for it."""
        await self.open()
        if not self.ended and not self._stalled:
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    @property
    def _stalled(self) -> bool:
        paused: bool = self.scope["state"]["connection"].flow.write_paused
        return paused

    # --- one body
    async def answer(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        """Send a whole answer of JSON."""
        self.started = self.ended = True
        self.status = status
        head = self._head(_JSON, (headers or []) + [(b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: KvmeshError, renamed: Renamed = PLAIN) -> None:
        """Tell an error: by its status while that is still possible, else as the stream's last event."""
        body = error_body(error, renamed)
        if self.started:
            await self.end(b"data: " + body + b"\n\n")
        else:
            await self.answer(body, http_status(error), error_headers(error))

    def _head(self, first: Headers, last: Headers | None = None) -> Headers:
        ident: Headers = [(b"x-request-id", self.request_id.encode("latin-1"))] if self.request_id else []
        return first + ident + self.headers + (last or [])

    def close(self) -> None:
        """Nothing more is sent."""
        self.ended = True
        self._live.discard(self)

    @contextlib.asynccontextmanager
    async def client_watched(self) -> AsyncIterator[None]:
        """Cancels this task when the client leaves, and swallows that cancellation: there is nobody left to tell."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            # The body has been read: whatever comes now is the end.
            while (await self.receive())["type"] != "http.disconnect":
                pass
            if not self.ended:
                gone = True
                task.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not gone:
                raise
            self.status = CLIENT_GONE
            task.uncancel()
        finally:
            watching.cancel()


def limit_headers(state: LimitState) -> Headers:
    """OpenAI's headers of what is left of a tenant's rates."""
    out: Headers = []
    windows: Sequence[tuple[bytes, Window | None]] = ((b"requests", state.requests), (b"tokens", state.tokens))
    for name, window in windows:
        if window is not None:
            out.append((b"x-ratelimit-limit-" + name, b"%d" % window.limit))
            out.append((b"x-ratelimit-remaining-" + name, b"%d" % max(0, window.remaining)))
            out.append((b"x-ratelimit-reset-" + name, duration(window.reset_s).encode()))
    return out


def duration(seconds: float) -> str:
    """As OpenAI writes it: "350ms", "1.5s", "6m0s"."""
    if not seconds > 0:
        return "0s"
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
