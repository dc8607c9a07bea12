"""API keys in Redis: what a gateway looks up, and what `kvmesh keys` writes. Only digests are there, never a key.

    kvmesh:{k:<sha256>}       hash  tenant, name, created, expires, revoked; times in seconds, 0 = never. It goes by
                                    itself some time after the key has ended
    kvmesh:{kt:<tenant tag>}  set   digests of the tenant's keys
    kvmesh:keys:tenants       set   tenants that have any

The sets are written first: a key that works is also listed.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvmesh.errors import Overloaded, Unavailable
from kvmesh.rpc.auth import TENANT_PATTERN
from kvmesh.rpc.credentials import Identity
from kvmesh.rpc.keyfile import KeyInfo
from kvmesh.store.client import RedisStore

log = logging.getLogger(__name__)
T = TypeVar("T")

TENANTS = "kvmesh:keys:tenants"
FIELDS = ("tenant", "name", "created", "expires", "revoked")
REMEMBERED_S = 30 * 86400.0
"""A key that has ended stays listed for this long."""

FRESH_S = 0.8
"""What was looked up is not looked up again for this long: a revoked key ends within about a second."""

AWAY_S = 300.0
"""A key that was good goes on for this long while Redis does not answer."""

MAX_KNOWN = 16_384
MAX_UNKNOWN = 1_024
UNKNOWN_PER_S = 200.0
"""Look-ups of keys that were never good here, in all; who guesses must not keep Redis from its work."""

_AWAY: Any = object()


def key_name(digest: str) -> str:
    """Where a key's record is; `digest` in hex."""
    return f"kvmesh:{{k:{digest}}}"


def tenant_name(tenant: str) -> str:
    """Where the digests of a tenant's keys are."""
    return f"kvmesh:{{kt:{hashlib.sha256(tenant.encode()).hexdigest()[:32]}}}"


@dataclass(slots=True)
class _Seen:
    info: KeyInfo | None
    at: float


class RedisKeys:
    """A `KeySource` that remembers what it was told for a moment."""

    def __init__(self, store: RedisStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[bytes, _Seen] = OrderedDict()
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[KeyInfo | None]] = {}
        self._allowance = UNKNOWN_PER_S
        self._counted_at = clock()

    async def find(self, digest: bytes) -> Identity | None:
        """See KeySource."""
        now = self._clock()
        seen = self._known.get(digest)
        if seen is not None and now - seen.at < FRESH_S:
            return _valid(seen.info)
        if now - self._unknown.get(digest, -FRESH_S) < FRESH_S:
            return None
        asking = self._asking.get(digest)
        if asking is None:
            if seen is None and not self._may_ask(now):
                raise Overloaded("too many unknown API keys are being tried", retry_after=1.0)
            asking = asyncio.create_task(self._ask(digest), name="api-key")
            self._asking[digest] = asking
            asking.add_done_callback(lambda _: self._asking.pop(digest, None))
        # All who bring the same key wait for one answer, and none of them takes it along when it leaves.
        info: KeyInfo | None = await asyncio.shield(asking)
        return _valid(info)

    def _may_ask(self, now: float) -> bool:
        self._allowance = min(UNKNOWN_PER_S, self._allowance + (now - self._counted_at) * UNKNOWN_PER_S)
        self._counted_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    async def _ask(self, digest: bytes) -> KeyInfo | None:
        hexed = digest.hex()
        values = await self._store.run("api_key", lambda client: client.hmget(key_name(hexed), FIELDS), _AWAY)
        now = self._clock()
        if values is _AWAY:
            seen = self._known.get(digest)
            if seen is not None and now - seen.at < AWAY_S:
                return seen.info
            raise Unavailable("API keys cannot be looked up now")
        info = _info(hexed, values)
        if info is None or not info.live(dt.datetime.now(dt.UTC)):
            self._known.pop(digest, None)
            _put(self._unknown, digest, now, MAX_UNKNOWN)
            return None
        self._unknown.pop(digest, None)
        _put(self._known, digest, _Seen(info, now), MAX_KNOWN)
        return info


def _put(memory: OrderedDict[bytes, T], digest: bytes, value: T, limit: int) -> None:
    memory[digest] = value
    memory.move_to_end(digest)
    if len(memory) > limit:
        memory.popitem(last=False)


def _valid(info: KeyInfo | None) -> Identity | None:
    if info is None or not info.live(dt.datetime.now(dt.UTC)):
        return None
    return Identity(info.tenant, info.name)


class RedisRing:
    """The keys in Redis as `kvmesh keys` edits them. Everything raises Unavailable when Redis does not answer."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def listed(self) -> list[KeyInfo]:
        """All keys, also those that ended of late."""
        found: list[KeyInfo] = []
        for tenant in sorted(await self._run("smembers", TENANTS)):
            name = tenant_name(tenant.decode())
            for member in await self._run("smembers", name):
                digest = member.decode()
                values = await self._run("hmget", key_name(digest), FIELDS)
                info = _info(digest, values)
                if info is not None:
                    found.append(info)
                elif not any(values):
                    # Gone by itself.
                    await self._run("srem", name, member)
        return found

    async def add(self, info: KeyInfo) -> None:
        """A new key."""
        await self._run("sadd", TENANTS, info.tenant)
        await self._run("sadd", tenant_name(info.tenant), info.digest)
        times = {"created": info.created, "expires": info.expires, "revoked": info.revoked}
        record = {"tenant": info.tenant, "name": info.name, **{name: _seconds(at) for name, at in times.items()}}
        await self._run("hset", key_name(info.digest), mapping=record)
        if info.expires is not None:
            await self._forget_after(info, info.expires)

    async def end(self, info: KeyInfo, at: dt.datetime) -> None:
        """The key expires at `at`, or when it did before if that is sooner."""
        at = min(at, info.expires or at)
        await self._run("hset", key_name(info.digest), "expires", _seconds(at))
        await self._forget_after(info, at)

    async def revoke(self, info: KeyInfo) -> None:
        """The key ends now."""
        now = dt.datetime.now(dt.UTC)
        await self._run("hset", key_name(info.digest), "revoked", _seconds(now))
        await self._forget_after(info, now)

    async def _forget_after(self, info: KeyInfo, at: dt.datetime) -> None:
        when = int(at.timestamp() + REMEMBERED_S)
        await self._run("expireat", key_name(info.digest), when)

    async def _run(self, command: str, *args: Any, **more: Any) -> Any:
        result = await self._store.run(
            "api_keys", lambda client: getattr(client, command)(*args, **more), _AWAY, write=True
        )
        if result is _AWAY:
            raise Unavailable("Redis does not answer")
        return result


def _seconds(at: dt.datetime | None) -> str:
    return "0" if at is None else f"{at.timestamp():.3f}"


def _info(digest: str, values: Sequence[bytes | None]) -> KeyInfo | None:
    """None for no record, and for one that is broken: a key that cannot be read is no key."""
    if not any(values):
        return None
    try:
        tenant, name, created, expires, revoked = ((value or b"").decode("utf-8") for value in values)
        if not TENANT_PATTERN.fullmatch(tenant):
            raise ValueError("tenant")
        return KeyInfo(digest, tenant, name[:128], _moment(created), _moment(expires), _moment(revoked))
    except (ValueError, OverflowError, OSError):
        log.warning("API key %s…: its record in Redis is broken", digest[:12])
        return None


def _moment(seconds: str) -> dt.datetime | None:
    """A field that is missing is broken, which is not the same as never."""
    number = float(seconds)
    return dt.datetime.fromtimestamp(number, dt.UTC) if number else None
