"""Keys as a tool edits them, wherever they are kept: made, replaced with a grace, ended. Only digests are stored."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from typing import Protocol

from kvmesh.errors import AlreadyExists, InvalidArgument, NotFound
from kvmesh.rpc.auth import TENANT_PATTERN
from kvmesh.rpc.keyfile import KeyInfo, hash_key, new_key

ID_CHARS = 12
"""Of a digest, as lists show it."""

MIN_ID_CHARS = 8
MAX_LIFE = dt.timedelta(days=36500)
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,128}")
_SPAN = re.compile(r"(\d{1,9})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class KeyRing(Protocol):
    """A place of keys. Its methods raise KvmeshError when it cannot be read or written."""

    async def listed(self) -> list[KeyInfo]:
        """All keys, also ended ones that are still remembered."""

    async def add(self, info: KeyInfo) -> None:
        """A new key."""

    async def end(self, info: KeyInfo, at: dt.datetime) -> None:
        """The key expires at `at`, or when it did before if that is sooner."""

    async def revoke(self, info: KeyInfo) -> None:
        """The key ends now."""


def span(text: str) -> dt.timedelta:
    """A length of time: "90d", "12h", "30m", "45s", "2w", "0". InvalidArgument for anything else."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        if text.strip() == "0":
            return dt.timedelta()
        raise InvalidArgument(f"{text!r} is no length of time: a number and one of s, m, h, d, w, as in 90d")
    life = dt.timedelta(**{_UNITS[found[2]]: int(found[1])}) if int(found[1]) < 10**8 else MAX_LIFE
    return min(life, MAX_LIFE)


async def create(
    ring: KeyRing, tenant: str, name: str = "", life: dt.timedelta | None = None, *, now: dt.datetime | None = None
) -> tuple[str, KeyInfo]:
    """A new key and its record. AlreadyExists when the tenant has a key of this name that works."""
    now = now or dt.datetime.now(dt.UTC)
    if not TENANT_PATTERN.fullmatch(tenant):
        raise InvalidArgument("a tenant is named by 1 to 128 letters, digits, dots, dashes and underscores")
    if name and not _NAME.fullmatch(name):
        raise InvalidArgument("a key's name has at most 128 characters, all on one line")
    if life is not None and life <= dt.timedelta():
        raise InvalidArgument("a key that expires at once is of no use")
    if name and any(each.name == name and each.tenant == tenant and each.live(now) for each in await ring.listed()):
        raise AlreadyExists(f"tenant {tenant} has a key {name!r} that works: rotate it, or take another name")
    return await _add(ring, tenant, name, life, now)


async def rotate(
    ring: KeyRing,
    which: str,
    tenant: str = "",
    *,
    life: dt.timedelta | None = None,
    now: dt.datetime | None = None,
) -> tuple[str, KeyInfo, list[KeyInfo]]:
    """A new key of the same name, its record, and the old ones, which are `end_all`'s to end.

    life: of the new key; None = as long as the old one's was. NotFound, InvalidArgument as `find` says.
    """
    now = now or dt.datetime.now(dt.UTC)
    old = find(await ring.listed(), which, tenant, now)
    newest = max(old, key=lambda each: each.created or dt.datetime.min.replace(tzinfo=dt.UTC))
    if life is None and newest.expires is not None and newest.created is not None:
        life = newest.expires - newest.created
    key, info = await _add(ring, newest.tenant, newest.name, life, now)
    return key, info, old


async def end_all(ring: KeyRing, old: list[KeyInfo], grace: dt.timedelta, *, now: dt.datetime | None = None) -> None:
    """They work for `grace` more."""
    at = (now or dt.datetime.now(dt.UTC)) + grace
    for each in old:
        await ring.end(each, at)


async def revoke(ring: KeyRing, which: str, tenant: str = "") -> list[KeyInfo]:
    """End keys now; which they were. NotFound, InvalidArgument as `find` says."""
    found = find(await ring.listed(), which, tenant, dt.datetime.now(dt.UTC))
    for each in found:
        await ring.revoke(each)
    return found


def find(keys: list[KeyInfo], which: str, tenant: str, now: dt.datetime) -> list[KeyInfo]:
    """The keys that work, of this name or of an id that begins so; of one tenant.

    NotFound for none, InvalidArgument where the words fit keys of several tenants or ids.
    """
    live = [each for each in keys if each.live(now) and tenant in ("", each.tenant)]
    found = [each for each in live if each.name == which]
    if not found and len(which) >= MIN_ID_CHARS:
        found = [each for each in live if each.digest.startswith(which.lower())]
        if len(found) > 1:
            raise InvalidArgument(f"{which!r} fits several keys: give more of the id")
    if not which or not found:
        raise NotFound(f"no key that works has the name {which!r} or an id that begins so")
    if len({each.tenant for each in found}) > 1:
        raise InvalidArgument(f"several tenants have a key {which!r}: name one with --tenant, or give the key's id")
    return found


async def _add(
    ring: KeyRing, tenant: str, name: str, life: dt.timedelta | None, now: dt.datetime
) -> tuple[str, KeyInfo]:
    key = new_key()
    now = now.replace(microsecond=0)
    info = KeyInfo(hash_key(key), tenant, name, created=now, expires=None if life is None else now + life)
    if not info.name:
        info = replace(info, name=f"key-{info.digest[:MIN_ID_CHARS]}")
    await ring.add(info)
    return key, info
