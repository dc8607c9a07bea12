"""The exact cache: answers in Redis (or Valkey) under the digest of the whole request.

Redis may be slow, dead or gone at any time and costs only the cache: every operation has a short limit, and after a
refused connection or two time-outs in a row nothing is asked until a background ping has been answered in time, so
that no further request pays. Only bytes of bounded size are read or written, and values are plain protobuf.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)

PREFIX = b"kvmesh:answer:1:"
TIMEOUTS_TO_OPEN = 2
FAIR_S = 0.02
"""A look-up that was given less time than this, and less than the setting, is not held against Redis."""

PROBE_INTERVAL_S = 0.5
PUT_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 32
MAX_PASSWORD_BYTES = 4096

# Whichever limit is noticed first: ours, or that of the client, which names it in its own way.
_TIMEOUTS = (TimeoutError, RedisTimeoutError)


class ExactCache:
    """Bytes by key, with a lifetime. No method raises for anything Redis does or does not do."""

    def __init__(
        self, url: str, *, timeout_s: float, ttl_s: float, max_entry_bytes: int, password_file: Path | None = None
    ) -> None:
        """Raises ValueError for a URL that is none, OSError when the password file cannot be read."""
        self._timeout_s = timeout_s
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._max_entry_bytes = max_entry_bytes
        self._client = redis.Redis.from_url(
            url,
            password=_password(password_file),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A retry inside the client would multiply the limit; ours is the circuit.
            retry=Retry(NoBackoff(), 0),
            max_connections=MAX_CONNECTIONS,
            protocol=2,
        )
        # Waiting for one of our own connections must not look like a slow Redis.
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS - 1)
        self._timeouts = 0
        self._ok = False
        self._suspect = asyncio.Event()
        self._suspect.set()
        self.checked = asyncio.Event()
        """Set once the first probe has ended, whatever it found."""

    @property
    def ok(self) -> bool:
        """True while Redis is thought to answer; False costs every request nothing."""
        return self._ok

    async def get(self, key: bytes, timeout_s: float) -> bytes | None:
        """The stored bytes, None when there are none or Redis does not answer within `timeout_s`."""
        if not self._ok or timeout_s <= 0:
            return None
        asked = False
        limit = min(timeout_s, self._timeout_s)
        try:
            async with asyncio.timeout(limit):
                async with self._slots:
                    asked = True
                    # A range, so that a value of any size costs bounded memory here; a missing key reads as empty.
                    data = await self._client.getrange(PREFIX + key, 0, self._max_entry_bytes)
        except (RedisError, OSError, TimeoutError) as exc:
            # A caller in a hurry says nothing about Redis.
            if asked and not (isinstance(exc, _TIMEOUTS) and limit < min(self._timeout_s, FAIR_S)):
                self._failed("get", exc)
            return None
        self._timeouts = 0
        if not isinstance(data, bytes) or not 0 < len(data) <= self._max_entry_bytes:
            return None
        return data

    async def put(self, key: bytes, data: bytes) -> bool:
        """Store bytes for the cache's lifetime; False when they are too large or Redis did not take them."""
        if not self._ok or not 0 < len(data) <= self._max_entry_bytes:
            return False
        asked = False
        try:
            async with asyncio.timeout(PUT_TIMEOUT_S):
                async with self._slots:
                    asked = True
                    await self._client.set(PREFIX + key, data, px=self._ttl_ms)
        except (RedisError, OSError, TimeoutError) as exc:
            if asked:
                self._failed("put", exc)
            return False
        return True

    def _failed(self, operation: str, exc: BaseException) -> None:
        metrics.counter(names.REDIS_ERRORS).labels(operation).inc()
        if isinstance(exc, ResponseError):
            # It answered: a value of another type, no memory left. The next request may fare better.
            return
        if isinstance(exc, _TIMEOUTS):
            self._timeouts += 1
            if self._timeouts < TIMEOUTS_TO_OPEN:
                return
        if self._ok:
            log.warning("redis does not answer (%s); going on without it", type(exc).__name__)
        self._ok = False
        self._suspect.set()

    async def watch(self) -> None:
        """Background loop: probe Redis until it answers, then sleep until an operation fails. Runs until cancelled."""
        while True:
            await self._suspect.wait()
            if await self._probe():
                self._suspect.clear()
                self._timeouts = 0
                self._ok = True
                log.info("redis answers; the exact cache is on")
            self.checked.set()
            if not self._ok:
                await asyncio.sleep(PROBE_INTERVAL_S)

    async def _probe(self) -> bool:
        try:
            # The limit of a look-up holds here as well: a Redis that answers later than that is of no use.
            async with asyncio.timeout(self._timeout_s):
                await self._client.ping()
        except (RedisError, OSError, TimeoutError):
            # Connections of the pool may hang half-open: start anew.
            await self._client.connection_pool.disconnect(inuse_connections=True)
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        self._ok = False
        await self._client.aclose()


def _password(path: Path | None) -> str | None:
    if path is None:
        return None
    with path.open("rb") as file:
        data = file.read(MAX_PASSWORD_BYTES + 1)
    if len(data) > MAX_PASSWORD_BYTES:
        raise ValueError(f"{path} is larger than {MAX_PASSWORD_BYTES} bytes")
    return data.decode("utf-8").strip() or None
