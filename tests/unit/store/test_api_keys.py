"""API keys in a real Valkey: look-up, revocation, what a flood and an absence cost."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from flight_kit import Valkey, connected
from kvmesh.errors import Overloaded, Unauthenticated, Unavailable
from kvmesh.rpc import Credentials, hash_key, new_key
from kvmesh.rpc.keyfile import KeyInfo
from kvmesh.store import apikeys
from kvmesh.store.apikeys import RedisKeys, RedisRing
from kvmesh.store.client import RedisStore

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)
MOMENT_S = 1.0
"""After which a change has come through."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    made = Valkey()
    yield made
    made.close()


@pytest_asyncio.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with connected(valkey.url) as made:
        await made.run("flush", lambda client: client.flushall(), None)
        yield made


def info(key: str, tenant: str = "acme", name: str = "ci", **more: Any) -> KeyInfo:
    return KeyInfo(hash_key(key), tenant, name, created=NOW, **more)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Counted(RedisKeys):
    """Counts what it asks Redis."""

    asked = 0

    async def _ask(self, digest: bytes) -> Any:
        self.asked += 1
        return await super()._ask(digest)


async def test_a_key_is_its_tenants_until_it_ends(store: RedisStore) -> None:
    clock, ring, key = Clock(), RedisRing(store), new_key()
    keys = Counted(store, clock=clock)
    callers = Credentials(None, keys=keys)
    with pytest.raises(Unauthenticated):
        await callers.identify(f"Bearer {key}")
    await ring.add(info(key))
    clock.now += MOMENT_S
    found = await asyncio.gather(*(callers.identify(f"Bearer {key}") for _ in range(50)))
    assert {(each.tenant, each.key_name) for each in found} == {("acme", "ci")}
    assert keys.asked == 2, "all at once share one look-up, and a moment later it is still known"
    await ring.revoke(info(key))
    clock.now += MOMENT_S
    with pytest.raises(Unauthenticated):
        await callers.identify(f"Bearer {key}")
    # Nothing that would let anybody in is there.
    names = await store.run("keys", lambda client: client.keys("*"), [])
    values = [await store.run("get", lambda client, n=n: client.dump(n), b"") for n in names]
    assert len(names) == 3
    assert not any(key.encode() in blob for blob in (*names, *values))


async def test_keys_expire_and_are_listed(store: RedisStore) -> None:
    ring, keys, clock = RedisRing(store), [new_key() for _ in range(3)], Clock()
    await ring.add(info(keys[0], "acme", "for ever"))
    await ring.add(info(keys[1], "other", "for a day", expires=NOW + DAY))
    await ring.add(info(keys[2], "other", "gone", expires=NOW - DAY))
    found = {each.name: each for each in await ring.listed()}
    assert {name: each.live(NOW) for name, each in found.items()} == {
        "for ever": True,
        "for a day": True,
        "gone": False,
    }
    assert found["for a day"].expires is not None
    assert abs(found["for a day"].expires - NOW - DAY) < dt.timedelta(seconds=1)
    source = RedisKeys(store, clock=clock)
    assert [each and each.name for each in [await source.find(digest(key)) for key in keys]] == [
        "for ever",
        "for a day",
        None,
    ]
    # A grace only ever shortens.
    await ring.end(found["for ever"], NOW - DAY)
    await ring.end(found["for a day"], NOW + 2 * DAY)
    clock.now += MOMENT_S
    assert await source.find(digest(keys[0])) is None
    after = {each.name: each for each in await ring.listed()}
    assert after["for a day"].expires == found["for a day"].expires
    # What has ended goes by itself, and from the list with it.
    await store.run("del", lambda client: client.delete(apikeys.key_name(hash_key(keys[2]))), None)
    assert {each.name for each in await ring.listed()} == {"for ever", "for a day"}
    left = await store.run("ttl", lambda client: client.ttl(apikeys.key_name(hash_key(keys[1]))), 0)
    assert 30 * 86400 < left < 32 * 86400


@pytest.mark.parametrize("change", [
    {"tenant": "../acme"}, {"tenant": ""}, {"expires": "soon"}, {"revoked": ""}, {"expires": "1e300"},
    {"expires": "nan"}, {"name": b"\xff"},
])  # fmt: skip
async def test_a_record_that_cannot_be_read_opens_nothing(store: RedisStore, change: dict[str, Any]) -> None:
    key = new_key()
    await RedisRing(store).add(info(key))
    await store.run("hset", lambda c: c.hset(apikeys.key_name(hash_key(key)), mapping=change), None)
    assert await RedisKeys(store).find(digest(key)) is None
    for missing in ("expires", "revoked", "tenant"):
        other = new_key()
        await RedisRing(store).add(info(other))
        await store.run("hdel", lambda c, o=other, m=missing: c.hdel(apikeys.key_name(hash_key(o)), m), None)
        assert await RedisKeys(store).find(digest(other)) is None


async def test_guessing_is_bounded_and_does_not_lock_out_known_keys(store: RedisStore, monkeypatch) -> None:
    monkeypatch.setattr(apikeys, "UNKNOWN_PER_S", 5.0)
    monkeypatch.setattr(apikeys, "MAX_UNKNOWN", 3)
    clock, key = Clock(), new_key()
    keys = Counted(store, clock=clock)
    await RedisRing(store).add(info(key))
    assert await keys.find(digest(key)) is not None

    async def guess(times: int) -> list[Any]:
        return await asyncio.gather(*(keys.find(digest(new_key())) for _ in range(times)), return_exceptions=True)

    guessed = await guess(20)
    assert guessed.count(None) == 4
    refused = [each for each in guessed if isinstance(each, Overloaded)]
    assert len(refused) == 16
    assert all(each.retry_after for each in refused)
    assert (keys.asked, len(keys._unknown)) == (5, 3)
    # What a second allows goes to guesses again; the known key is looked up all the same.
    clock.now += MOMENT_S
    assert (await guess(20)).count(None) == 5
    assert await keys.find(digest(key)) is not None
    asked = keys.asked
    assert asked == 11
    # What has another form than our keys never gets here.
    callers = Credentials(None, keys=keys)
    for other in ("sk-" + "x" * 48, key + "x", key[:-1], key.upper()):
        with pytest.raises(Unauthenticated):
            await callers.identify(f"Bearer {other}")
    assert keys.asked == asked


async def test_while_redis_is_away_known_keys_go_on_for_a_while() -> None:
    valkey, clock, key = Valkey(), Clock(), new_key()
    try:
        async with connected(valkey.url) as store:
            keys = RedisKeys(store, clock=clock)
            await RedisRing(store).add(info(key))
            assert await keys.find(digest(key)) is not None
            valkey.kill()
            clock.now += apikeys.AWAY_S - 1
            assert await keys.find(digest(key)) is not None
            with pytest.raises(Unavailable):
                await keys.find(digest(new_key()))
            clock.now += 2
            with pytest.raises(Unavailable):
                await keys.find(digest(key))
            with pytest.raises(Unavailable):
                await RedisRing(store).listed()
    finally:
        valkey.close()


async def test_who_leaves_does_not_take_the_answer_along(store: RedisStore) -> None:
    key = new_key()
    await RedisRing(store).add(info(key))
    keys = RedisKeys(store)
    first = asyncio.create_task(keys.find(digest(key)))
    second = asyncio.create_task(keys.find(digest(key)))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is not None
    assert not keys._asking
