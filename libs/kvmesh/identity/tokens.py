"""Bearer tokens (JWT) of a provider: signature, issuer, audience and times are checked; the tenant is a claim.

Only asymmetric algorithms are known, and which of them a key may be used with is the key's to say: neither `none` nor a
public key taken for a shared secret gets through. What a token says about where its key is (`jku`, `x5u`, `jwk`) is not
looked at.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from kvmesh.config import JwtSettings
from kvmesh.errors import Unavailable
from kvmesh.identity.jwks import MAX_KID_CHARS, FileKeys, Keys, UrlKeys
from kvmesh.rpc.auth import TENANT_PATTERN
from kvmesh.rpc.credentials import MAX_TOKEN_CHARS, Identity

log = logging.getLogger(__name__)

MAX_CACHED = 4096
MAX_NAME_CHARS = 128
REQUIRED = ["exp", "iss", "aud"]


@dataclass(frozen=True, slots=True)
class _Good:
    identity: Identity
    until: float
    keys: object


class JwtTokens:
    """A `TokenSource`. Tokens that were good are remembered by their digest until they expire or the keys change."""

    def __init__(self, settings: JwtSettings, keys: Keys | None = None) -> None:
        """keys: instead of those that the settings name. Raises OSError or ValueError when a key file is unusable."""
        self._settings = settings
        self._keys = keys if keys is not None else _keys(settings)
        self._good: OrderedDict[bytes, _Good] = OrderedDict()

    async def check(self, token: str) -> Identity | None:
        """See TokenSource."""
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            return None
        digest = hashlib.sha256(token.encode()).digest()
        known = self._good.get(digest)
        if known is not None and known.keys is self._keys.current() and time.time() < known.until:
            self._good.move_to_end(digest)
            return known.identity
        self._good.pop(digest, None)
        try:
            checked = await self._check(token)
        except Unavailable:
            raise
        except Exception as exc:
            # Whatever a stranger's text does to a parser; the class only, since the text is a secret.
            log.debug("a token is not good: %s", type(exc).__name__)
            return None
        self._good[digest] = checked
        if len(self._good) > MAX_CACHED:
            self._good.popitem(last=False)
        return checked.identity

    async def _check(self, token: str) -> _Good:
        header = jwt.get_unverified_header(token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if (
            not (kid is None or (isinstance(kid, str) and len(kid) <= MAX_KID_CHARS))
            or "crit" in header
            or "b64" in header
        ):
            raise ValueError("header")
        usable = [key for key in await self._keys.find(kid) if algorithm in key.algorithms]
        # Without an id the key must be beyond doubt; with one too, for nobody stops a set from repeating it.
        (key,) = usable
        claims = jwt.decode(
            token,
            key.key,
            algorithms=[str(algorithm)],
            issuer=self._settings.issuer,
            audience=self._settings.audience,
            leeway=dt.timedelta(seconds=self._settings.leeway_s),
            options={"require": REQUIRED},
        )
        return _Good(
            Identity(self._tenant(claims), _name(claims)),
            float(claims["exp"]) + self._settings.leeway_s,
            self._keys.current(),
        )

    def _tenant(self, claims: dict[str, Any]) -> str:
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or not TENANT_PATTERN.fullmatch(tenant):
            raise ValueError("tenant")
        return tenant


def _name(claims: dict[str, Any]) -> str:
    """For people: whom the provider calls the bearer."""
    subject = claims.get("sub")
    return subject[:MAX_NAME_CHARS] if isinstance(subject, str) and subject.isprintable() else ""


def _keys(settings: JwtSettings) -> Keys:
    if "://" in settings.jwks:
        return UrlKeys(settings.jwks, settings.issuer)
    return FileKeys(Path(settings.jwks))
