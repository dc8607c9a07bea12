"""The HTTP server of a gateway process: sockets, certificates, connections and their end, in the gateway's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable
from email.utils import formatdate

import uvicorn
from uvicorn.server import ServerState

from kvmesh.config import GatewaySettings, split_host_port
from kvmesh.errors import FailedPrecondition
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.tls import reloading_ssl_context
from services.gateway.http.app import App
from services.gateway.http.face import Face
from services.gateway.http.places import Places
from services.gateway.http.protocol import HEAD_TIMEOUT_S, Connection

log = logging.getLogger(__name__)
LOOK_S = 1.0
# Seconds in which an open stream that has nothing to say gives a sign of life.
SIGN_OF_LIFE_S = 10.0
BACKLOG = 2048
# After the end of listening: what connections without a request get for one that is on its way. HTTP/1 has no way to
# say goodbye on them, and who finds one closed under its request cannot know whether it was taken.
LAST_CALL_S = 1.0
FLUSH_LOOK_S = 0.02


class HttpServer:
    """Serves `app` on `settings.http_listen`. FailedPrecondition when that cannot be bound."""

    def __init__(
        self, settings: GatewaySettings, app: App, face: Face, *, leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """`leaving`: whether this process is about to stop listening."""
        self._settings = settings
        self.face = face
        self._withdrawn = leaving
        self._listening = True
        self._state = ServerState()
        self.places = Places(settings.http_max_connections, settings.http_max_connections_per_address)
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.http_keep_alive_s,
        )
        # Every malformed byte of a stranger is not worth a line; what fails inside is logged where it fails.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server: asyncio.Server | None = None
        self._gone = asyncio.Event()
        self.address = ""

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [one for one in self._state.connections if isinstance(one, Connection)]

    @property
    def live_streams(self) -> int:
        """Streams that have not ended."""
        return len(self.face.live)

    async def start(self) -> str:
        """Listen; returns "http://host:port" (https with certificates)."""
        self._config.load()
        tls = reloading_ssl_context(self._settings.tls) if self._settings.tls.serves_tls else None
        bound = self._bind()
        self._date()
        make = functools.partial(
            Connection,
            config=self._config,
            server_state=self._state,
            app_state={},
            max_age_s=self._settings.max_connection_age_s,
            max_body_bytes=self._settings.http_max_body_bytes,
            leaving=self._leaving,
            places=self.places,
        )
        loop = asyncio.get_running_loop()
        handshake_s = HEAD_TIMEOUT_S if tls is not None else None
        self._server = await loop.create_server(
            make, sock=bound, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
        )
        host, port = bound.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        self.address = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("HTTP on %s", self.address)
        return self.address

    def _leaving(self) -> bool:
        return self._withdrawn() or not self._listening

    def _bind(self) -> socket.socket:
        listen = self._settings.http_listen
        host, port = split_host_port(listen)
        host = host.strip("[]")
        bound: socket.socket | None = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # A name of both worlds is bound in that which more clients try first.
            family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
            bound = socket.socket(family, kind, protocol)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._settings.processes > 1:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
            bound.setblocking(False)
        except OSError as exc:
            if bound is not None:
                bound.close()
            raise FailedPrecondition(f"cannot listen on {listen} for HTTP: {exc.strerror}") from None
        return bound

    async def run(self) -> None:
        """Until cancelled: dates, connections over time, streams that have nothing to say."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(asyncio.get_running_loop().time())

    async def look(self, now: float) -> None:
        """Once a second; `now`: on the loop's clock."""
        self._date()
        self.places.tell()
        # What fails in a look is its own: the others are still to be looked after.
        for connection in self.connections:
            try:
                connection.look(now)
            except Exception:
                log.exception("a connection could not be looked after")
        for exchange in list(self.face.live):
            try:
                await exchange.look(now, first_s=self._settings.first_metadata_s, idle_s=SIGN_OF_LIFE_S)
            except Exception:
                log.exception("a stream could not be looked after")

    def _date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]

    # --- the end
    def stop_listening(self) -> None:
        """No new connections; those that are open end with the answer they are at, or with their next one."""
        self._listening = False
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.last_answer()

    async def last_call(self, limit_s: float) -> None:
        """After `stop_listening`: until no connection can bring another request."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(LAST_CALL_S, limit_s)
        while loop.time() < until and any(one.unused for one in self.connections):
            await asyncio.sleep(FLUSH_LOOK_S)
        for connection in self.connections:
            if connection.unused:
                connection.transport.close()

    async def finish(self, deadline: Deadline) -> None:
        """Wait until the last answers have been written, and taken by their clients as far as they read."""
        while self._state.tasks and deadline.remaining() > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline.remaining()):
                    await asyncio.wait(list(self._state.tasks))
        while deadline.remaining() > 0 and any(one.transport.get_write_buffer_size() for one in self.connections):
            await asyncio.sleep(FLUSH_LOOK_S)

    async def close(self) -> None:
        """End what is left, at once."""
        self.face.draining = True
        self.stop_listening()
        for task in list(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=1.0)
        for connection in self.connections:
            connection.abort()
