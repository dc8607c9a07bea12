"""Who calls at the public door: a credential → tenant and policy.

A credential is, in this order: an API key of the reloadable file of hashed keys, an API key in Redis, a token (JWT) of
an identity provider, or, where the call brings no `authorization` at all, the certificate that TLS verified. Policies
are the file's, whatever the credential. Without any of the sources everybody is the tenant `local`.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvmesh.errors import PermissionDenied, Unauthenticated
from kvmesh.rpc.auth import LOCAL_TENANT, TENANT_KEY, ServicerContext
from kvmesh.rpc.certificates import PeerCertificate
from kvmesh.rpc.files import ReloadingFile
from kvmesh.rpc.keyfile import hash_key, is_ours, load, new_key, utc
from kvmesh.rpc.policy import Policy
from kvmesh.telemetry import metrics, names

__all__ = ["Credentials", "Identity", "KeySource", "Policy", "Principal", "TokenSource", "hash_key", "new_key"]

MAX_KEY_CHARS = 512
MAX_TOKEN_CHARS = 8192
ASIDE_BYTES = 16 << 10
"""A key file that is longer takes more than a few milliseconds to parse."""

REFUSED = "a valid API key is needed: authorization: Bearer <key>"
"""Whatever is wrong with a credential, or that there is none: nobody learns which part failed."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a public call comes from."""

    tenant: str
    policy: Policy
    key_name: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a source other than the file knows of a valid credential."""

    tenant: str
    name: str = ""


class KeySource(Protocol):
    """API keys that are kept elsewhere."""

    async def find(self, digest: bytes) -> Identity | None:
        """Whose key has this SHA-256, None for nobody's. Unavailable or Overloaded when that cannot be told now."""


class TokenSource(Protocol):
    """Tokens that somebody else issues."""

    async def check(self, token: str) -> Identity | None:
        """Who a token stands for, None when it is not good. Unavailable when that cannot be told now."""


class Credentials:
    """What a gateway tells its callers by. Without any source everybody is the tenant `local`."""

    def __init__(
        self,
        path: Path | None,
        *,
        keys: KeySource | None = None,
        tokens: TokenSource | None = None,
        interval_s: float = 1.0,
    ) -> None:
        """Raises OSError or ValueError when the first version of the file is unusable."""
        self._file = (
            ReloadingFile(
                [path],
                lambda: load(path),
                what="credentials file",
                interval_s=interval_s,
                aside_bytes=ASIDE_BYTES,
            )
            if path is not None
            else None
        )
        self._keys = keys
        self._tokens = tokens
        self._local = Principal(LOCAL_TENANT, Policy())
        if not self.open:
            metrics.at_zero(names.AUTH_FAILURES, "key")

    @property
    def open(self) -> bool:
        """True when no source is configured and nobody needs a credential."""
        return self._file is None and self._keys is None and self._tokens is None

    async def identify(
        self,
        authorization: str | Sequence[str] | None,
        certificate: PeerCertificate | None = None,
        *,
        named: Sequence[str] = (),
    ) -> Principal:
        """Who a call comes from, by its `authorization` values ("Bearer <key or token>") and its TLS certificate.

        A call that brings an `authorization` is judged by it alone: a wrong key does not become right by a certificate.
        named: the call's values of TENANT_KEY. That header is the mesh's own, and whoever sends it here must not
        believe that it did anything: PermissionDenied where it is not the credential's tenant.
        Unauthenticated for whatever is not good; Unavailable or Overloaded when a source cannot tell now.
        """
        principal = await self._identified(authorization, certificate)
        if any(tenant != principal.tenant for tenant in named):
            message = f"{TENANT_KEY}: the tenant comes from the credential alone"
            raise PermissionDenied(message, details={"field": TENANT_KEY})
        return principal

    async def _identified(
        self, authorization: str | Sequence[str] | None, certificate: PeerCertificate | None
    ) -> Principal:
        if self.open:
            return self._local
        given = [authorization] if isinstance(authorization, str) else list(authorization or ())
        if given:
            found = await self._of_bearer(_bearer(given))
        else:
            found = self._of_certificate(certificate)
        if found is None:
            metrics.counter(names.AUTH_FAILURES).labels("key").inc()
            raise Unauthenticated(REFUSED)
        return found

    async def authenticate_call(self, context: ServicerContext) -> Principal:
        """The principal of a gRPC call; see `identify`."""
        given = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        return await self.identify(
            [value for key, value in given if key == "authorization"],
            # Nothing to learn from it where nobody needs one.
            None if self.open else PeerCertificate.of_call(context),
            named=[value for key, value in given if key == TENANT_KEY],
        )

    async def _of_bearer(self, key: str) -> Principal | None:
        if not key:
            return None
        if len(key) <= MAX_KEY_CHARS:
            digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
            record = self._file.get().keys.get(digest) if self._file is not None else None
            if record is not None and hmac.compare_digest(bytes.fromhex(record.sha256), digest):
                fresh = record.expires is None or utc(record.expires) > dt.datetime.now(dt.UTC)
                return self._principal(record.tenant, record.name) if fresh else None
            # Only keys of the form that `kvmesh keys` makes are there: anything else is not worth a round trip.
            if self._keys is not None and is_ours(key):
                stored = await self._keys.find(digest)
                return self._principal(stored.tenant, stored.name) if stored is not None else None
        if self._tokens is not None and key.count(".") == 2:
            told = await self._tokens.check(key)
            return self._principal(told.tenant, told.name) if told is not None else None
        return None

    def _of_certificate(self, certificate: PeerCertificate | None) -> Principal | None:
        if certificate is None or self._file is None:
            return None
        loaded = self._file.get()
        found = [loaded.names[name] for name in certificate.names if name in loaded.names]
        if certificate.subject in loaded.subjects:
            found.append(loaded.subjects[certificate.subject])
        # One that stands for two tenants stands for none.
        if len({each.tenant for each in found}) != 1:
            return None
        return self._principal(found[0].tenant, min(each.name for each in found))

    def _principal(self, tenant: str, name: str) -> Principal:
        policy = self._file.get().tenants.get(tenant) if self._file is not None else None
        return Principal(tenant, policy or self._local.policy, name)


def _bearer(values: Sequence[str]) -> str:
    """The key or token of the only `authorization` value; "" for several, another scheme, or one that is too long."""
    if len(values) != 1 or len(values[0]) > MAX_TOKEN_CHARS + 64:
        return ""
    scheme, _, key = values[0].strip(" ").partition(" ")
    key = key.strip(" ")
    return key if scheme.lower() == "bearer" and len(key) <= MAX_TOKEN_CHARS else ""
