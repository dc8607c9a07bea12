"""The one way to start a grpc.aio server.

server = RpcServer(settings)
server.add(router_pb2_grpc.add_RouterServicer_to_server, Servicer(), access=Access.INNER)
address = await server.start()        # bound; readiness is NOT_SERVING
server.set_ready(True)
await server.serve_until_signal(on_drain)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from kvmesh.config import ServiceSettings, split_host_port
from kvmesh.errors import FailedPrecondition
from kvmesh.rpc import health, reflection
from kvmesh.rpc.auth import MeshAuth
from kvmesh.rpc.channel import PING_TIMEOUT_S
from kvmesh.rpc.guard import Access, Policy, ServerState, wrap
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.tasks import BackgroundTasks, cancel_and_wait
from kvmesh.rpc.tls import server_credentials
from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)

OnDrain = Callable[[Deadline], Awaitable[None]]
MAX_METADATA_BYTES = 32 * 1024
CLOSE_TIMEOUT_S = 5.0
_OPEN = Policy(Access.OPEN)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server differs from the others of the mesh. `shared_port`: other processes listen on the same port.

    `leaves_first`: a drain begins with the end of listening and a GOAWAY on every connection, so that clients take
    their next calls elsewhere; without it calls of `while_draining` are still served.
    """

    shared_port: bool = False
    leaves_first: bool = False


def _options(settings: ServiceSettings, options: ServerOptions) -> list[tuple[str, int]]:
    return [
        # Two processes on one port would share its connections silently; a taken port must be an error.
        ("grpc.so_reuseport", int(options.shared_port)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", int(PING_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        *_age(settings),
    ]


def _age(settings: ServiceSettings) -> list[tuple[str, int]]:
    """gRPC itself makes the age of each connection a tenth longer or shorter."""
    age_s, grace_s = settings.connection_life_s
    if not age_s:
        return []
    return [
        ("grpc.max_connection_age_ms", int(age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(grace_s * 1000)),
    ]


class RpcServer:
    """A grpc.aio server with health, reflection, TLS, guards around every handler, and a graceful end."""

    def __init__(
        self, settings: ServiceSettings, *, auth: MeshAuth | None = None, options: ServerOptions | None = None
    ) -> None:
        """Needs a running event loop. `auth` is made from the settings when not given."""
        self.settings = settings
        self._options = options or ServerOptions()
        self._leaving: asyncio.Task[None] | None = None
        self.auth = auth if auth is not None else MeshAuth.from_settings(settings)
        self.health = health.HealthServicer()
        self.address = ""
        self.client_address = ""
        """Of the second door, `tls.client_listen`; "" = there is none."""
        self._state = ServerState(self.auth, settings.default_deadline_s)
        self._server = grpc.aio.server(options=_options(settings, self._options))
        self._policy = _OPEN
        self._services: list[str] = []
        self._named: list[str] = []
        self._ready = False
        self._withdrawn = self._draining = False
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._started = False
        self._stopped = False
        self._signals: list[signal.Signals] = []

    # --- registration --------------------------------------------------------------------------------------------

    def add(
        self,
        add_to_server: Callable[[Any, Any], None],
        servicer: object,
        *,
        access: Access,
        no_deadline: Iterable[str] = (),
        while_draining: Iterable[str] = (),
        long_lived: Iterable[str] = (),
    ) -> None:
        """Serve a servicer: `add_to_server` is the generated `add_XServicer_to_server`.

        The last three name methods (see `Policy`); a name that the service does not have is a ValueError.
        """
        self._policy = Policy(access, frozenset(no_deadline), frozenset(while_draining), frozenset(long_lived))
        try:
            add_to_server(servicer, self)
        finally:
            self._policy = _OPEN

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Part of generated code's registration; the handlers come by name in `add_registered_method_handlers`."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called by generated code: wraps every method of a service and serves it."""
        named = self._policy.no_deadline | self._policy.while_draining | self._policy.long_lived
        if unknown := sorted(named - set(handlers)):
            raise ValueError(f"{service} has no method {unknown[0]}")
        wrapped = {name: wrap(handler, service, name, self._policy, self._state) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))
        if self._policy.access is not Access.OPEN:
            self._services.append(service)
            self.health.add([service])

    def add_readiness(self, name: str) -> None:
        """Tell a readiness of that name, where nothing else is served."""
        self._named.append(name)
        self.health.add([name])

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def services(self) -> tuple[str, ...]:
        """Full names of the services, health and reflection aside."""
        return tuple(self._services)

    @property
    def in_flight(self) -> int:
        """Calls being served, long-lived streams and probes aside."""
        return self._state.in_flight

    @property
    def withdrawn(self) -> bool:
        """True from the first signal on: readiness is off for good, though calls are served still."""
        return self._withdrawn

    @property
    def draining(self) -> bool:
        """True once the drain has begun: new work goes elsewhere."""
        return self._draining

    @property
    def ready(self) -> bool:
        """True while readiness is SERVING."""
        return self._ready

    async def start(self) -> str:
        """Bind and serve; returns the address that peers use. FailedPrecondition when the address cannot be bound."""
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self)
        for name, handlers in reflection.reflection_handlers([*self._services, health.SERVICE_NAME]).items():
            self.add_registered_method_handlers(name, handlers)
        tls = self.settings.tls
        self.address = self._advertised(
            self._bind(self.settings.listen, server_credentials(tls) if tls.serves_tls else None)
        )
        if tls.client_listen:
            # gRPC demands a certificate of all who come to a port, or of nobody.
            port = self._bind(tls.client_listen, server_credentials(tls, clients=True))
            self.client_address = f"{split_host_port(tls.client_listen)[0]}:{port}"
        await self._server.start()
        self._started = True
        self._publish_ready(False)
        log.info("listening on %s%s", self.address, " (TLS)" if self.settings.tls.serves_tls else "")
        return self.address

    def _bind(self, listen: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is not None:
                port = self._server.add_secure_port(listen, credentials)
            else:
                port = self._server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise FailedPrecondition(
                f"cannot listen on {listen}: the address is taken, not of this machine, or not permitted",
                details={"address": listen},
            )
        return port

    def _advertised(self, port: int) -> str:
        if self.settings.advertise:
            return self.settings.advertise
        if self.settings.listen.startswith("unix:"):
            return self.settings.listen
        host, _ = split_host_port(self.settings.listen)
        return f"{socket.gethostname() if host in ('0.0.0.0', '[::]') else host}:{port}"

    def set_ready(self, ready: bool, service: str | None = None) -> None:
        """Readiness of one service or of all (None). On the event loop; once withdrawn it stays off."""
        ready = ready and not self._withdrawn
        for name in [*self._services, *self._named] if service is None else [service]:
            self.health.set(name, ready)
        self._publish_ready(all(self.health.is_serving(name) for name in [*self._services, *self._named]))

    def _publish_ready(self, ready: bool) -> None:
        if ready != self._ready:
            log.info("readiness: %s", "SERVING" if ready else "NOT_SERVING")
        self._ready = ready
        metrics.gauge(names.READY).labels(self.settings.service).set(int(ready))

    def request_stop(self) -> None:
        """What SIGTERM does: the first call starts the drain, the second cuts it short. On the event loop only."""
        (self._force if self._stop.is_set() else self._stop).set()

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT call `request_stop` (until `close`); no effect outside the main thread."""
        if self._signals:
            return
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.request_stop)
                self._signals.append(number)
        except (NotImplementedError, RuntimeError, ValueError):
            log.debug("signals are only handled in the main thread")

    async def wait_stop(self) -> None:
        """Wait until somebody wants the server to stop."""
        await self._stop.wait()

    async def serve_until_signal(
        self, on_drain: OnDrain | None = None, *, tasks: BackgroundTasks | None = None
    ) -> BaseException | None:
        """Serve until SIGTERM, SIGINT, `request_stop` or the failure of an essential task of `tasks`; then drain.

        Returns that failure, or None after an ordinary stop.
        """
        self.handle_signals()
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        failed = asyncio.create_task(tasks.wait_failed(), name="failed") if tasks is not None else None
        try:
            await asyncio.wait([t for t in (stop, failed) if t is not None], return_when=asyncio.FIRST_COMPLETED)
            # What fails from here on fails because the service is ending.
            failure = tasks.failure if tasks is not None else None
            self._stop.set()
            await self.drain(on_drain)
            return failure
        finally:
            await cancel_and_wait(stop, failed)
            await self.close()

    async def drain(self, on_drain: OnDrain | None = None) -> None:
        """Readiness off; after `drain_delay_s` new work refused, work in flight finished within `drain_timeout_s`, then
        closed.

        `on_drain` gets the deadline: it finishes or hands over the service's own work and ends its long-lived streams.
        """
        await self._withdraw()
        deadline = Deadline.after(self.settings.drain_timeout_s)
        self._draining = True
        # Who leaves first is left to gRPC, which takes no new call: those that crossed its goodbye are served.
        self._state.draining = not self._options.leaves_first
        log.info("draining: %d call(s) in flight, up to %.0f s", self.in_flight, self.settings.drain_timeout_s)
        if self._options.leaves_first and self._started:
            self._leaving = asyncio.create_task(self._leave(deadline), name="leave")
        work = asyncio.create_task(self._finish(on_drain), name="drain")
        force = asyncio.create_task(self._force.wait(), name="force")
        try:
            await asyncio.wait([work, force], timeout=deadline.timeout(), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.warning("drain cut short: %d call(s) still in flight", self.in_flight)
        finally:
            await cancel_and_wait(work, force)
        await self.close()

    async def _withdraw(self) -> None:
        """Readiness off, and time for others to notice. A second signal ends the wait."""
        self._withdrawn = True
        self.set_ready(False)
        delay_s = self.settings.drain_delay_s if self._started else 0.0
        if delay_s > 0:
            log.info("leaving: not ready, serving on for %g s", delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._force.wait()

    async def _leave(self, deadline: Deadline) -> None:
        """Listen no more and say GOAWAY; calls in flight go on. `close` ends it."""
        await self._server.stop(deadline.remaining() + CLOSE_TIMEOUT_S)

    async def _finish(self, on_drain: OnDrain | None) -> None:
        if on_drain is not None:
            try:
                await on_drain(Deadline.after(self.settings.drain_timeout_s))
            except Exception:
                log.exception("the service's own drain failed")
        await self._state.idle.wait()

    async def close(self) -> None:
        """Close at once: calls still in flight are cancelled. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for number in self._signals:
            asyncio.get_running_loop().remove_signal_handler(number)
        self._signals.clear()
        self._withdrawn = self._draining = self._state.draining = True
        self._publish_ready(False)
        self.health.close()
        # A moment for the last answers and the end of the health watches to leave the process.
        await self._server.stop(0.1)
        if self._leaving is not None:
            await cancel_and_wait(self._leaving)
        if self._started and await self._server.wait_for_termination(CLOSE_TIMEOUT_S):
            log.warning("the server did not end within %g s", CLOSE_TIMEOUT_S)

    async def __aenter__(self) -> RpcServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
