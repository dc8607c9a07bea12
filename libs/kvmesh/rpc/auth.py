"""Who is on the other side of an inner hop, and which tenant it speaks for.

A hop is authenticated by the mesh token (metadata `x-kvmesh-mesh-token`) or by a client certificate that TLS has
verified. The tenant of a request travels in `x-kvmesh-tenant` and is believed only on an authenticated hop.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc

from kvmesh.config import ServiceSettings
from kvmesh.errors import Unauthenticated
from kvmesh.rpc.files import ReloadingFile, read_bounded
from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)

MESH_TOKEN_KEY = "x-kvmesh-mesh-token"
TENANT_KEY = "x-kvmesh-tenant"
LOCAL_TENANT = "local"
MIN_TOKEN_CHARS = 16
MAX_TOKEN_FILE_BYTES = 64 * 1024
TENANT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_hop: ContextVar[str] = ContextVar("kvmesh_hop", default="")
"""How the present call's peer was authenticated: "token", "mtls", or "" for not at all."""

ServicerContext = grpc.aio.ServicerContext[Any, Any]


class MeshToken:
    """The shared secret of the mesh, from a file that may be rotated: the first line is sent, all are accepted."""

    def __init__(self, path: Path, *, interval_s: float = 1.0) -> None:
        self._file = ReloadingFile([path], lambda: _read_tokens(path), what="mesh token file", interval_s=interval_s)

    def current(self) -> str:
        """The token to send."""
        return self._file.get()[0].decode("ascii")

    def accepts(self, token: str | bytes | None) -> bool:
        """True when `token` is one of the file's; the time taken does not depend on where it differs."""
        given = token.encode("utf-8", "replace") if isinstance(token, str) else token or b""
        # All are compared, so that timing does not tell which line matched either.
        return sum(hmac.compare_digest(given, known) for known in self._file.get()) > 0

    def sign(self, data: bytes) -> str:
        """Proof, in hex, that a member of the mesh wrote `data`."""
        return _mac(self._file.get()[0], data)

    def signed(self, data: bytes, proof: str) -> bool:
        """True for a proof that any of the file's tokens gives."""
        given = proof.encode("utf-8", "replace")
        return any(hmac.compare_digest(given, _mac(known, data).encode()) for known in self._file.get())

    def __repr__(self) -> str:
        return "MeshToken([redacted])"


def _mac(token: bytes, data: bytes) -> str:
    return hmac.new(token, b"kvmesh-signed\0" + data, "sha256").hexdigest()


def _read_tokens(path: Path) -> list[bytes]:
    lines = [line.strip() for line in read_bounded(path, MAX_TOKEN_FILE_BYTES).splitlines()]
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not tokens:
        raise ValueError("the mesh token file holds no token")
    if any(len(token) < MIN_TOKEN_CHARS or not token.isascii() for token in tokens):
        raise ValueError(f"a mesh token needs at least {MIN_TOKEN_CHARS} ASCII characters")
    return tokens


class MeshAuth:
    """Decides whether a call on an inner service comes from the mesh."""

    def __init__(self, token: MeshToken | None = None, *, mtls: bool = False) -> None:
        self.token = token
        self.mtls = mtls
        if self.required:
            metrics.at_zero(names.AUTH_FAILURES, "mesh")

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> MeshAuth:
        """Reads the token file named by the settings; OSError or ValueError when it is unusable."""
        token = MeshToken(settings.mesh_token_file) if settings.mesh_token_file is not None else None
        return cls(token, mtls=settings.tls.require_client_cert)

    @property
    def required(self) -> bool:
        """True when inner calls must be authenticated."""
        return self.token is not None or self.mtls

    def authenticate(self, context: ServicerContext) -> str:
        """How the peer proved itself: "token", "mtls" or "" (nothing required); raises Unauthenticated."""
        if self.mtls and _verified_peer(context):
            return "mtls"
        if self.token is not None and self.token.accepts(metadata_value(context, MESH_TOKEN_KEY)):
            return "token"
        if self.required:
            metrics.counter(names.AUTH_FAILURES).labels("mesh").inc()
            raise Unauthenticated("this service is for members of the mesh")
        return ""


def _verified_peer(context: ServicerContext) -> bool:
    """TLS verified a certificate of the peer (the server demands one, so an identity is there only if it did)."""
    return bool(list(context.peer_identities() or ()))


def metadata_value(context: ServicerContext, key: str) -> str | None:
    """First value of a text metadata key of the call, None when absent."""
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    for name, value in metadata:
        if name == key and isinstance(value, str):
            return value
    return None


def set_hop(how: str) -> None:
    """Record for this call how its peer was authenticated (only the server's guard calls this)."""
    _hop.set(how)


def tenant_from(context: ServicerContext) -> str:
    """Tenant of the present call on an inner service: from the metadata of an authenticated hop, else "local".

    Raises Unauthenticated when a hop that proved nothing names another tenant: believing it would let anyone borrow
    a tenant, ignoring it would let tenants share one cache.
    """
    tenant = metadata_value(context, TENANT_KEY)
    if tenant is None or tenant == LOCAL_TENANT:
        return LOCAL_TENANT
    if not _hop.get():
        raise Unauthenticated("a tenant is only taken from an authenticated member of the mesh")
    if not TENANT_PATTERN.fullmatch(tenant):
        raise Unauthenticated("malformed tenant")
    return tenant


def tenant_metadata(tenant: str) -> Sequence[tuple[str, str]]:
    """Metadata that carries a tenant over an inner hop."""
    return ((TENANT_KEY, tenant),)
