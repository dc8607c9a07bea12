"""The key set (JWKS) that tokens are checked by: from a file, or from the provider's URL, which is read again."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from kvmesh.errors import Unavailable
from kvmesh.rpc.files import ReloadingFile, read_bounded

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
MAX_KEYS = 256
MAX_KID_CHARS = 256
MIN_RSA_BITS = 2048
DISCOVERY = "/.well-known/openid-configuration"

FETCH_S = 5.0
"""What reading the set may take; with discovery, either of the two."""

SLACK_S = 2.0
REFRESH_S = 300.0
RETRY_S = 10.0
"""Between two tries while a set is there, whatever the reason for them."""

FIRST_RETRY_S = 1.0
"""Between two tries while there is none yet."""

_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA", "Ed448": "EdDSA"}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key, and the algorithms that it may be used with: the token does not choose."""

    kid: str
    key: Any
    algorithms: frozenset[str]


KeySet = tuple[SigningKey, ...]


class Keys(Protocol):
    """Where the key set comes from."""

    async def find(self, kid: str | None) -> KeySet:
        """The keys of this id, all of them without one. Unavailable while no set could be read yet."""

    def current(self) -> object:
        """What is another object once the set has changed."""


def parse_jwks(raw: bytes) -> KeySet:
    """The keys of a set that signatures can be checked with. ValueError when there are none or too many.

    Left out: secrets (`oct`), private keys, keys for encryption, short RSA keys, and kinds that are not known here.
    """
    document = json.loads(raw)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise ValueError(f"a key set is an object with at most {MAX_KEYS} keys")
    found = tuple(key for each in listed if (key := _signing_key(each)) is not None)
    if not found:
        raise ValueError("the key set holds no key to check signatures with")
    return found


def _signing_key(jwk: object) -> SigningKey | None:
    if not isinstance(jwk, dict) or "d" in jwk or jwk.get("use", "sig") != "sig":
        return None
    operations, kid = jwk.get("key_ops", ["verify"]), jwk.get("kid", "")
    if not isinstance(operations, list) or "verify" not in operations or not isinstance(kid, str):
        return None
    algorithms = _RSA if jwk.get("kty") == "RSA" else frozenset(filter(None, [_CURVES.get(str(jwk.get("crv")))]))
    if jwk.get("alg") is not None:
        algorithms &= {jwk["alg"]}
    if not algorithms or len(kid) > MAX_KID_CHARS:
        return None
    key: Any
    try:
        if jwk.get("kty") == "RSA":
            key = RSAAlgorithm.from_jwk(jwk)
            if key.key_size < MIN_RSA_BITS:
                return None
        elif jwk.get("kty") == "EC":
            key = ECAlgorithm.from_jwk(jwk)
        elif jwk.get("kty") == "OKP":
            key = OKPAlgorithm.from_jwk(jwk)
        else:
            return None
    except Exception:
        # One that is broken must not take the others with it.
        return None
    return SigningKey(kid, key, algorithms)


def _of(keys: KeySet, kid: str | None) -> KeySet:
    return keys if kid is None else tuple(key for key in keys if key.kid == kid)


class FileKeys:
    """A key set in a file; a new version is taken within a second."""

    def __init__(self, path: Path, *, interval_s: float = 1.0) -> None:
        """Raises OSError or ValueError when the first version is unusable."""
        self._file = ReloadingFile(
            [path], lambda: parse_jwks(read_bounded(path, MAX_BYTES)), what="key set (JWKS)", interval_s=interval_s
        )

    async def find(self, kid: str | None) -> KeySet:
        """See Keys."""
        return _of(self._file.get(), kid)

    def current(self) -> object:
        """See Keys."""
        return self._file.get()


class UrlKeys:
    """A key set behind an https URL, or behind the provider's discovery document. The last good one stays in use while
    the provider is away."""

    def __init__(
        self,
        url: str,
        issuer: str,
        *,
        context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """context: of the connection; default the system's authorities. ValueError for a URL that is not https."""
        if not url.startswith("https://"):
            raise ValueError("a key set is read over https or from a file")
        self._url = url
        self._issuer = issuer
        self._clock = clock
        handlers = [_NoRedirect(), urllib.request.HTTPSHandler(context=context or ssl.create_default_context())]
        self._opener = urllib.request.build_opener(*handlers)
        self._keys: KeySet = ()
        self._read_at = -1e9
        self._tried_at = -1e9
        self._reading: asyncio.Task[None] | None = None
        # Its own: a provider that answers a byte at a time holds up a thread for long, and nobody else's.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jwks")

    async def find(self, kid: str | None) -> KeySet:
        """See Keys. Waits for the provider where there is no set yet, or none with this key."""
        if not self._keys:
            await self._read(FIRST_RETRY_S)
            if not self._keys:
                raise Unavailable("the identity provider's keys cannot be read now")
        found = _of(self._keys, kid)
        if not found:
            await self._read(RETRY_S)
            found = _of(self._keys, kid)
        return found

    def current(self) -> object:
        """See Keys. Reads a set that has become old, in the background."""
        if self._keys and self._clock() - self._read_at > REFRESH_S:
            self._start(RETRY_S)
        return self._keys

    def _start(self, interval_s: float) -> asyncio.Task[None] | None:
        """One read at a time, shared by all who wait."""
        if self._reading is None and self._clock() - self._tried_at >= interval_s:
            self._tried_at = self._clock()
            self._reading = asyncio.create_task(self._refresh(), name="jwks")
        return self._reading

    async def _read(self, interval_s: float) -> None:
        reading = self._start(interval_s)
        if reading is not None:
            await asyncio.shield(reading)

    async def _refresh(self) -> None:
        try:
            # The thread has limits of its own, except for the name's resolution and the answer's head.
            async with asyncio.timeout(2 * FETCH_S + SLACK_S):
                keys = await asyncio.get_running_loop().run_in_executor(self._thread, self._fetch)
            if keys != self._keys:
                log.info("key set (JWKS): read, %d key(s)", len(keys))
                self._keys = keys
            self._read_at = self._clock()
        except Exception as exc:
            kept = "; the old one stays in use" if self._keys else ""
            log.warning("key set (JWKS): cannot be read (%s)%s", type(exc).__name__, kept)
        finally:
            self._reading = None

    def _fetch(self) -> KeySet:
        url = self._url
        if url.endswith(DISCOVERY):
            document = json.loads(self._get(url))
            if document["issuer"] != self._issuer:
                raise ValueError("the discovery document is another issuer's")
            url = str(document["jwks_uri"])
            if not url.startswith("https://"):
                raise ValueError("a key set is read over https")
        return parse_jwks(self._get(url))

    def _get(self, url: str) -> bytes:
        deadline = time.monotonic() + FETCH_S
        parts: list[bytes] = []
        with self._opener.open(url, timeout=FETCH_S) as response:
            while part := response.read1(1 << 16):
                parts.append(part)
                if sum(map(len, parts)) > MAX_BYTES or time.monotonic() > deadline:
                    raise ValueError("the answer is too large or too slow")
        return b"".join(parts)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Where the keys come from is said by the settings alone."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: the redirect becomes an error."""
        return
