"""Flights over several gateways: one generation, whole texts, and nobody's end is anybody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from flight_world import LEASE_MS, PACE, Engine, Side, Valkey, lapse, until, valkey_server, whole
from gateway_fakes import WAIT_S
from kvmesh.errors import InvalidArgument, KvmeshError, Unavailable, WorkerLost
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.store.flights import MAX_TAKEOVERS, FlightRef
from services.gateway.flights import FlightLog, Role
from services.gateway.flights.mirror import Mirror
from services.gateway.flights.publisher import Publisher
from services.gateway.inbox import SlowReader


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    yield from valkey_server()


@pytest_asyncio.fixture
async def sides(valkey: Valkey) -> AsyncIterator[list[Side]]:
    made = [await Side(f"gw-{name}-{id(object())}", valkey).start() for name in "abc"]
    yield made
    for side in made:
        await side.kill()


async def seen(flight: Any, tokens: int) -> None:
    await until(lambda: flight.log.tokens >= tokens)


async def test_fifty_requests_over_three_gateways_are_one_generation(sides: list[Side]) -> None:
    engine = Engine(length=40, choices=2)
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    engine.allow(5)
    await seen(flight, 10)
    members = [leader]
    for number in range(49):
        _, member = await sides[number % 3].follow(given, engine)
        members.append(member)
    engine.allow(23)
    await seen(sides[1].flights.get(given.flight_id), 46)
    # A late one sees everything from the first token on.
    _, late = await sides[1].follow(given, engine)
    engine.allow()
    texts = await asyncio.gather(*(whole(member) for member in [*members, late][:-1]))
    assert set(texts) == {engine.text(0)}
    assert await whole(late, choice=1) == engine.text(1)
    assert len(engine.begun) == 1
    for side in sides:
        log = side.flights.get(given.flight_id)
        if log is not None:
            assert log.log.finished.usage.completion_tokens == 80


async def test_the_leaders_client_leaves_and_the_last_one_ends_it(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    _, near = await sides[0].follow(given, engine)
    far_flight, far = await sides[1].follow(given, engine)
    engine.allow(3)
    await seen(far_flight, 3)
    flight.leave(leader)
    flight.leave(near)
    engine.allow(9)
    await seen(far_flight, 9)
    assert engine.cancelled == []
    far_flight.leave(far)
    # Its presence lapses, or it has said goodbye.
    await until(lambda: engine.cancelled == [sides[0].name])
    await until(lambda: not len(sides[0].flights) and not len(sides[1].flights))
    assert len(engine.begun) == 1


async def test_a_followers_presence_lapses_when_its_gateway_dies(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    far, _ = await sides[1].follow(given, engine)
    engine.allow(3)
    await seen(far, 3)
    flight.leave(leader)
    await sides[1].kill()
    assert engine.cancelled == []
    sides[0].store.clock_ms += LEASE_MS + 1
    await until(lambda: engine.cancelled == [sides[0].name])


async def test_the_last_reader_here_ends_it_at_once_when_nobody_follows_elsewhere(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    engine.allow(3)
    await seen(flight, 3)
    flight.leave(leader)
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.cancelled == [sides[0].name]
    # Who was just told to follow it begins by itself, at once, instead of waiting for a lease.
    _, member = await sides[1].follow(given, engine)
    engine.allow()
    assert await whole(member) == engine.text()
    assert [gateway for gateway, _ in engine.begun] == [sides[0].name, sides[1].name]


async def test_a_dead_gateway_is_followed_by_exactly_one(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    await sides[0].lead(given, engine)
    followers = [await sides[1 + number % 2].follow(given, engine) for number in range(8)]
    engine.allow(11)
    for flight, _ in followers:
        await seen(flight, 11)
    await sides[0].kill()
    await lapse(sides, given)
    await until(lambda: len(engine.begun) == 2)
    engine.allow()
    assert {await whole(member) for _, member in followers} == {engine.text()}
    assert len(engine.begun) == 2
    gateway, positions = engine.begun[1]
    assert gateway != sides[0].name
    assert positions == {0: 11}, "it goes on from what was told"
    assert engine.flights[1] is not None
    assert engine.flights[1].token > given.token


async def test_two_gateways_die_one_after_the_other(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    await sides[0].lead(given, engine)
    one, _ = await sides[1].follow(given, engine)
    engine.allow(5)
    await seen(one, 5)
    await sides[0].kill()
    await lapse(sides, given)
    await until(lambda: one.role is Role.LEAD)
    # Late: it reads the frames of both leaders.
    engine.allow(12)
    two, member = await sides[2].follow(given, engine)
    await seen(two, 12)
    await sides[1].kill()
    await lapse(sides, given)
    await until(lambda: two.role is Role.LEAD)
    engine.allow()
    assert await whole(member) == engine.text()
    assert [positions for _, positions in engine.begun] == [{0: 0}, {0: 5}, {0: 12}]


async def test_a_gateway_that_lost_its_lease_serves_its_own_and_is_not_heard(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    other, follower = await sides[1].follow(given, engine)
    engine.allow(4)
    await seen(other, 4)
    # Its Redis stands still for it, for longer than a lease: the other takes over.
    sides[0].redis._ok = False
    await lapse(sides, given)
    await until(lambda: other.role is Role.LEAD)
    engine.allow(8)
    await seen(flight, 8)
    sides[0].redis._ok = True
    await until(lambda: flight.role is Role.ALONE)
    engine.allow()
    third, _ = await sides[2].follow(given, engine)
    assert await whole(leader) == await whole(follower) == engine.text()
    await until(lambda: third.log.ended)
    assert len(engine.begun) == 2
    stream = await sides[2].store.read({third.ref: "0-0"})
    assert stream is not None
    tokens = [frame.token for frame in stream[third.ref].frames]
    assert tokens == sorted(tokens), "nothing of the old one after the takeover"


async def test_without_redis_everybody_goes_on_from_what_they_have() -> None:
    server = Valkey()
    sides = [await Side(name, server).start() for name in ("a", "b", "c")]
    try:
        engine = Engine(length=30)
        given = await sides[0].new_flight()
        _, leader = await sides[0].lead(given, engine)
        followers = [await sides[1 + number % 2].follow(given, engine) for number in range(4)]
        engine.allow(7)
        for flight, _ in followers:
            await seen(flight, 7)
        server.kill()
        await until(lambda: all(flight.role is Role.ALONE for flight, _ in followers))
        engine.allow()
        members = [leader, *(member for _, member in followers)]
        assert {await whole(member) for member in members} == {engine.text()}
        # One a gateway, from where it stood.
        assert sorted(engine.begun) == [("a", {0: 0}), ("b", {0: 7}), ("c", {0: 7})]
        assert engine.flights[1:] == [None, None]
        assert await sides[1].flights.follow(await_flight("x"), 1) is None
    finally:
        for side in sides:
            await side.kill()


def await_flight(gateway: str) -> router_pb2.Flight:
    key = f"kvmesh:{{{'a' * 32}}}:{'b' * 64}"
    return router_pb2.Flight(flight_id="another", gateway_id=gateway, token=1, key=key)


async def test_an_error_that_may_pass_makes_one_follower_go_on(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    _, leader = await sides[0].lead(given, engine)
    flight, near = await sides[0].follow(given, engine)
    _, far = await sides[1].follow(given, engine)
    engine.allow(6)
    await seen(flight, 6)
    engine.fail(WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await whole(leader)
    engine.allow()
    assert await whole(near) == await whole(far) == engine.text()
    assert engine.begun == [(sides[0].name, {0: 0}), (sides[0].name, {0: 6})]


async def test_an_error_that_may_pass_is_handed_over_when_only_others_follow(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    _, leader = await sides[0].lead(given, engine)
    flight, far = await sides[1].follow(given, engine)
    other, also = await sides[2].follow(given, engine)
    engine.allow(6)
    await seen(flight, 6)
    await seen(other, 6)
    began = asyncio.get_running_loop().time()
    engine.fail(WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await whole(leader)
    await until(lambda: len(engine.begun) == 2)
    assert asyncio.get_running_loop().time() - began < WAIT_S
    engine.allow()
    assert await whole(far) == await whole(also) == engine.text()
    assert len(engine.begun) == 2
    assert engine.begun[1][1] == {0: 6}


async def test_an_error_of_the_request_itself_is_everybodys(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    _, leader = await sides[0].lead(given, engine)
    flight, far = await sides[1].follow(given, engine)
    engine.allow(2)
    await seen(flight, 2)
    engine.fail(InvalidArgument("no"))
    for member in (leader, far):
        with pytest.raises(InvalidArgument):
            await whole(member)
    assert len(engine.begun) == 1


async def test_a_request_that_fails_everywhere_is_not_handed_around_for_ever(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    await sides[0].lead(given, engine)
    members = []
    for side in sides:
        members += [(await side.follow(given, engine))[1] for _ in range(5)]

    async def failing() -> None:
        while True:
            engine.fail(WorkerLost("gone"))
            await asyncio.sleep(0.01)

    task = asyncio.create_task(failing())
    try:
        for member in members:
            with pytest.raises(KvmeshError):
                await whole(member)
    finally:
        task.cancel()
    assert len(engine.begun) <= 12


async def test_a_stopping_gateway_hands_over_what_only_others_read(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    _, far = await sides[1].follow(given, engine)
    engine.allow(4)
    await seen(sides[1].flights.get(given.flight_id), 4)
    sides[0].flights.drain()
    engine.allow(6)
    await seen(flight, 6)
    assert engine.cancelled == [], "its own reader is served within the grace"
    flight.leave(leader)
    await sides[0].flights.close(WAIT_S)
    await sides[0].kill()
    await until(lambda: len(engine.begun) == 2)
    engine.allow()
    assert await whole(far) == engine.text()
    assert engine.begun[1] == (sides[1].name, {0: 6}), "told to the last token before it was handed over"


async def test_gateways_that_stop_one_after_the_other_hand_over_as_often_as_it_takes(valkey: Valkey) -> None:
    async with contextlib.AsyncExitStack() as stack:
        rolled = [await Side(f"rolled-{number}", valkey).start() for number in range(MAX_TAKEOVERS + 3)]
        for each in rolled:
            stack.push_async_callback(each.kill)
        engine = Engine(length=60)
        given = await rolled[0].new_flight()
        parts = {rolled[0]: await rolled[0].lead(given, engine)}
        parts |= {side: await side.follow(given, engine) for side in rolled[1:]}
        for begun in range(1, len(rolled)):
            engine.allow(3 * begun)
            for flight, _ in parts.values():
                await seen(flight, 3 * begun)
            (leading,) = [side for side, (flight, _) in parts.items() if flight.role is Role.LEAD]
            flight, member = parts.pop(leading)
            leading.flights.drain()
            flight.leave(member)
            await leading.flights.close(WAIT_S)
            await until(lambda: any(flight.role is not Role.FOLLOW for flight, _ in parts.values()))
        engine.allow()
        ((_, member),) = parts.values()
        assert await whole(member) == engine.text()
        assert len(engine.begun) == len(rolled)


async def test_one_who_comes_after_the_end_is_told_all(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    engine.allow()
    assert await whole(leader) == engine.text()
    _, near = await sides[0].follow(given, engine)
    _, far = await sides[1].follow(given, engine)
    assert await whole(near) == await whole(far) == engine.text()
    # And from the stream, when the leader is gone.
    flight.leave(leader)
    flight.leave(near)
    await sides[0].flights.close(WAIT_S)
    assert not len(sides[0].flights)
    _, later = await sides[2].follow(given, engine)
    assert await whole(later) == engine.text()
    assert len(engine.begun) == 1


async def test_the_router_tells_a_follower_before_the_leader(sides: list[Side]) -> None:
    engine = Engine()
    given = await sides[0].new_flight()
    near = asyncio.create_task(sides[0].follow(given, engine))
    _, far = await sides[1].follow(given, engine)
    await asyncio.sleep(0)
    await sides[0].lead(given, engine)
    engine.allow()
    assert await whole((await near)[1]) == await whole(far) == engine.text()
    assert len(engine.begun) == 1


@pytest.mark.parametrize("near", [True, False])
async def test_a_flight_that_nobody_leads_after_all(sides: list[Side], near: bool) -> None:
    engine = Engine()
    engine.allow()
    # The router made this gateway the leader, and its answer came too late.
    given = await sides[0].new_flight()
    if near:
        assert await sides[0].flights.follow(given, 1) is None
    flight, member = await sides[1].follow(given, engine)
    assert await whole(member) == engine.text()
    assert [gateway for gateway, _ in engine.begun] == [sides[1].name]
    assert engine.flights[0] is not None
    assert engine.flights[0].token > given.token
    assert flight.log.finished is not None


async def test_frames_that_were_lost_are_told_anew(sides: list[Side]) -> None:
    engine = Engine(length=30)
    given = await sides[0].new_flight()
    await sides[0].lead(given, engine)
    flight, member = await sides[1].follow(given, engine)
    engine.allow(8)
    await seen(flight, 8)
    # Evicted. What is read next begins from the first token again, in other pieces.
    await sides[2].redis.run("evict", lambda client: client.delete(flight.ref.frames), None)
    engine.allow(15)
    await seen(flight, 15)
    engine.allow()
    assert await whole(member) == engine.text()
    assert len(engine.begun) == 1


async def test_a_redis_that_forgot_the_flight_is_told_its_end_all_the_same(sides: list[Side]) -> None:
    given = await sides[0].new_flight()
    ref = FlightRef.of(given)
    assert ref is not None
    log = FlightLog(1)
    publisher = Publisher(sides[0].store, ref, given.token, log, begun=False)
    assert (await sides[0].store.renew(ref, given.token)) is not None
    publisher.reader.attach()
    log.append(pb.Delta(text="a", token_ids=[1]))
    assert await publisher.publish() == "ok"
    await sides[1].redis.run("forget", lambda client: client.delete(ref.state, ref.frames), None)
    log.append(pb.Delta(text="b", token_ids=[2], finish_reason=pb.FINISH_REASON_STOP))
    assert await publisher.finish(pb.Finished())
    copy = Mirror(FlightLog(1))
    read = await sides[1].store.read({ref: copy.place})
    assert read is not None
    copy.read(copy.place, read[ref], 0.0)
    assert copy._log.finished is not None
    assert copy._log.token_ids(0) == [1, 2]


async def test_a_redis_that_numbers_anew_is_read_anew(valkey: Valkey) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sides = [await Side(f"renumbered-{name}", valkey, replace(PACE, silence_s=0.2)).start() for name in "abc"]
        for each in sides:
            stack.push_async_callback(each.kill)
        engine = Engine(length=30)
        given = await sides[0].new_flight()
        await sides[0].lead(given, engine)
        one, _ = await sides[1].follow(given, engine)
        engine.allow(4)
        await seen(one, 4)
        await sides[0].kill()
        await lapse(sides, given)
        await until(lambda: one.role is Role.LEAD)
        # This one has read the frames of both leaders.
        flight, member = await sides[2].follow(given, engine)
        engine.allow(8)
        await seen(flight, 8)
        flight._mirror.place = "99999999999999-0"
        engine.allow()
        assert await whole(member) == engine.text()
        assert len(engine.begun) == 2


async def test_a_slow_reader_is_cut_alone(sides: list[Side]) -> None:
    engine = Engine(length=50)
    given = await sides[0].new_flight()
    cut: list[KvmeshError] = []
    flight, leader = await sides[0].lead(given, engine, max_tokens=16, on_slow=cut.append)
    _, near = await sides[0].follow(given, engine)
    engine.allow(10)
    await seen(flight, 10)
    # A late one is far behind, and not slow.
    _, late = await sides[0].follow(given, engine, max_tokens=16)
    # What came first, in one go, does not count.
    for allowed in (20, 30):
        assert not cut
        engine.allow(allowed)
        await seen(flight, allowed)
    assert [type(error) for error in cut] == [SlowReader]
    assert len(await late.reader.get()) == 1
    with pytest.raises(SlowReader):
        await whole(leader)
    flight.leave(leader)
    reading = asyncio.create_task(whole(near))
    for allowed in range(35, 51, 5):
        engine.allow(allowed)
        await late.reader.get()
    assert await reading == engine.text()


async def test_who_joins_a_long_answer_late_is_not_slow(sides: list[Side]) -> None:
    engine = Engine(length=700, choices=3)
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine, max_tokens=2000)
    # In one go here, and in one go there: more than a reader may leave lying.
    engine.allow(690)
    await seen(flight, 3 * 690)
    _, far = await sides[1].follow(given, engine, max_tokens=2000)
    reading = [asyncio.create_task(whole(member, choice=2)) for member in (leader, far)]
    await seen(sides[1].flights.get(given.flight_id), 3 * 690)
    engine.allow()
    assert {await each for each in reading} == {engine.text(2)}
    assert len(engine.begun) == 1


async def test_flights_cost_redis_nothing_while_nobody_follows(sides: list[Side]) -> None:
    engine = Engine(length=2000)
    given = await sides[0].new_flight()
    flight, leader = await sides[0].lead(given, engine)
    engine.allow(1000)
    await seen(flight, 1000)
    count = await sides[1].redis.run("len", lambda client: client.exists(flight.ref.frames), -1)
    assert count == 0
    engine.allow()
    assert await whole(leader) == engine.text()
    assert await sides[1].redis.run("len", lambda client: client.exists(flight.ref.frames), -1) == 0


async def test_a_leader_that_writes_nothing_is_not_waited_for(valkey: Valkey) -> None:
    pace = replace(PACE, silence_s=0.3)
    async with contextlib.AsyncExitStack() as stack:
        mute, side = await Side("mute", valkey).start(), await Side("side", valkey, pace).start()
        for each in (mute, side):
            stack.push_async_callback(each.kill)
        engine = Engine()
        given = await mute.new_flight()
        ref = FlightRef.of(given)
        assert ref is not None
        assert await mute.store.renew(ref, given.token) == (True, 0)
        _, member = await side.follow(given, engine)
        engine.allow()
        assert await whole(member) == engine.text()
        assert engine.flights == [None]


async def test_reading_a_log_from_any_place_gives_the_whole() -> None:
    log = FlightLog(2)
    readers = [log.reader()]
    want = ["", ""]
    got: list[list[str]] = [["", ""]]
    for number in range(60):
        choice = number % 2
        text = f"t{number}" if number % 3 else ""
        want[choice] += text
        log.append(pb.Delta(choice=choice, text=text, token_ids=[number] * (number % 4)))
        if number % 10 == 0:
            readers.append(log.reader())
            got.append(["", ""])
        reader = number % len(readers)
        for delta in readers[reader].take(limit=3 if number % 2 else None):
            got[reader][delta.choice] += delta.text
    for index, reader_ in enumerate(readers):
        while reader_.behind:
            for delta in reader_.take(limit=5):
                got[index][delta.choice] += delta.text
        assert got[index] == want
        assert [reader_.position(choice) for choice in (0, 1)] == [log.position(choice) for choice in (0, 1)]
    log.fail(Unavailable("x"))
    with pytest.raises(Unavailable):
        await readers[0].get()
