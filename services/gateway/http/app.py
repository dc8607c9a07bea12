"""Routes of the HTTP face: which call a path is, and what every call ends with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry.trace import SpanKind
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rpc.status import public_error
from kvmesh.telemetry import metrics, names, tracing
from services.gateway.http import openapi
from services.gateway.http.answers import dumps
from services.gateway.http.body import Gone, header
from services.gateway.http.errors import HttpError, error_body, error_headers, http_status
from services.gateway.http.escape import text_bytes
from services.gateway.http.exchange import CLIENT_GONE, Exchange
from services.gateway.http.face import Face
from services.gateway.http.protocol import Connection

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
_TRACE = (b"traceparent", b"tracestate")
# What a body of which nothing was read may weigh for its connection to go on.
UNREAD_BYTES = 64 * 1024
EXPOSED = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-kvmesh-cache",
    "x-kvmesh-cache-age",
    "x-kvmesh-cache-similarity",
    "x-kvmesh-cache-purge-id",
)


class Call:
    """One route's ASGI application."""

    def __init__(self, face: Face, handler: Handler, name: str = "HTTP") -> None:
        self._face = face
        self._handler = handler
        self._name = name
        self._in_flight = metrics.gauge(names.RPC_IN_FLIGHT).labels(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it: every end is told, and nothing of the inside is."""
        exchange = Exchange(scope, receive, send, self._face.live)
        started = time.perf_counter()
        self._in_flight.inc()
        try:
            with self._span(scope):
                await self._serve(exchange)
        except asyncio.CancelledError:
            # Cut off in the middle of a write that its client does not read: to wait longer would be for nothing.
            exchange.status = CLIENT_GONE
            connection_of(scope).abort()
        finally:
            exchange.close()
            self._in_flight.dec()
            status = str(exchange.status or CLIENT_GONE)
            metrics.counter(names.RPC_HANDLED).labels(self._name, status).inc()
            metrics.histogram(names.RPC_DURATION).labels(self._name, status).observe(time.perf_counter() - started)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            if self._face.draining:
                raise Unavailable("this gateway is shutting down", retry_after=1.0)
            await self._handler(exchange)
        except Gone:
            pass
        except KvmeshError as error:
            await _tell(exchange, error)
        except Exception as exc:
            log.exception("%s failed", self._name)
            await _tell(exchange, public_error(exc))

    def _span(self, scope: Scope) -> AbstractContextManager[Any]:
        given = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"] if key in _TRACE]
        return tracing.span(self._name, parent=tracing.extract(given), kind=SpanKind.SERVER)


async def _tell(exchange: Exchange, error: KvmeshError) -> None:
    connection = connection_of(exchange.scope)
    if not exchange.started and _unread(exchange):
        ident = [(b"x-request-id", exchange.request_id.encode("latin-1"))] if exchange.request_id else []
        exchange.started = exchange.ended = True
        exchange.status = http_status(error)
        connection.refuse(exchange.status, error_body(error), ident + error_headers(error))
        return
    await exchange.fail(error)


def _unread(exchange: Exchange) -> bool:
    """Whether more of the body is to come than is worth waiting for."""
    if exchange.body_read:
        return False
    if header(exchange.scope, b"expect") is not None:
        # It may never come, and what is sent instead would be taken for it.
        return True
    length = header(exchange.scope, b"content-length")
    if length is not None:
        return not length.isdigit() or len(length) > 18 or int(length) > UNREAD_BYTES
    return header(exchange.scope, b"transfer-encoding") is not None


def connection_of(scope: Scope) -> Connection:
    connection: Connection = scope["state"]["connection"]
    return connection


class App:
    """The whole application. `ready`: whether requests can be served now."""

    def __init__(
        self,
        face: Face,
        ready: Callable[[], bool],
        *,
        cors_origins: Sequence[str] = (),
        extra_routes: Sequence[BaseRoute] = (),
    ) -> None:
        self._ready = ready
        self._document = b""

        def route(path: str, method: str, handler: Handler) -> Route:
            return Route(path, Call(face, handler, f"{method} {path}"), methods=[method])

        routes: list[BaseRoute] = [
            route("/v1/chat/completions", "POST", face.chat),
            route("/v1/completions", "POST", face.complete),
            route("/v1/embeddings", "POST", face.embed),
            route("/v1/models", "GET", face.models),
            route("/v1/models/{model:path}", "GET", face.model),
            route("/v1/abort", "POST", face.abort),
            route("/tokenize", "POST", face.tokenize),
            Route("/health", self._readyz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/livez", self._livez, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            *extra_routes,
        ]
        self._router = Router(routes, redirect_slashes=False)
        self._app: ASGIApp = self._routed
        if cors_origins:
            self._app = CORSMiddleware(
                self._routed,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
                max_age=600,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Only HTTP comes: the server speaks nothing else."""
        await self._app(scope, receive, send)

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await self._router(scope, receive, send)
        except HTTPException as exc:
            await _tell(Exchange(scope, receive, send), _http_error(exc, scope))

    async def _livez(self, request: Any) -> ASGIApp:
        return _Plain(200, {"status": "ok"})

    async def _readyz(self, request: Any) -> ASGIApp:
        ready = self._ready()
        return _Plain(200 if ready else 503, {"status": "ok" if ready else "not ready"})

    async def _openapi(self, request: Any) -> ASGIApp:
        if not self._document:
            self._document = text_bytes(openapi.text())
        return _Plain(200, self._document)


def _http_error(exc: HTTPException, scope: Scope) -> HttpError:
    method, path = scope["method"], scope["path"][:128]
    if exc.status_code == 404:
        return HttpError(404, f"Invalid URL ({method} {path})", code="unknown_url")
    if exc.status_code == 405:
        headers = {"allow": (exc.headers or {}).get("Allow", "")}
        return HttpError(405, f"Not allowed to {method} on {path}", code="method_not_supported", headers=headers)
    return HttpError(exc.status_code, exc.detail)


class _Plain:
    """A small answer of JSON."""

    def __init__(self, status: int, value: Any) -> None:
        self._status = status
        self._body = value if isinstance(value, bytes) else text_bytes(dumps(value))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await Exchange(scope, receive, send).answer(self._body, self._status)
