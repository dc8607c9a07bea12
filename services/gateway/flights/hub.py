"""All flights of one gateway, and what they share: one reader of frames, one of the inbox."""

from __future__ import annotations

import asyncio
import logging

from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.store.flights import FIRST, FlightRef, FlightStore
from services.gateway.flights.flight import Flight
from services.gateway.flights.parts import Pace, Role

log = logging.getLogger(__name__)

# A follower may know of a flight before its leader here does: both were told by routers, over different calls. After
# this the leader does not come: its client has left, or the router's answer was too late for it.
MEET_S = 1.0
MAX_EARLY = 1024
INBOX_WAIT_S = 10.0
AWAY_S = 0.25


class Flights:
    """Flights by id. Without a store (no Redis configured) there are none."""

    def __init__(self, store: FlightStore | None, tasks: BackgroundTasks, *, pace: Pace | None = None) -> None:
        self._store = store
        self._tasks = tasks
        self._pace = pace or Pace()
        self._flights: dict[str, Flight] = {}
        self._meetings: dict[str, asyncio.Event] = {}
        self._early: dict[str, tuple[asyncio.TimerHandle, str]] = {}
        self._following = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def enabled(self) -> bool:
        """Whether a request may lead or follow now."""
        return self._store is not None and self._store.ok and not self._closing

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, flight_id: str) -> Flight | None:
        """A flight that this gateway has a part in."""
        return self._flights.get(flight_id)

    def start(self) -> None:
        """Begin to listen for followers."""
        if self._store is not None:
            self._tasks.spawn(self._listen(self._store), name="flight-inbox")
            self._reader = self._tasks.spawn(self._read(self._store), name="flight-frames")

    # --- taking part
    def lead(self, given: router_pb2.Flight, choices: int) -> Flight | None:
        """The flight that this gateway is to lead; the caller joins and then calls `Flight.lead`, at once.

        None when there is no leading it: the request is then one of its own.
        """
        ref = FlightRef.of(given)
        if ref is None or self._store is None or self._closing or given.flight_id in self._flights:
            return None
        flight = self._add(ref, given, choices, self._store)
        meeting = self._meetings.get(ref.flight_id)
        if meeting is not None:
            meeting.set()
        early = self._early.pop(ref.flight_id, None)
        if early is not None:
            early[0].cancel()
            flight.joined(early[1])
        return flight

    async def follow(self, given: router_pb2.Flight, choices: int) -> Flight | None:
        """The flight to follow, wherever it is led; None when that is not possible.

        The caller joins without a further await.
        """
        ref = FlightRef.of(given)
        if ref is None or self._store is None or self._closing:
            return None
        flight = self._flights.get(ref.flight_id)
        if flight is None and given.gateway_id == self._store.gateway_id:
            flight = await self._meet(ref.flight_id)
            if flight is None:
                await self._store.disown(ref)
                return None
        if flight is None:
            if not self._store.ok:
                return None
            flight = self._add(ref, given, choices, self._store)
            flight.follow()
            self._following.set()
        # An error was for those who were there; this request may fare better by itself.
        return flight if flight.log.choices == choices and flight.log.error is None else None

    async def _meet(self, flight_id: str) -> Flight | None:
        meeting = self._meetings.setdefault(flight_id, asyncio.Event())
        try:
            async with asyncio.timeout(MEET_S):
                await meeting.wait()
        except TimeoutError:
            pass
        finally:
            if self._meetings.get(flight_id) is meeting:
                del self._meetings[flight_id]
        return self._flights.get(flight_id)

    def _add(self, ref: FlightRef, given: router_pb2.Flight, choices: int, store: FlightStore) -> Flight:
        flight = Flight(
            ref,
            given.token,
            given.gateway_id,
            choices=choices,
            store=store,
            tasks=self._tasks,
            pace=self._pace,
            on_over=self._over,
        )
        self._flights[ref.flight_id] = flight
        return flight

    def _over(self, flight: Flight) -> None:
        if self._flights.get(flight.ref.flight_id) is flight:
            del self._flights[flight.ref.flight_id]

    # --- what they share
    async def _listen(self, store: FlightStore) -> None:
        """Hear who joins the flights led here."""
        place = FIRST
        while True:
            joined, place = await store.inbox(place, INBOX_WAIT_S if store.ok else AWAY_S)
            for ref in joined:
                flight = self._flights.get(ref.flight_id)
                if flight is not None:
                    flight.joined(ref.traceparent)
                elif ref.flight_id not in self._early and len(self._early) < MAX_EARLY:
                    later = asyncio.get_running_loop().call_later(MEET_S, self._missed, store, ref)
                    self._early[ref.flight_id] = later, ref.traceparent

    def _missed(self, store: FlightStore, ref: FlightRef) -> None:
        """Somebody follows what should be led here, and nobody has come to lead it."""
        del self._early[ref.flight_id]
        if not self._closing:
            self._tasks.spawn(store.disown(ref), name="flight-disown", essential=False)

    async def _read(self, store: FlightStore) -> None:
        """Read the frames of all flights that are followed here, together."""
        while True:
            places = {flight.ref: flight.place for flight in self._flights.values() if flight.role is Role.FOLLOW}
            if not places:
                self._following.clear()
                await self._following.wait()
                continue
            read = await store.read(places)
            for ref, frames in (read or {}).items():
                flight = self._flights.get(ref.flight_id)
                if flight is not None:
                    flight.frames(places[ref], frames)
            await asyncio.sleep(self._pace.publish_s if read is not None else AWAY_S)

    # --- the end
    def drain(self) -> None:
        """This gateway is stopping: flights that nobody here reads are handed over, the others when they are left."""
        self._closing = True
        for timer, _ in self._early.values():
            timer.cancel()
        self._early.clear()
        for flight in list(self._flights.values()):
            flight.close()

    async def close(self, timeout_s: float) -> None:
        """After the last reader: wait until all is handed over."""
        self.drain()
        waiting = [asyncio.ensure_future(flight.closed()) for flight in self._flights.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()
