"""Flights in Redis: one leader at a time by token, frames that no old leader can add to, presence of followers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
import pytest_asyncio

from flight_kit import LIMIT_S, Valkey, begin, connected, fresh_ref
from kvmesh.proto.v1 import router_pb2
from kvmesh.store.client import RedisStore
from kvmesh.store.flights import FIRST, MAX_TAKEOVERS, FlightRef, FlightStore, Held, Renewed

LEASE_MS = 3000


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest_asyncio.fixture
async def redis(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with connected(valkey.url) as store:
        yield store


class Gateways:
    """Flight stores of three gateways under one clock."""

    def __init__(self, redis: RedisStore) -> None:
        self.redis = redis
        self.a, self.b, self.c = (FlightStore(redis, name, lease_ms=LEASE_MS) for name in "abc")
        self.at(1_000_000)

    def at(self, clock_ms: int) -> None:
        for store in (self.a, self.b, self.c):
            store.clock_ms = clock_ms
        self.now = clock_ms

    def later(self, ms: int) -> None:
        self.at(self.now + ms)


@pytest.fixture
def gateways(redis: RedisStore) -> Gateways:
    return Gateways(redis)


def frame(token: int, text: str = "x") -> bytes:
    opened = router_pb2.FlightOpened(model=text)
    return router_pb2.FlightFrame(token=token, opened=opened).SerializeToString()


async def texts(store: FlightStore, ref: FlightRef, place: str = FIRST) -> list[str]:
    read = await store.read({ref: place})
    assert read is not None
    assert not read[ref].broken
    return [given.opened.model for given in read[ref].frames]


async def lapse(gateways: Gateways, ref: FlightRef) -> None:
    """The leader says nothing for longer than its lease: the pointer, under Redis' own clock, is gone too."""
    gateways.later(LEASE_MS + 1)
    await gateways.redis.run("lapse", lambda client: client.delete(ref.keys.pointer), None)


async def test_frames_are_read_from_the_first_and_from_any_place_on(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    assert await gateways.a.append(ref, token, [frame(token)], begun=False) == "unknown", "before the first renewal"
    assert await gateways.a.renew(ref, token) == Renewed(True, 0)
    assert await gateways.a.append(ref, token, [frame(token, "1"), frame(token, "2")], begun=False) == "ok"
    first = await gateways.b.read({ref: FIRST})
    assert first is not None
    assert [given.opened.model for given in first[ref].frames] == ["1", "2"]
    assert await gateways.a.append(ref, token, [frame(token, "3")], begun=True) == "ok"
    other = fresh_ref()
    again = await gateways.b.read({ref: first[ref].last, other: FIRST})
    assert again is not None
    assert [given.opened.model for given in again[ref].frames] == ["3"]
    assert (again[other].frames, again[other].last) == ([], FIRST)
    assert await texts(gateways.c, ref) == ["1", "2", "3"]


async def test_one_follower_takes_over_and_the_old_leader_is_refused(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    assert await gateways.b.take_over(ref, token) == Held("led", token, "a"), "led before its first renewal, too"
    await gateways.a.renew(ref, token)
    await gateways.a.append(ref, token, [frame(token, "old")], begun=False)
    gateways.later(LEASE_MS - 1)
    assert await gateways.b.keep(ref) == Held("led", token, "a")
    assert await gateways.b.take_over(ref, token) == Held("led", token, "a")
    await lapse(gateways, ref)
    assert await gateways.b.keep(ref) == Held("free", token, "a")
    both = await asyncio.gather(gateways.b.take_over(ref, token), gateways.c.take_over(ref, token))
    taken = [held for held in both if held is not None and held.standing == "taken"]
    led = [held for held in both if held is not None and held.standing == "led"]
    assert len(taken) == len(led) == 1
    assert taken[0].token == token + 1
    assert led[0][1:] == taken[0][1:]
    # The leader that was only slow is heard no more, whatever it does.
    assert await gateways.a.append(ref, token, [frame(token, "stale")], begun=True) == "lost"
    assert await gateways.a.renew(ref, token) == Renewed(False, 0)
    assert await gateways.a.end(ref, token, "failed", [frame(token, "stale")]) is False
    new = gateways.b if taken[0].gateway == "b" else gateways.c
    assert await new.append(ref, token + 1, [frame(token + 1, "new")], begun=True) == "ok"
    assert await texts(gateways.a, ref) == ["old", "new"]


async def test_a_leader_that_was_slow_and_that_nobody_followed_goes_on(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    await gateways.a.renew(ref, token)
    await lapse(gateways, ref)
    assert await gateways.a.renew(ref, token) == Renewed(True, 0)
    assert await gateways.b.take_over(ref, token) == Held("led", token, "a")


async def test_followers_count_while_they_show_themselves(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    await gateways.a.renew(ref, token)
    await gateways.b.keep(ref)
    gateways.later(LEASE_MS - 1)
    await gateways.c.keep(ref)
    assert await gateways.a.renew(ref, token) == Renewed(True, 2)
    gateways.later(1)
    assert await gateways.a.renew(ref, token) == Renewed(True, 1), "b has been silent for the length of a lease"
    await gateways.c.leave(ref)
    assert await gateways.a.renew(ref, token) == Renewed(True, 0)


@pytest.mark.parametrize("how", ["finished", "failed"])
async def test_an_ended_flight_is_taken_by_nobody_and_its_frames_stay_a_while(
    gateways: Gateways, how: Literal["finished", "failed"]
) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    await gateways.a.renew(ref, token)
    assert await gateways.a.end(ref, token, how, [frame(token, "end")]) is True
    gateways.later(LEASE_MS + 1)
    assert await gateways.b.keep(ref) == Held("ended", token, "a")
    assert await gateways.b.take_over(ref, token) == Held("ended", token, "a")
    assert await texts(gateways.b, ref) == ["end"]
    pointer = await gateways.redis.run("get", lambda client: client.get(ref.keys.pointer), b"?")
    assert (pointer is None) == (how == "failed"), "a finished one's is the router's to take away"
    assert await gateways.a.append(ref, token, [frame(token)], begun=True) == "lost"


async def test_a_flight_handed_over_is_free_at_once_and_not_its_old_leaders(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    await gateways.a.renew(ref, token)
    await gateways.b.keep(ref)
    assert await gateways.a.end(ref, token, "free", [frame(token, "over")]) is True
    assert await gateways.a.append(ref, token, [frame(token, "late")], begun=True) == "lost"
    assert await gateways.a.renew(ref, token) == Renewed(False, 0)
    assert await gateways.b.take_over(ref, token) == Held("taken", token + 1, "b")
    assert await gateways.b.renew(ref, token + 1) == Renewed(True, 0), "a leader is no follower of itself"


async def test_takeovers_of_one_flight_are_bounded(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    await gateways.a.renew(ref, token)
    for number in range(MAX_TAKEOVERS):
        await lapse(gateways, ref)
        assert await gateways.b.take_over(ref, token) == Held("taken", token + 1 + number, "b")
    await lapse(gateways, ref)
    held = await gateways.c.take_over(ref, token)
    assert held is not None
    assert held.standing == "spent"


async def test_a_redis_that_has_forgotten_everything(gateways: Gateways, valkey: Valkey) -> None:
    ref = fresh_ref()
    for _ in range(5):
        token = await begin(gateways.redis, ref, "a")
    await gateways.a.renew(ref, token)
    await gateways.a.append(ref, token, [frame(token, "lost")], begun=False)
    await gateways.redis.run("flush", lambda client: client.flushall(), None)
    assert await gateways.a.append(ref, token, [frame(token)], begun=True) == "unknown"
    assert await gateways.a.renew(ref, token) == Renewed(True, 0)
    assert await gateways.a.append(ref, token, [frame(token)], begun=True) == "gap", "followers would miss the first"
    assert await gateways.a.append(ref, token, [frame(token, "all")], begun=False) == "ok"
    await lapse(gateways, ref)
    # The counter is lost as well: tokens rise all the same.
    assert await gateways.b.take_over(ref, token) == Held("taken", token + 1, "b")


async def test_a_new_flight_of_the_same_question_is_not_disturbed(gateways: Gateways) -> None:
    old = fresh_ref()
    token = await begin(gateways.redis, old, "a")
    await gateways.a.renew(old, token)
    await lapse(gateways, old)
    new = FlightRef("newer", old.keys)
    newer = await begin(gateways.redis, new, "c")
    held = await gateways.b.take_over(old, token)
    assert held == Held("taken", newer + 1, "b"), "its followers wait for the old one's text"
    await gateways.b.renew(old, newer + 1)
    pointer = await gateways.redis.run("get", lambda client: client.get(old.keys.pointer), b"")
    assert pointer == f"{newer} newer c".encode()
    assert await gateways.c.renew(new, newer) == Renewed(True, 0)


async def test_the_inbox_tells_who_joins(gateways: Gateways) -> None:
    ref, place = fresh_ref(), "0-0"
    reader = asyncio.create_task(gateways.a.inbox(place, LIMIT_S / 2))
    await gateways.b.join(ref, "a")
    async with asyncio.timeout(LIMIT_S):
        ids, place = await reader
    assert ids == [ref]
    assert await gateways.a.inbox(place, 0.01) == ([], place)


async def test_a_lead_that_was_never_heard_of_is_given_up(gateways: Gateways) -> None:
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    await gateways.b.disown(ref)
    assert await gateways.b.keep(ref) == Held("led", token, "a"), "it is not b's to give up"
    await gateways.a.disown(ref)
    assert await gateways.b.take_over(ref, token) == Held("taken", token + 1, "b")
    led = fresh_ref()
    token = await begin(gateways.redis, led, "a")
    await gateways.a.renew(led, token)
    await gateways.a.disown(led)
    assert await gateways.b.take_over(led, token) == Held("led", token, "a"), "one that is led stays"


async def test_what_is_no_frame_breaks_the_flight_and_nothing_else(gateways: Gateways) -> None:
    for junk in (b"\xff\xff\xff", None):
        ref, whole = fresh_ref(), fresh_ref()
        token = await begin(gateways.redis, whole, "a")
        await gateways.a.renew(whole, token)
        await gateways.a.append(whole, token, [frame(token, "fine")], begun=False)
        fields = {b"f": junk} if junk else {b"other": b"x"}
        await gateways.redis.run("junk", lambda client, r=ref, f=fields: client.xadd(r.frames, f), None)
        read = await gateways.b.read({ref: FIRST, whole: FIRST})
        assert read is not None
        assert (read[ref].broken, read[whole].broken) == (True, False)
        assert len(read[whole].frames) == 1
    ref = fresh_ref()
    await gateways.redis.run("junk", lambda client: client.set(ref.frames, "no stream"), None)
    read = await gateways.b.read({ref: FIRST})
    assert read is not None
    assert read[ref].broken


def test_a_flight_from_the_wire_is_checked() -> None:
    ref = fresh_ref()
    good = router_pb2.Flight(flight_id="f", key=ref.keys.key)
    assert FlightRef.of(good) == FlightRef("f", ref.keys)
    for flight_id, key in [("", ref.keys.key), ("a b", ref.keys.key), ("x" * 200, ref.keys.key), ("f", "kvmesh:x")]:
        assert FlightRef.of(router_pb2.Flight(flight_id=flight_id, key=key)) is None


async def test_without_redis_there_are_no_answers_and_no_errors() -> None:
    server = Valkey()
    async with connected(server.url, timeout_s=0.5) as redis:
        store, ref = FlightStore(redis, "a"), fresh_ref()
        server.kill()
        assert await store.renew(ref, 1) is None
        assert await store.append(ref, 1, [b""], begun=False) is None
        assert await store.keep(ref) is None
        assert await store.take_over(ref, 1) is None
        assert await store.read({ref: FIRST}) is None
        assert await store.end(ref, 1, "failed") is None
        assert await store.inbox("0-0", 0.01) == ([], "0-0")
        await store.join(ref, "b")
        await store.leave(ref)
        await store.disown(ref)
        assert not store.ok


async def test_a_task_that_is_cancelled_while_it_asks_ends(gateways: Gateways) -> None:
    # In each of its steps: the client loses a cancellation that meets the end of its sending.
    ref = fresh_ref()
    token = await begin(gateways.redis, ref, "a")
    for steps in range(1, 200):
        task = asyncio.create_task(gateways.a.renew(ref, token))
        for _ in range(steps % 12):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
