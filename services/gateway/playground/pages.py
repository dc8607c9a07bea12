"""The playground as routes of the HTTP face: the page, its files, and the phases of a request."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Awaitable, Callable
from importlib import resources

import grpc.aio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvmesh.errors import NotFound
from services.gateway.http.app import Call
from services.gateway.http.escape import text_bytes
from services.gateway.http.exchange import Exchange
from services.gateway.http.face import Face
from services.gateway.playground.phases import complete, phases
from services.gateway.playground.spans import TRACE_SPAN, Spans, listen

PAGE = "index.html"
HEADERS = {
    # Nothing from elsewhere, nothing inline, nobody around it: what a model says stays text, whatever it says.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class Playground:
    """`start`, then `close`. `listen_at`: where the mesh's services send their spans, "" = nowhere here."""

    def __init__(self, listen_at: str = "") -> None:
        self.spans = Spans()
        self._listen_at = listen_at
        self._server: grpc.aio.Server | None = None
        self._files = _files()

    async def start(self) -> None:
        """Listen for spans. FailedPrecondition where that address is in use."""
        if self._listen_at:
            self._server, _ = await listen(self.spans, self._listen_at)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop(None)

    def routes(self, face: Face) -> list[BaseRoute]:
        """For the HTTP face's application."""
        routes: list[BaseRoute] = [Route("/", self._file(PAGE), methods=["GET"])]
        routes += [
            Route(f"/playground/{name}", self._file(name), methods=["GET"]) for name in self._files if name != PAGE
        ]
        call = Call(face, lambda exchange: self._trace(face, exchange), name=TRACE_SPAN)
        routes.append(Route("/playground/trace/{request_id}", call, methods=["GET"]))
        return routes

    def _file(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        body, kind = self._files[name]

        async def send(request: Request) -> Response:
            return Response(body, media_type=kind, headers=HEADERS)

        return send

    async def _trace(self, face: Face, exchange: Exchange) -> None:
        """GET /playground/trace/{request id}: {total_ms, complete, phases: [{phase, ms}]} of one's own request."""
        principal = await face.principal(exchange)
        spans = self.spans.of(principal.tenant, exchange.scope["path_params"]["request_id"])
        found = phases(spans)
        if not found:
            raise NotFound("no spans of that request have come, or not yet", details={"field": "request_id"})
        answer = {
            "total_ms": sum(found.values()),
            "complete": complete(spans),
            "phases": [{"phase": phase, "ms": ms} for phase, ms in found.items()],
        }
        await exchange.answer(text_bytes(json.dumps(answer)), headers=[(b"cache-control", b"no-store")])


def _files() -> dict[str, tuple[bytes, str]]:
    """The page and what belongs to it: body and media type by name."""
    folder = resources.files("services.gateway.playground") / "static"
    out: dict[str, tuple[bytes, str]] = {}
    for file in folder.iterdir():
        kind = mimetypes.guess_type(file.name)[0]
        if kind is not None:
            out[file.name] = (file.read_bytes(), kind)
    return out
