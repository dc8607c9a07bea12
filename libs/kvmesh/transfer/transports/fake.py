"""The transport that goes wrong on purpose: programmable, seeded, on any clock.

`FakeOutbound` keeps a schedule of what will happen to each write and carries it out in `poll`, through two functions:
one lands runs, the other tells the receiver. In tests these are numpy copies and a list, and the clock is virtual; in a
real sidecar they are the shm transport's (see `faulty.py`), and the faults come from a file.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.immediate import unpack
from kvmesh.transfer.transports.base import Completion, Outbound, Write

MAX_FAULT_FILE_BYTES = 1 << 16

Land = Callable[[Write, int, int], int]
"""Copy runs [first, last) of a write; returns the bytes moved."""
Tell = Callable[[int, int], None]
"""Tell the receiver (immediate, bytes)."""


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """What goes wrong. Rates are probabilities per write; times are seconds. All off by default.

    delay_s: each piece of a write lands this late, drawn from [low, high]: a range reorders.
    pieces: a write lands in up to this many pieces, each with its own delay.
    error_rate: the write completes with an error, after a random part of it has landed.
    duplicate_rate: the completion comes twice.
    stale_rate: its arrival is told a second time, up to stale_delay_s after a later generation of the slot began. (Not
        before: that an immediate comes once within its generation is what real networks do promise.)
    completion_delay_s: the completion at the writer comes this much after the last piece has landed.
    arrival_delay_s: a slow receiver: it learns this late of what has landed.
    die_after_writes: the link breaks at that write (0 = never).
    hold_after_writes: from that write on, nothing moves until the link is flushed or fenced (0 = never).
    """

    seed: int = 0
    delay_s: tuple[float, float] = (0.0, 0.0)
    pieces: int = 1
    error_rate: float = 0.0
    duplicate_rate: float = 0.0
    stale_rate: float = 0.0
    stale_delay_s: tuple[float, float] = (0.0, 1.0)
    completion_delay_s: tuple[float, float] = (0.0, 0.0)
    arrival_delay_s: tuple[float, float] = (0.0, 0.0)
    die_after_writes: int = 0
    hold_after_writes: int = 0

    def __post_init__(self) -> None:
        for name in ("error_rate", "duplicate_rate", "stale_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidArgument(f"faults: {name} must be in 0..1")
        for name in ("delay_s", "stale_delay_s", "completion_delay_s", "arrival_delay_s"):
            span = getattr(self, name)
            if len(span) != 2 or not 0.0 <= span[0] <= span[1] <= 600.0:
                raise InvalidArgument(f"faults: {name} must be [low, high] seconds")
        if not 1 <= self.pieces <= 1024:
            raise InvalidArgument("faults: pieces must be in 1..1024")

    @classmethod
    def load(cls, path: Path) -> FaultOptions:
        """Read a JSON object with these names. Raises InvalidArgument naming what is wrong."""
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_FAULT_FILE_BYTES + 1)
            data = json.loads(raw) if len(raw) <= MAX_FAULT_FILE_BYTES else None
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"faults: cannot read {path}: {error}") from None
        if not isinstance(data, dict):
            raise InvalidArgument(f"faults: {path} must hold a JSON object of at most {MAX_FAULT_FILE_BYTES} bytes")
        known = {item.name for item in fields(cls)}
        for name in data:
            if name not in known:
                raise InvalidArgument(f"faults: {name!r} is not one of {sorted(known)}")
        try:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
            return cls(**values)
        except TypeError as error:
            raise InvalidArgument(f"faults: {error}") from None


class VirtualClock:
    """A clock that moves when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True, eq=False)
class _Flight:
    """A write on its way."""

    write: Write
    pieces_left: int
    error: str = ""
    begun: bool = False
    ended: bool = False
    held: bool = False
    moved: int = field(default=0)


class FakeOutbound(Outbound):
    """The writer's end. `land` and `tell` do what really happens; this decides when and whether."""

    def __init__(
        self, options: FaultOptions, land: Land, tell: Tell, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options
        self._random = random.Random(options.seed)
        self._land = land
        self._tell = tell
        self._clock = clock
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._flights: dict[int, _Flight] = {}
        self._completions: list[Completion] = []
        self._broken = ""
        self._posted = 0
        self._stale: dict[int, list[tuple[int, int]]] = {}

    def post(self, write: Write) -> None:
        self._posted += 1
        if self.options.die_after_writes and self._posted >= self.options.die_after_writes and not self._broken:
            self.fence("the fake peer died")
        if self._broken:
            self._completions.append(Completion(write.context, 0, self._broken))
            return
        self._replay_stale(write.immediate)
        runs = len(write.length)
        count = min(runs, self._random.randint(1, self.options.pieces))
        cuts = sorted(self._random.sample(range(1, runs), count - 1))
        flight = _Flight(write, count)
        self._flights[write.context] = flight
        if self.options.hold_after_writes and self._posted >= self.options.hold_after_writes:
            flight.held = True
            return
        if self._random.random() < self.options.error_rate:
            flight.error = "the fake network failed"
        for first, last in itertools.pairwise([0, *cuts, runs]):
            # A failed write lands in part; its completion comes after whatever part that is.
            lands = not flight.error or self._random.random() < 0.5
            self._at(self.options.delay_s, partial(self._piece, flight, first, last, lands))

    def poll(self, budget: int) -> list[Completion]:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        completions, self._completions = self._completions, []
        return completions

    def flush(self, immediate: int) -> None:
        for flight in list(self._flights.values()):
            if flight.write.immediate == immediate and not flight.begun:
                self._end(flight, "flushed")

    def fence(self, reason: str) -> None:
        self._broken = self._broken or reason
        for flight in list(self._flights.values()):
            self._end(flight, reason)

    def close(self) -> None:
        self.fence("closed")

    @property
    def in_flight(self) -> int:
        """Writes that have not completed."""
        return len(self._flights)

    @property
    def busy(self) -> bool:
        return bool(self._completions) or bool(self._due and self._due[0][0] <= self._clock())

    @property
    def broken(self) -> str:
        return self._broken

    def wake_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    def _at(self, span: tuple[float, float], action: Callable[[], None]) -> None:
        delay = self._random.uniform(*span) if span[1] else 0.0
        heapq.heappush(self._due, (self._clock() + delay, next(self._order), action))

    def _piece(self, flight: _Flight, first: int, last: int, lands: bool) -> None:
        if flight.ended:
            return
        flight.begun = True
        if lands:
            moved = self._land(flight.write, first, last)
            flight.moved += moved
            immediate = flight.write.immediate
            self._at(self.options.arrival_delay_s, partial(self._tell, immediate, moved))
            if self._random.random() < self.options.stale_rate:
                self._stale.setdefault(unpack(immediate)[0], []).append((immediate, moved))
        flight.pieces_left -= 1
        if not flight.pieces_left:
            self._at(self.options.completion_delay_s, partial(self._end, flight, flight.error))

    def _replay_stale(self, current: int) -> None:
        kept = []
        for immediate, nbytes in self._stale.pop(unpack(current)[0], []):
            if immediate == current:
                kept.append((immediate, nbytes))
            else:
                self._at(self.options.stale_delay_s, partial(self._tell, immediate, nbytes))
        if kept:
            self._stale[unpack(current)[0]] = kept

    def _end(self, flight: _Flight, error: str) -> None:
        if flight.ended:
            return
        flight.ended = True
        del self._flights[flight.write.context]
        completion = Completion(flight.write.context, 0 if error else flight.write.nbytes, error)
        self._completions.append(completion)
        if self._random.random() < self.options.duplicate_rate:
            self._completions.append(completion)
