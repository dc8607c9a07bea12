"""One HTTP connection: uvicorn's protocol with the bounds it leaves to others.

Head size and count, bytes that belong to nothing, pipelined requests, time to send a head, age of the connection, and
clients that neither read nor leave. What breaks a bound gets its status in OpenAI's form, then the connection ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from services.gateway.http.errors import HttpError, error_body
from services.gateway.http.places import Places
from services.gateway.http_tls import TlsAwareProtocol

MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 128
MAX_URL_BYTES = 8 * 1024
MAX_PIPELINED = 8
HEAD_TIMEOUT_S = 20.0
# Without a byte taken off a full buffer.
STALL_S = 60.0
# After an answer to a body that was not read: what is still dropped before the connection goes.
LINGER_S = 2.0
LINGER_BYTES = 64 << 20
# Connections without a place that are told so; more at a time are cut off.
MAX_TOLD = 64


class Refused(Exception):
    """A bound is broken; from within the parser's callbacks."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.error = HttpError(status, message, code=code)


class _Endless(int):
    """Length of a body that ends with its connection, as uvicorn counts it down."""

    def __isub__(self, other: int) -> _Endless:
        return self

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class Connection(TlsAwareProtocol):
    """See above. `max_age_s`: 0 = as long as the client likes. `max_body_bytes`: buffered before it is read. `leaving`:
    whether each answer is to be the last of its connection. `places`: where it counts."""

    def __init__(
        self,
        *args: Any,
        max_age_s: float = 0.0,
        max_body_bytes: int = 0,
        leaving: Callable[[], bool] = lambda: False,
        places: Places | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._leaving = leaving
        self._places = places
        self._placed = False
        self._max_body_bytes = max_body_bytes
        # A tenth more or less: connections made together do not come back together.
        self._until = self.loop.time() + max_age_s * random.uniform(0.9, 1.1) if max_age_s else 0.0
        self._head_since: float | None = self.loop.time()
        self._begun = False
        self._in_head = False
        self._muted = False
        self._header_count = 0
        self._dropping = False
        self._dropped = 0
        # Bytes since the parser last gave something that is bounded elsewhere.
        self._unclaimed = 0
        self._refused: Refused | None = None
        self._stalled: tuple[float, int] | None = None
        # The request that is being answered; `cycle` is the one that came last.
        self._running: RequestResponseCycle | None = None
        self.app_state = {**self.app_state, "connection": self}

    # --- whether it may come in
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Where there is no place it is told so before it has asked anything."""
        super().connection_made(transport)
        if self._places is None:
            return
        full = self._places.take(self._host)
        self._placed = full is None
        if full is None:
            return
        if len(self.connections) - len(self._places) > MAX_TOLD:
            self.abort()
        elif full == "all":
            error = HttpError(503, "This gateway has no room for another connection.", code="overloaded")
            self.refuse(error.http, error_body(error), [(b"retry-after", b"1")])
        else:
            error = HttpError(429, "Too many connections from this address.", code="too_many_connections")
            self.refuse(error.http, error_body(error), [(b"retry-after", b"1")])

    @property
    def _host(self) -> str | None:
        return self.client[0] if self.client is not None else None

    # --- what comes in
    def data_received(self, data: bytes) -> None:
        """Count, then parse."""
        if self._dropping:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.abort()
            return
        self._unclaimed += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._unclaimed > MAX_HEAD_BYTES and not self._dropping and self.parser is not None:
            self._refuse(Refused(431, "The request's head is too large.", "headers_too_large"))

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _pass_over(self, rest: bytes) -> None:
        """Another protocol was offered, which we decline by going on. The parser takes the head's end for the end of
        the request then: a new one reads the body, told of its length by the head's own lines."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        length = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        if length and not self.cycle.response_complete:
            self.cycle.more_body = True
            self.cycle.message_event.clear()
            lines = b"".join(b"%s: %s\r\n" % pair for pair in length)
            self._muted = True
            try:
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            finally:
                self._muted = False
            if length == [(b"content-length", b"0")]:
                self.on_message_complete()
        if rest:
            self._parse(rest)

    def send_400_response(self, msg: str) -> None:
        """What the parser did not take: its own reason, or ours."""
        self._refuse(self._refused or Refused(400, "The request is not valid HTTP.", "invalid_http"))

    def on_message_begin(self) -> None:
        """A new head."""
        if self._muted:
            return
        super().on_message_begin()
        self._begun = self._in_head = True
        self._header_count = 0
        self._head_since = self.loop.time()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Bounded."""
        if self._muted:
            return
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop(414, "The URL is too long.", "url_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Bounded, those after the body too, which are no headers: nobody on the way has looked at them."""
        if self._muted:
            return
        self._head_bytes += len(name) + len(value)
        self._header_count += 1
        if self._head_bytes > MAX_HEAD_BYTES or self._header_count > MAX_HEADERS:
            self._stop(431, "The request has too many headers.", "headers_too_large")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request begins."""
        if self._muted:
            return
        self._unclaimed = 0
        self._head_since = None
        self._in_head = False
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(429, "Too many requests at once on one connection.", "too_many_pipelined")
        super().on_headers_complete()
        if self.pipeline:
            # Bounded above and by `on_body`. Unread, the end of the connection would not be seen.
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            # It knows no chunks.
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _Endless()
        if self._leaving() or (self._until and self.loop.time() >= self._until):
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """What nobody has read yet is bounded too: a pipelined request waits with its body."""
        self._unclaimed = 0
        super().on_body(body)
        if len(self.cycle.body) > self._max_body_bytes + MAX_HEAD_BYTES:
            self._stop(413, f"The body is larger than {self._max_body_bytes} bytes.", "too_large")

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._muted:
            return
        self._unclaimed = 0
        super().on_message_complete()

    def _stop(self, status: int, message: str, code: str) -> None:
        """Out of the parser: it turns every exception into its own and stops."""
        self._refused = Refused(status, message, code)
        raise self._refused

    def on_response_complete(self) -> None:
        """The next head is waited for; what comes and begins none does not make that longer."""
        if not self._in_head:
            self._head_since, self._begun = self.loop.time(), False
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # --- the end of it
    def last_answer(self) -> None:
        """What is being answered is the last here. Nothing happens where nothing is."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever answers hears of it, also where further requests have come since."""
        if self._placed and self._places is not None:
            self._places.leave(self._host)
            self._placed = False
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self, refused: Refused) -> None:
        running = self._running
        if (
            running is not None
            and not running.response_complete
            and (running.response_started or running is not self.cycle)
        ):
            # Inside another answer, or before it, there is no place for this one.
            self.abort()
            return
        self.refuse(refused.error.http, error_body(refused.error), [])

    def refuse(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer, though the request is not over, and end the connection: what still comes is dropped for a moment,
        since a client that is cut off while it writes would never see the answer."""
        if self._dropping or self.transport.is_closing():
            return
        content = [STATUS_LINE[status]]
        pairs = [*self.server_state.default_headers, (b"content-type", b"application/json"), *headers]
        pairs += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        for name, value in pairs:
            content += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*content, b"\r\n", body]))
        for cycle in (self._running, self.cycle):
            if cycle is not None:
                cycle.response_started = cycle.response_complete = True
                cycle.keep_alive = False
                cycle.message_event.set()
        self.pipeline.clear()
        self._dropping = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """End it at once, whatever is buffered."""
        self._forget()
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for a while. What its client has not read by now is not waited for."""
        if self.transport.get_write_buffer_size():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    # --- looked at once a second
    def look(self, now: float) -> None:
        """End what is over time: heads, ages, clients that do not read."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._stalled = None
        elif self._stalled is None or self._stalled[1] != waiting:
            self._stalled = (now, waiting)
        elif now - self._stalled[0] > STALL_S:
            self.abort()
            return
        if self.idle and self._until and now >= self._until:
            self.transport.close()
        elif self.idle and not self._dropping and self._head_is_late(now):
            if self._begun:
                self._refuse(Refused(408, "The request's head did not arrive in time.", "request_timeout"))
            else:
                self.transport.close()

    def _head_is_late(self, now: float) -> bool:
        limit = HEAD_TIMEOUT_S if self._begun else self.timeout_keep_alive
        return self._head_since is not None and now - self._head_since > limit

    @property
    def idle(self) -> bool:
        """No answer is under way."""
        return (self._running is None or self._running.response_complete) and not self.pipeline

    @property
    def unused(self) -> bool:
        """Idle, and no request has begun to come in."""
        return self.idle and not self._begun and not self.transport.is_closing()
