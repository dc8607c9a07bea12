"""The receiver's slot table: who may write which generation, and how many bytes have come. Pure; time is passed in.

    free ──open──▶ open ──bind──▶ bound ──last byte──▶ free (at the end of the queue)
                    │               │
                    │ close,        │ close, expire, too many bytes, peer failed or lost
                    │ expire        ▼
                    └───▶ free    draining ──Drained from the writer, or the peer fenced──▶ free

A slot is reused first in, first out, under a new generation. What is not current is counted and dropped. An expectation
is fixed when its writer binds, before any byte can come, and never changes after.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.errors import FailedPrecondition, InvalidArgument, NotFound, Overloaded
from kvmesh.telemetry import metrics, names
from kvmesh.transfer.immediate import GENERATIONS, MAX_SLOTS, pack, unpack

Peer = Hashable


class SlotState(enum.Enum):
    OPEN = "open"
    BOUND = "bound"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Slot:
    """One expectation. Times are on the caller's clock, seconds."""

    slot: int
    generation: int
    expected: int
    expires: float
    opened: float
    context: object = None
    state: SlotState = SlotState.OPEN
    peer: Peer | None = None
    bound: float = 0.0
    received: int = 0
    reason: str = ""

    @property
    def immediate(self) -> int:
        return pack(self.slot, self.generation)


class Completed(NamedTuple):
    """Every expected byte has landed; the slot is free again."""

    slot: Slot
    elapsed_s: float


class Failed(NamedTuple):
    """The generation is over. `Drained` follows, now or later."""

    slot: Slot


class AskDrain(NamedTuple):
    """Tell the writer to stop and to say Drained."""

    slot: Slot


class Drained(NamedTuple):
    """No write can land any more; the slot is free again."""

    slot: Slot


Event = Completed | Failed | AskDrain | Drained


@dataclass(slots=True)
class SlotCounters:
    completed: int = 0
    failed: int = 0
    expired: int = 0
    stale: int = 0
    overrun: int = 0


@dataclass(slots=True)
class _Entry:
    generation: int
    current: Slot | None = None


@dataclass
class SlotTable:
    """Slots of one engine's life. Methods return what follows, in order.

    first_generation: where the counting starts, so that a successor's generations do not repeat its predecessor's.
    """

    max_slots: int = MAX_SLOTS
    first_generation: int = 0
    counters: SlotCounters = field(default_factory=SlotCounters)

    def __post_init__(self) -> None:
        if not 1 <= self.max_slots <= MAX_SLOTS:
            raise InvalidArgument(f"max_slots must be in 1..{MAX_SLOTS}, got {self.max_slots}")
        self._entries = [_Entry(self.first_generation % GENERATIONS) for _ in range(self.max_slots)]
        self._free: deque[int] = deque(range(self.max_slots))
        # What is looked through at every event: a few, where the table has thousands.
        self._taken: dict[int, Slot] = {}

    def __len__(self) -> int:
        return self.max_slots - len(self._free)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._taken.values()))

    def get(self, slot: int, generation: int) -> Slot | None:
        """The slot, if this generation of it is current."""
        if not 0 <= slot < self.max_slots:
            return None
        current = self._entries[slot].current
        return current if current is not None and current.generation == generation else None

    def open(self, expected: int, *, now: float, ttl_s: float, context: object = None) -> Slot:
        """Register an expectation of `expected` bytes. Raises Overloaded (none free), InvalidArgument."""
        if expected < 1:
            raise InvalidArgument(f"a slot expects at least 1 byte, got {expected}")
        if not self._free:
            raise Overloaded(f"all {self.max_slots} slots are taken", retry_after=1.0)
        number = self._free.popleft()
        entry = self._entries[number]
        entry.current = Slot(number, entry.generation, expected, expires=now + ttl_s, opened=now, context=context)
        self._taken[number] = entry.current
        return entry.current

    def bind(
        self, slot: int, generation: int, nbytes: int, peer: Peer, *, now: float, expected: int | None = None
    ) -> Slot:
        """A writer takes the slot. expected: what this writer must send, where its pages make other bytes of the same
        tokens. Raises NotFound (not current), FailedPrecondition (taken, over), InvalidArgument."""
        current = self.get(slot, generation)
        if current is None:
            self.counters.stale += 1
            raise NotFound(f"slot {slot} generation {generation} is not current")
        if current.state is not SlotState.OPEN:
            raise FailedPrecondition(f"slot {slot} generation {generation} is {current.state.value}: one writer, once")
        expected = current.expected if expected is None else expected
        if nbytes != expected:
            raise InvalidArgument(f"slot {slot} expects {expected} bytes, the writer has {nbytes}")
        current.expected = expected
        current.state = SlotState.BOUND
        current.peer = peer
        current.bound = now
        return current

    def arrived(self, peer: Peer, immediate: int, nbytes: int, *, now: float) -> list[Event]:
        """Bytes under an immediate, over that peer's link."""
        current = self.get(*unpack(immediate))
        if current is None or current.state is not SlotState.BOUND or current.peer != peer:
            self.counters.stale += 1
            return []
        current.received += nbytes
        if current.received > current.expected:
            self.counters.overrun += 1
            return self._fail(current, f"{current.received} bytes came, {current.expected} were expected")
        if current.received < current.expected:
            return []
        self.counters.completed += 1
        self._release(current)
        return [Completed(current, now - current.bound)]

    def close(self, slot: int, generation: int, reason: str) -> list[Event]:
        """The engine gives it up. Nothing where it is not current (it is over already)."""
        current = self.get(slot, generation)
        return [] if current is None else self._fail(current, reason)

    def writer_failed(self, peer: Peer, slot: int, generation: int, reason: str) -> list[Event]:
        """The writer gave the generation up and has drained it."""
        current = self._of(peer, slot, generation)
        if current is None:
            return []
        return [*self._fail(current, reason, ask=False), *self._drained(current)]

    def drained(self, peer: Peer, slot: int, generation: int) -> list[Event]:
        """The writer says: nothing of it is in flight, nothing more will come."""
        current = self._of(peer, slot, generation)
        if current is None:
            return []
        # Drained without our asking: the writer stopped for a reason of its own.
        return [*self._fail(current, "the writer stopped", ask=False), *self._drained(current)]

    def peer_lost(self, peer: Peer, reason: str) -> list[Event]:
        """The link is gone: its generations fail, and drain when the peer is fenced."""
        return [event for slot in self if slot.peer == peer for event in self._fail(slot, reason, ask=False)]

    def fenced(self, peer: Peer) -> list[Event]:
        """No write over that link can land any more."""
        events: list[Event] = []
        for slot in self:
            if slot.peer == peer:
                events += self._fail(slot, "the writer was fenced", ask=False)
                events += self._drained(slot)
        return events

    def expire(self, now: float) -> list[Event]:
        """Generations that lived longer than they may."""
        events: list[Event] = []
        for slot in self:
            if slot.state is not SlotState.DRAINING and now >= slot.expires:
                self.counters.expired += 1
                metrics.counter(names.TRANSFER_LEASES).labels("writer").inc()
                events += self._fail(slot, f"not complete within {slot.expires - slot.opened:g} s")
        return events

    def next_expiry(self) -> float | None:
        """When `expire` will next do something."""
        return min((slot.expires for slot in self if slot.state is not SlotState.DRAINING), default=None)

    def check_integrity(self) -> None:
        """Raises AssertionError: every number is free once or taken, and no expectation is exceeded unnoticed."""
        taken = {slot.slot for slot in self}
        assert taken == {n for n, entry in enumerate(self._entries) if entry.current is not None}, (
            "a slot is overlooked"
        )
        free = list(self._free)
        assert len(set(free)) == len(free), "a slot is free twice"
        assert taken.isdisjoint(free), "a slot is both free and taken"
        assert len(taken) + len(free) == self.max_slots, "a slot is lost"
        for slot in self:
            assert slot.state is not SlotState.OPEN or slot.peer is None
            assert slot.state is not SlotState.BOUND or slot.received < slot.expected

    def _of(self, peer: Peer, slot: int, generation: int) -> Slot | None:
        current = self.get(slot, generation)
        if current is None or current.peer != peer or current.state is SlotState.OPEN:
            self.counters.stale += 1
            return None
        return current

    def _fail(self, slot: Slot, reason: str, *, ask: bool = True) -> list[Event]:
        if slot.state is SlotState.DRAINING:
            return []
        unbound = slot.state is SlotState.OPEN
        slot.state = SlotState.DRAINING
        slot.reason = reason
        self.counters.failed += 1
        if unbound:
            # No writer ever came, and from now on none is let in.
            return [Failed(slot), *self._drained(slot)]
        return [Failed(slot), AskDrain(slot)] if ask else [Failed(slot)]

    def _drained(self, slot: Slot) -> list[Event]:
        self._release(slot)
        return [Drained(slot)]

    def _release(self, slot: Slot) -> None:
        entry = self._entries[slot.slot]
        entry.current = None
        del self._taken[slot.slot]
        entry.generation = (entry.generation + 1) % GENERATIONS
        self._free.append(slot.slot)
