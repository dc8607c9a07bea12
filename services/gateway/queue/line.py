"""Who waits for one model, and who is next: tickets in lines of tenants, lines in levels of priority."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.gateway.link import WorkerLink

# Lines that nobody waits in are looked through once there are this many.
PRUNE_AT = 256


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. `cost` in tokens, `tokens` is the prompt's length; `eligible`: which workers would do.

    `turn` gives the worker that has a seat, or the Overloaded with which it was sent away.
    """

    tenant: str
    model: str
    cost: int
    tokens: int
    number: int
    turn: asyncio.Future[WorkerLink]
    eligible: Callable[[WorkerLink], bool]
    promised: WorkerLink | None = None
    ahead: bool = False
    priority: int = 0
    weight: float = 1.0
    estimate_s: float | None = None
    lined_up: bool = False

    @property
    def charge(self) -> float:
        """What its release adds to its tenant's virtual time."""
        return self.cost / self.weight


@dataclass(slots=True)
class Line:
    """A tenant's tickets in the order of their coming. `finish`: virtual time at which its last release ends; `cost`
    and `charge`: of all tickets; `weight`: the tenant's, as last seen."""

    finish: float = 0.0
    tickets: deque[Ticket] = field(default_factory=deque)
    cost: int = 0
    charge: float = 0.0
    weight: float = 1.0

    def put(self, ticket: Ticket) -> None:
        """Into the line: a new one at the end, one whose turn was none where it was."""
        after = sum(other.number > ticket.number for other in self.tickets) if self._older(ticket) else 0
        self.tickets.insert(len(self.tickets) - after, ticket)
        self.cost += ticket.cost
        self.charge += ticket.charge
        self.weight = ticket.weight
        ticket.lined_up = True

    def take(self, ticket: Ticket) -> None:
        """Out of the line."""
        self.tickets.remove(ticket)
        self.cost -= ticket.cost
        self.charge -= ticket.charge
        ticket.lined_up = False

    def first(self, link: WorkerLink) -> Ticket | None:
        """Who could go on `link`. One that was cancelled just now is on its way out."""
        return next((ticket for ticket in self.tickets if not ticket.turn.done() and ticket.eligible(link)), None)

    def _older(self, ticket: Ticket) -> bool:
        return bool(self.tickets) and ticket.number < self.tickets[-1].number


@dataclass(slots=True)
class Level:
    """Everybody of one priority. `virtual`: start of what was released last."""

    lines: dict[str, Line] = field(default_factory=dict)
    virtual: float = 0.0
    prune_at: int = PRUNE_AT

    def line(self, tenant: str) -> Line:
        """The tenant's line, made if there is none."""
        line = self.lines.get(tenant)
        if line is None:
            if len(self.lines) >= self.prune_at:
                self._prune()
            line = self.lines[tenant] = Line(self.virtual)
        return line

    def start(self, line: Line) -> float:
        """Virtual start of the line's first ticket."""
        return max(self.virtual, line.finish)

    def busy(self) -> Iterator[tuple[str, Line]]:
        """Lines in which somebody waits."""
        return ((tenant, line) for tenant, line in self.lines.items() if line.tickets)

    def next(self, link: WorkerLink) -> Ticket | None:
        """The ticket with the lowest virtual start among those that `link` would do for; the older one of two."""
        best: tuple[float, int] | None = None
        found: Ticket | None = None
        for _, line in self.busy():
            ticket = line.first(link)
            if ticket is None:
                continue
            key = (self.start(line), ticket.number)
            if best is None or key < best:
                best, found = key, ticket
        return found

    def before(self, tenant: str, weight: float) -> int:
        """Cost of the tickets that a newcomer of `tenant` would find before it."""
        mine = self.lines.get(tenant) or Line(self.virtual)
        # Those of its own line come first, whatever their weights were.
        start = self.start(mine) + mine.cost / weight
        total = mine.cost
        for _, line in self.busy():
            if line is mine:
                continue
            theirs = self.start(line)
            if theirs + line.charge <= start:
                total += line.cost
                continue
            for ticket in line.tickets:
                if theirs > start:
                    break
                total += ticket.cost
                theirs += ticket.charge
        return total

    def _prune(self) -> None:
        """Forget lines that nobody is in and that owe nothing."""
        self.lines = {tenant: line for tenant, line in self.lines.items() if line.tickets or line.finish > self.virtual}
        self.prune_at = max(PRUNE_AT, 2 * len(self.lines))


@dataclass(slots=True)
class ModelQueue:
    """All who wait for one model. `ahead`: who ran before, of all tenants and priorities, in order of their coming."""

    ahead: Line = field(default_factory=Line)
    levels: dict[int, Level] = field(default_factory=dict)

    def level(self, priority: int) -> Level:
        """The level, made if there is none."""
        return self.levels.setdefault(priority, Level())

    def holder(self, ticket: Ticket) -> Line:
        """The line that a ticket stands in."""
        return self.ahead if ticket.ahead else self.level(ticket.priority).line(ticket.tenant)

    @property
    def waiting(self) -> bool:
        """True when anybody waits."""
        return bool(self.ahead.tickets) or any(
            line.tickets for lv in self.levels.values() for line in lv.lines.values()
        )

    def next(self, link: WorkerLink) -> Ticket | None:
        """Who goes next on `link`: who ran before, then the highest priority, then by virtual time."""
        found = self.ahead.first(link)
        if found is not None:
            return found
        for priority in sorted(self.levels, reverse=True):
            found = self.levels[priority].next(link)
            if found is not None:
                return found
        return None

    def release(self, ticket: Ticket) -> None:
        """Its turn has come: out of the line, its cost charged to its tenant."""
        self.holder(ticket).take(ticket)
        level = self.level(ticket.priority)
        line = level.line(ticket.tenant)
        start = level.start(line)
        if not ticket.ahead:
            level.virtual = start
        line.finish = start + ticket.charge

    def put_back(self, ticket: Ticket) -> None:
        """Its turn was none: to its place again, the charge taken back."""
        self.level(ticket.priority).line(ticket.tenant).finish -= ticket.charge
        self.holder(ticket).put(ticket)

    def before(self, tenant: str, priority: int, weight: float) -> int:
        """Cost of all tickets that a newcomer would find before it."""
        total = self.ahead.cost
        # Who has a higher priority is before it, whatever the tenant.
        for other, level in self.levels.items():
            if other > priority:
                total += sum(line.cost for line in level.lines.values())
            elif other == priority:
                total += level.before(tenant, weight)
        return total

    def charged_elsewhere(self, tenant: str, cost: int) -> None:
        """Another gateway released `cost` of this tenant: here it had its turn as well."""
        for level in self.levels.values():
            line = level.line(tenant)
            line.finish = level.start(line) + cost / line.weight
