"""Flights in Redis: who leads one, what it has put out, who follows.

A flight is one generation that several identical requests share. The gateway that leads it holds a lease with a
fencing token, renewed each second, and writes frames into a stream while gateways follow. Once the lease has lapsed
one of the followers takes over, with a higher token. What is written under an older token is refused by Redis itself,
so that the stream never holds two tellings of one answer.

No call raises for Redis being away, slow or gone: the answer is None then. Times are milliseconds of Redis' own clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kvmesh.proto.v1 import router_pb2
from kvmesh.store import keys
from kvmesh.store.client import RedisStore
from kvmesh.store.flight_scripts import APPEND, DISOWN, END, KEEP, RENEW, TAKE_OVER

LEASE_MS = 3000
"""How long a leader that says nothing is believed to live; so are followers."""

LIFE_MS = 60_000
"""How long state and frames outlive the last sign of their leader."""

LINGER_MS = 30_000
"""How long they outlive the end of the flight."""

COUNTER_MS = 86_400_000
MAX_TAKEOVERS = 3
"""Of one flight: a request that ends every generation must not be handed around for ever. A leader that goes in good
order gives its own back."""

MAX_FRAME_BYTES = 4 << 20
READ_FRAMES = 256
INBOX_MAXLEN = 4096
INBOX_MS = 30_000
MAX_ID_BYTES = 128
MAX_TRACEPARENT = 64
FIRST = "0-0"

Appended = Literal["ok", "lost", "gap", "unknown"]
"""`lost`: another gateway leads, or the flight has ended. `gap`: frames written before are gone, begin anew. `unknown`:
Redis has forgotten the flight; the next `renew` makes it known again."""

Standing = Literal["led", "free", "ended", "taken", "spent"]
"""`free`: nobody leads. `spent`: nobody leads, and nobody may any more."""


How = Literal["finished", "failed", "free", "handed"]
"""How a flight is ended. `free`: its leader failed at it, another may try; `handed`: its leader goes, and another is to
lead. The pointer of a finished one is left to the router, which takes it away in the step in which
it stores the answer: a request that comes in between follows, and is told all."""


class Renewed(NamedTuple):
    """Whether the lease holds, and how many gateways follow."""

    held: bool
    followers: int


class Held(NamedTuple):
    """How a flight stands: with `led`, `token` and `gateway` are the leader's; with `taken` they are ours."""

    standing: Standing
    token: int
    gateway: str


class Frames(NamedTuple):
    """Frames after the place that was asked for, and the place of the last one. `broken`: one could not be read."""

    frames: list[router_pb2.FlightFrame]
    last: str
    broken: bool


@dataclass(frozen=True, slots=True)
class FlightRef:
    """Where a flight is in Redis. `traceparent`: of whoever tells of it, "" when that is not traced."""

    flight_id: str
    keys: keys.FlightKeys
    traceparent: str = field(default="", compare=False)

    @classmethod
    def of(cls, flight: router_pb2.Flight) -> FlightRef | None:
        """From the wire; None when it names no flight."""
        named = keys.FlightKeys.parse(flight.key)
        usable = 0 < len(flight.flight_id) <= MAX_ID_BYTES and not set(flight.flight_id) & set(" \r\n{}")
        return cls(flight.flight_id, named) if named is not None and usable else None

    @property
    def state(self) -> str:
        """Key of the hash `{token, gateway, until, takeovers, ended}`."""
        return f"{keys.prefix(self.keys.tag)}l:{self.flight_id}"

    @property
    def joined(self) -> str:
        """Key of the sorted set of gateways that follow, by the time of their last sign."""
        return self.keys.joined(self.flight_id)

    @property
    def frames(self) -> str:
        """Key of the stream."""
        return self.keys.frames(self.flight_id)


def inbox(gateway_id: str) -> str:
    """Key of the stream by which a gateway hears who follows its flights."""
    return f"kvmesh:gw:{{{gateway_id}}}:join"


class FlightStore:
    """Flights of one gateway. `clock_ms` is for tests: what Redis' clock is to show."""

    def __init__(self, store: RedisStore, gateway_id: str, *, lease_ms: int = LEASE_MS) -> None:
        self._store = store
        self._gateway = gateway_id
        self._lease_ms = lease_ms
        self.clock_ms: int | None = None

    @property
    def gateway_id(self) -> str:
        """Ours."""
        return self._gateway

    @property
    def ok(self) -> bool:
        """True while Redis is thought to answer."""
        return self._store.ok

    def _clock(self) -> str:
        return "" if self.clock_ms is None else str(self.clock_ms)

    # --- the leader
    async def renew(self, ref: FlightRef, token: int) -> Renewed | None:
        """Hold on to the lease, also to one that has lapsed and that nobody took."""
        reply = await self._store.script(
            RENEW,
            [ref.keys.pointer, ref.state, ref.joined, ref.frames],
            [ref.flight_id, self._gateway, token, self._lease_ms, LIFE_MS, self._lease_ms, self._clock()],
            write=True,
        )
        return None if reply is None else Renewed(_text(reply[0]) == "ok", int(reply[1]))

    async def append(self, ref: FlightRef, token: int, frames: Sequence[bytes], *, begun: bool) -> Appended | None:
        """Write frames, all or none. `begun`: some were written before, and must be there still."""
        reply = await self._store.script(
            APPEND, [ref.state, ref.frames], [token, self._gateway, int(begun), LIFE_MS, *frames], write=True
        )
        return None if reply is None else _appended(reply)

    async def end(self, ref: FlightRef, token: int, how: How, frames: Sequence[bytes] = ()) -> bool | None:
        """End the flight, or our part in it: a follower may take over at once. False when we lost it."""
        reply = await self._store.script(
            END,
            [ref.keys.pointer, ref.state, ref.frames],
            [ref.flight_id, self._gateway, token, how, LINGER_MS, *frames],
            write=True,
        )
        return None if reply is None else _text(reply) == "ok"

    async def disown(self, ref: FlightRef) -> None:
        """A router made us the leader, and we never heard of it: let another lead at once."""
        await self._store.script(DISOWN, [ref.keys.pointer, ref.state], [ref.flight_id, self._gateway], write=True)

    # --- followers
    async def join(self, ref: FlightRef, leader: str, traceparent: str = "") -> None:
        """Tell the leader's gateway that we follow; `keep` alone would be noticed at its next renewal. `traceparent`:
        of the request that follows."""
        key = inbox(leader)
        entry = {b"id": ref.flight_id, b"key": ref.keys.key} | ({b"trace": traceparent} if traceparent else {})

        async def add(client: Any) -> None:
            await client.xadd(key, entry, maxlen=INBOX_MAXLEN, approximate=True)
            await client.pexpire(key, INBOX_MS)

        await self._store.run("flight_join", add, None, write=True)

    async def keep(self, ref: FlightRef) -> Held | None:
        """Show that we follow, and learn how the flight stands: `led`, `free` or `ended`."""
        return _held(
            await self._store.script(
                KEEP,
                [ref.keys.pointer, ref.state, ref.joined],
                [ref.flight_id, self._gateway, LIFE_MS, self._clock()],
                write=True,
            )
        )

    async def leave(self, ref: FlightRef) -> None:
        """We do not follow any more."""
        await self._store.run("flight_leave", lambda client: client.zrem(ref.joined, self._gateway), None, write=True)

    async def take_over(self, ref: FlightRef, known_token: int) -> Held | None:
        """Lead a flight that nobody leads: `taken` for one gateway only. `known_token`: the highest seen."""
        return _held(
            await self._store.script(
                TAKE_OVER,
                [ref.keys.pointer, ref.state, ref.joined, ref.keys.counter],
                [
                    *(ref.flight_id, self._gateway, known_token, self._lease_ms, LIFE_MS),
                    *(MAX_TAKEOVERS, COUNTER_MS, self._clock()),
                ],
                write=True,
            )
        )

    async def read(self, places: Mapping[FlightRef, str]) -> dict[FlightRef, Frames] | None:
        """Frames of several flights, each from after a place of its own (`FIRST`: from the beginning), without
        waiting; at most READ_FRAMES of each, so the caller asks again until there are none."""
        refs = list(places)

        async def ask(client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for ref in refs:
                pipeline.xrange(ref.frames, min=f"({places[ref]}", count=READ_FRAMES)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            return answers

        answers = await self._store.run("flight_read", ask, None, write=True)
        if answers is None:
            return None
        return {ref: _frames(given, places[ref]) for ref, given in zip(refs, answers, strict=True)}

    async def inbox(self, place: str, timeout_s: float) -> tuple[list[FlightRef], str]:
        """Flights that gateways have begun to follow, waiting for the first; and the place after them."""
        key = inbox(self._gateway)
        began = asyncio.get_running_loop().time()

        async def ask(client: Any) -> Any:
            return await client.xread({key: place}, count=INBOX_MAXLEN, block=max(1, int(timeout_s * 1000)))

        reply = await self._store.tail("flight_inbox", ask, None, timeout_s=timeout_s + 1.0)
        if reply is None:
            # Away: the wait is ours then.
            await asyncio.sleep(max(0.0, timeout_s - (asyncio.get_running_loop().time() - began)))
        joined = []
        for _, entries in reply or ():
            for entry, fields in entries:
                place = _text(entry)
                flight_id, key = _text((fields or {}).get(b"id", b"")), _text((fields or {}).get(b"key", b""))
                ref = FlightRef.of(router_pb2.Flight(flight_id=flight_id, key=key))
                if ref is not None:
                    traceparent = _text((fields or {}).get(b"trace", b""))[:MAX_TRACEPARENT]
                    joined.append(replace(ref, traceparent=traceparent))
        return joined, place


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _appended(reply: object) -> Appended:
    said = _text(reply)
    return said if said in ("ok", "lost", "gap", "unknown") else "unknown"  # type: ignore[return-value]


def _held(reply: Any) -> Held | None:
    return None if reply is None else Held(_text(reply[0]), int(reply[1]), _text(reply[2]))  # type: ignore[arg-type]


def _frames(given: Any, place: str) -> Frames:
    """Whatever lies there: bytes of a bounded size that are frames, or the flight counts as broken."""
    out: list[router_pb2.FlightFrame] = []
    if not isinstance(given, list):
        return Frames(out, place, True)
    for entry, fields in given:
        raw = (fields or {}).get(b"f")
        try:
            if not isinstance(raw, bytes) or len(raw) > MAX_FRAME_BYTES:
                raise ValueError("not a frame")
            out.append(router_pb2.FlightFrame.FromString(raw))
        except Exception:
            return Frames(out, place, True)
        place = _text(entry)
    return Frames(out, place, False)
