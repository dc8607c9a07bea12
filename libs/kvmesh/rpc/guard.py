"""What surrounds every handler: metrics, trace, draining, authentication, deadline, and the mapping of errors.

A handler is wrapped once, when it is registered. The wrapper is always a coroutine, also around an async generator:
a cancelled call then closes the generator at once, in its own context, and its `finally` runs before the call ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry.trace import SpanKind

from kvmesh.errors import DeadlineExceeded, Internal, InvalidArgument, KvmeshError, Unavailable
from kvmesh.rpc import status
from kvmesh.rpc.auth import MeshAuth, ServicerContext, set_hop
from kvmesh.telemetry import metrics, names, tracing

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Access(enum.Enum):
    """Who may call a service."""

    PUBLIC = "public"
    """Anybody; the service checks API keys itself. Unary calls without a deadline get the default one."""
    INNER = "inner"
    """Members of the mesh. Unary calls without a deadline are refused."""
    OPEN = "open"
    """Probes and tools (health, reflection): never refused, also while draining, and not counted in flight."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for the methods of one service; the sets hold bare method names."""

    access: Access
    no_deadline: frozenset[str] = frozenset()
    """Unary methods that may come without a deadline."""
    while_draining: frozenset[str] = frozenset()
    """Methods still accepted while draining: those that finish work (abort, drain, transfer control)."""
    long_lived: frozenset[str] = frozenset()
    """Streams that do not hold a drain up; they are cut when the rest is done."""


@dataclass(slots=True)
class ServerState:
    """What the guards of one server share."""

    auth: MeshAuth
    default_deadline_s: float
    draining: bool = False
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()


class _Malformed:
    """Stands for a request whose bytes do not parse (gRPC itself would answer UNKNOWN and quote our class names)."""


_MALFORMED = _Malformed()


def _checked(request: Any) -> Any:
    if request is _MALFORMED:
        raise InvalidArgument("the request message does not parse")
    return request


class _CheckedStream:
    """A request iterator that raises InvalidArgument at a message that does not parse."""

    def __init__(self, inner: AsyncIterator[Any]) -> None:
        self._inner = inner

    def __aiter__(self) -> _CheckedStream:
        return self

    async def __anext__(self) -> Any:
        return _checked(await self._inner.__anext__())


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except Exception:
            return _MALFORMED

    return parse


class Guard:
    """Surroundings of one method."""

    def __init__(self, service: str, method: str, unary: bool, policy: Policy, state: ServerState) -> None:
        self.name = f"{service}/{method}"
        self._attributes: tracing.Attributes = {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: method,
        }
        self._state = state
        self._access = policy.access
        self._counted = policy.access is not Access.OPEN and method not in policy.long_lived
        self._drains = policy.access is Access.OPEN or method in policy.while_draining
        bounded = unary and method not in policy.no_deadline
        self._needs_deadline = bounded and policy.access is Access.INNER
        self._default_deadline = bounded and policy.access is Access.PUBLIC
        self._in_flight = metrics.gauge(names.RPC_IN_FLIGHT).labels(self.name)

    async def run(self, context: ServicerContext, body: Callable[[], Awaitable[Any]]) -> Any:
        """Run the handler `body`; every way out ends the span, counts the call and gives a proper status."""
        if self._access is Access.OPEN:
            return await self._mapped(context, body, None)
        started = time.perf_counter()
        code = [grpc.StatusCode.OK.name]
        self._enter()
        span = tracing.start_span(
            self.name,
            parent=tracing.extract(_metadata(context)),
            kind=SpanKind.SERVER,
            attributes=self._attributes,
        )
        try:
            with tracing.use_span(span):
                return await self._mapped(context, body, code)
        finally:
            if code[0] != grpc.StatusCode.OK.name:
                tracing.mark_failed(span, code[0])
            span.set_attribute(names.RPC_STATUS, code[0])
            span.end()
            metrics.counter(names.RPC_HANDLED).labels(self.name, code[0]).inc()
            metrics.histogram(names.RPC_DURATION).labels(self.name, code[0]).observe(time.perf_counter() - started)
            self._leave()

    def _enter(self) -> None:
        self._in_flight.inc()
        if self._counted:
            self._state.in_flight += 1
            self._state.idle.clear()

    def _leave(self) -> None:
        self._in_flight.dec()
        if self._counted:
            self._state.in_flight -= 1
            if self._state.in_flight == 0:
                self._state.idle.set()

    async def _mapped(
        self, context: ServicerContext, body: Callable[[], Awaitable[Any]], code: list[str] | None
    ) -> Any:
        error: KvmeshError
        try:
            return await self._bounded(context, body)
        except asyncio.CancelledError:
            _set(code, grpc.StatusCode.CANCELLED)
            raise
        except grpc.aio.AbortError:
            _set(code, context.code())
            raise
        except KvmeshError as exc:
            if isinstance(exc, Internal):
                log.error("%s: %s", self.name, exc.message, exc_info=exc)
            error = exc
        except Exception as exc:
            log.exception("%s: unexpected error", self.name)
            error = status.public_error(exc)
        _set(code, status.grpc_code(error))
        return await status.abort(context, error)

    async def _bounded(self, context: ServicerContext, body: Callable[[], Awaitable[Any]]) -> Any:
        if self._state.draining and not self._drains:
            raise Unavailable("this server is shutting down")
        if self._access is Access.INNER:
            set_hop(self._state.auth.authenticate(context))
        if not (self._needs_deadline or self._default_deadline) or context.time_remaining() is not None:
            return await body()
        if self._needs_deadline:
            raise InvalidArgument("a unary call needs a deadline", details={"field": "grpc-timeout"})
        limit = self._state.default_deadline_s
        timeout = asyncio.timeout(limit)
        try:
            async with timeout:
                return await body()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"no answer within the default deadline of {limit:g} s") from None


def _metadata(context: ServicerContext) -> Any:
    return context.invocation_metadata() or ()


def _set(code: list[str] | None, value: Any) -> None:
    if code is not None:
        code[0] = value.name if isinstance(value, grpc.StatusCode) else status.code_name(value)


def _unless_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A stream may write messages that are serialized already."""
    return lambda message: message if type(message) is bytes else serialize(message)


async def _unimplemented(request: Any, context: ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have this method")


def wrap(handler: Handler, service: str, method: str, policy: Policy, state: ServerState) -> Handler:
    """The handler with its guard around it.

    Raises TypeError for a synchronous handler: a blocking function or generator would freeze the whole server.
    """
    h: Any = handler
    behaviour = h.unary_unary or h.unary_stream or h.stream_unary or h.stream_stream
    if getattr(behaviour, "__module__", "").endswith("_pb2_grpc"):
        # Generated code's placeholder for a method that the servicer does not have.
        behaviour = _unimplemented
    generator = inspect.isasyncgenfunction(behaviour)
    if not (generator or inspect.iscoroutinefunction(behaviour)):
        raise TypeError(f"{service}/{method}: a handler is a coroutine or an async generator function")
    guard = Guard(service, method, not h.request_streaming and not h.response_streaming, policy, state)
    serialize = h.response_serializer or (lambda message: message)

    def prepare(request: Any) -> Any:
        return _CheckedStream(request) if h.request_streaming else _checked(request)

    async def single(request: Any, context: ServicerContext) -> Any:
        async def body() -> bytes:
            # Serialized here, so that a failure is mapped like any other instead of leaking through gRPC.
            return bytes(serialize(await behaviour(prepare(request), context)))

        return await guard.run(context, body)

    async def stream(request: Any, context: ServicerContext) -> None:
        async def body() -> None:
            if not generator:
                await behaviour(prepare(request), context)
                return
            async with contextlib.aclosing(behaviour(prepare(request), context)) as responses:
                async for response in responses:
                    await context.write(response)

        await guard.run(context, body)

    factory = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(bool(h.request_streaming), bool(h.response_streaming))]
    make: Any = factory
    wrapped: Handler = make(
        stream if h.response_streaming else single,
        request_deserializer=_tolerant(h.request_deserializer),
        response_serializer=_unless_bytes(serialize) if h.response_streaming else None,
    )
    return wrapped
