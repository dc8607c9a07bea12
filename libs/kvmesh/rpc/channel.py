"""The one way to open a gRPC channel: keepalive, limits, balancing, trace context, mesh token, deadlines.

`MeshChannel` wraps the channel itself instead of using client interceptors: those start a task and hide the real
call behind a proxy for every call, which costs more than the whole of what is added here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from kvmesh.config import MIB, ServiceSettings, TlsSettings
from kvmesh.errors import Unavailable
from kvmesh.rpc.auth import MESH_TOKEN_KEY, MeshToken
from kvmesh.rpc.status import from_rpc_error
from kvmesh.rpc.tls import channel_credentials
from kvmesh.telemetry import tracing

DEFAULT_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 20.0
"""What a keepalive ping is waited for. gRPC goes by this alone, not by its keepalive timeout, and gives it 60 s."""

MAX_METADATA_BYTES = 32 * 1024
_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
_STAY_WITH_ONE = json.dumps({"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": True}}]})

Metadata = Sequence[tuple[str, str | bytes]]


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


C = TypeVar("C", bound=_Cancellable)


@contextmanager
def raising() -> Iterator[None]:
    """Turn the failure of a call awaited (or a stream read) inside into the KvmeshError that the peer raised."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc) from exc


@contextmanager
def cancelling(call: C) -> Iterator[C]:
    """Own a stream: whatever happens inside, the call is cancelled at the end (no effect once it has finished)."""
    try:
        yield call
    finally:
        call.cancel()


def resolve_target(address: str | Sequence[str]) -> str:
    """gRPC target of "host:port", of several (balanced round robin), or of a ready-made dns:/ipv4:/unix: target."""
    addresses = [address] if isinstance(address, str) else list(address)
    if not addresses:
        raise ValueError("no address to connect to")
    if len(addresses) == 1 and "," not in addresses[0]:
        return addresses[0]
    parts = [part.strip() for item in addresses for part in item.removeprefix("ipv4:").split(",") if part.strip()]
    if all(part[0].isdigit() for part in parts):
        return "ipv4:" + ",".join(parts)
    if all(part.startswith("[") for part in parts):
        return "ipv6:" + ",".join(parts)
    raise ValueError("several addresses must be numeric; use dns:///name:port for names")


def _options(
    max_message_bytes: int,
    keepalive_s: float,
    ping_timeout_s: float,
    use_proxy: bool,
    server_name: str | None,
    balance: bool,
) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # Without this the receive window grows to megabytes, and a sender does not notice for minutes that we stalled.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", int(ping_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.service_config", _ROUND_ROBIN if balance else _STAY_WITH_ONE),
        # A restarted peer is found again within a second or two, not after gRPC's default backoff of up to 120 s.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # Own connections: a channel's fate must not hang on the backoff state of another one to the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int(use_proxy)),
    ]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


class MeshChannel(grpc.aio.Channel):
    """A channel on which every call carries the trace context and the mesh token, and every unary call a deadline.

    Generated stubs take it like any other channel. Streaming responses have no default deadline: they are the
    long-lived streams, which bring heartbeats, or calls whose limit the caller passes as `timeout`.
    """

    def __init__(
        self, inner: grpc.aio.Channel, address: str, token: MeshToken | None, default_timeout_s: float
    ) -> None:
        self._inner = inner
        self._token = token
        self.address = address
        self.default_timeout_s = default_timeout_s

    def call_metadata(self, metadata: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
        """Metadata of one call: the caller's, the trace context, the mesh token."""
        items = tracing.inject(metadata or ())
        if self._token is not None:
            items.append((MESH_TOKEN_KEY, self._token.current()))
        return tuple(items)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Multi-callable of a unary call; the default deadline applies."""
        return _Callable(self, self._inner.unary_unary(method, *args, **kwargs), self.default_timeout_s)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Multi-callable of a client stream with one answer; the default deadline applies."""
        return _Callable(self, self._inner.stream_unary(method, *args, **kwargs), self.default_timeout_s)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Multi-callable of a server stream; no default deadline."""
        return _Callable(self, self._inner.unary_stream(method, *args, **kwargs), None)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Multi-callable of a bidirectional stream; no default deadline."""
        return _Callable(self, self._inner.stream_stream(method, *args, **kwargs), None)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for a connection; Unavailable when there is none within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._inner.channel_ready()
        except TimeoutError:
            raise Unavailable(f"no connection to {self.address} within {timeout_s:g} s") from None

    async def channel_ready(self) -> None:
        """Wait for a connection without a limit; prefer `wait_ready`."""
        await self._inner.channel_ready()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity of the channel."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connectivity differs from `last_observed_state`."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def close(self, grace: float | None = None) -> None:
        """Close the connections; calls in flight are cancelled after `grace` seconds (None = at once)."""
        await self._inner.close(grace)

    async def __aenter__(self) -> MeshChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(None)


class _Callable:
    __slots__ = ("_channel", "_inner", "_timeout")

    def __init__(self, channel: MeshChannel, inner: Any, default_timeout: float | None) -> None:
        self._channel = channel
        self._inner = inner
        self._timeout = default_timeout

    def __call__(
        self, *request: Any, timeout: float | None = None, metadata: Metadata | None = None, **kwargs: Any
    ) -> Any:
        return self._inner(
            *request,
            timeout=self._timeout if timeout is None else timeout,
            metadata=self._channel.call_metadata(metadata),
            **kwargs,
        )


def open_channel(
    address: str | Sequence[str],
    *,
    tls: TlsSettings | None = None,
    token: MeshToken | None = None,
    default_timeout_s: float = DEFAULT_TIMEOUT_S,
    max_message_bytes: int = 16 * MIB,
    keepalive_s: float = 20.0,
    ping_timeout_s: float = PING_TIMEOUT_S,
    server_name: str | None = None,
    use_proxy: bool = False,
    balance: bool = True,
) -> MeshChannel:
    """Open a channel (it connects on first use) with client-side round robin over all addresses behind `address`.

    Without `balance` it stays with one of them, drawn by lot, for as long as that one can be reached.

    `tls` with `ca` or a certificate set means TLS, else plaintext; `server_name` overrides the name that is verified.
    `default_timeout_s` is the deadline of unary calls that are given no `timeout`. A peer that is silent for
    `keepalive_s` is sent a ping; unanswered for `ping_timeout_s`, the connection and its calls end with UNAVAILABLE.
    """
    target = resolve_target(address)
    options = _options(max_message_bytes, keepalive_s, ping_timeout_s, use_proxy, server_name, balance)
    if tls is not None and tls.connects_tls:
        inner = grpc.aio.secure_channel(target, channel_credentials(tls), options=options)
    else:
        inner = grpc.aio.insecure_channel(target, options=options)
    return MeshChannel(inner, target, token, default_timeout_s)


def open_inner_channel(
    address: str | Sequence[str],
    settings: ServiceSettings,
    token: MeshToken | None = None,
    *,
    default_timeout_s: float = DEFAULT_TIMEOUT_S,
    balance: bool = True,
    name: str = "",
    silence_s: float | None = None,
) -> MeshChannel:
    """`open_channel` to another service of the mesh with this service's certificates, limits and mesh token. `name`:
    what its certificate bears where `address` is only what a name stood for. `silence_s`: seconds without a sign of
    life after which the peer is given up; None = as the settings have it for idle connections."""
    return open_channel(
        address,
        tls=settings.tls.inner,
        token=token,
        default_timeout_s=default_timeout_s,
        max_message_bytes=settings.max_message_bytes,
        keepalive_s=settings.keepalive_s if silence_s is None else silence_s / 2,
        ping_timeout_s=PING_TIMEOUT_S if silence_s is None else silence_s / 2,
        server_name=settings.tls.server_name or name or None,
        balance=balance,
    )
