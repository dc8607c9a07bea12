"""Where requests wait when all workers are full: start-time fair queueing over tenants, one queue a model.

A tenant's requests stay in order. Between tenants the one with the lowest virtual start goes next; a release charges
its cost (prompt + output tokens) to its tenant, so a tenant that asks for much gets its turn less often, and one that
was idle neither saves up nor loses anything. A ticket that leaves unserved costs nothing.

Requests that were running already (`ahead`: their worker was lost) go before all that have not begun, in the order of
their coming, and however many wait.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.errors import Overloaded
from kvmesh.telemetry import metrics, names
from services.gateway.link import WorkerLink

RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. `cost` in tokens, `tokens` is the prompt's length; `eligible`: which workers would do."""

    tenant: str
    model: str
    cost: int
    tokens: int
    number: int
    turn: asyncio.Future[WorkerLink]
    eligible: Callable[[WorkerLink], bool]
    promised: WorkerLink | None = None
    ahead: bool = False


@dataclass(slots=True)
class _Tenant:
    tickets: deque[Ticket] = field(default_factory=deque)
    finish: float = 0.0


@dataclass(slots=True)
class _Queue:
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    virtual: float = 0.0

    def next(self, link: WorkerLink) -> tuple[float, _Tenant, Ticket] | None:
        """Virtual start, line and ticket that goes next on `link`; ties go to the older ticket."""
        best: tuple[bool, float, int] | None = None
        found: tuple[float, _Tenant, Ticket] | None = None
        for line in self.tenants.values():
            ticket = next((ticket for ticket in line.tickets if ticket.eligible(link)), None)
            if ticket is None:
                continue
            start = max(self.virtual, line.finish)
            key = (not ticket.ahead, 0.0 if ticket.ahead else start, ticket.number)
            if best is None or key < best:
                best, found = key, (start, line, ticket)
        return found


class FairQueue:
    """All waiting requests. Lives on the event loop; nothing blocks."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._queues: dict[str, _Queue] = {}
        self._numbers = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def waiting(self, model: str, *, ahead: bool = False) -> bool:
        """True when a newcomer for `model` has to line up."""
        queue = self._queues.get(model)
        if queue is None:
            return False
        return any(t.tickets and (t.tickets[0].ahead or not ahead) for t in queue.tenants.values())

    def enter(
        self,
        tenant: str,
        model: str,
        *,
        cost: int,
        tokens: int,
        eligible: Callable[[WorkerLink], bool],
        ahead: bool = False,
    ) -> Ticket:
        """Line up at the end of the tenant's line, or of those `ahead` in it. Overloaded when too many wait."""
        if self._waiting >= self._max_waiting and not ahead:
            raise Overloaded("all workers are full and too many requests wait", retry_after=RETRY_AFTER_S)
        turn: asyncio.Future[WorkerLink] = asyncio.get_running_loop().create_future()
        ticket = Ticket(tenant, model, max(1, cost), tokens, next(self._numbers), turn, eligible, ahead=ahead)
        tickets = self._line(ticket).tickets
        tickets.insert(sum(other.ahead for other in tickets) if ahead else len(tickets), ticket)
        self._count(1)
        return ticket

    def reenter(self, ticket: Ticket) -> None:
        """The ticket's turn came and its worker was full after all: back to the front, the charge taken back."""
        assert ticket.turn.done()
        self.settle(ticket)
        ticket.turn = asyncio.get_running_loop().create_future()
        line = self._line(ticket)
        line.finish -= ticket.cost
        line.tickets.insert(0 if ticket.ahead else sum(other.ahead for other in line.tickets), ticket)
        self._count(1)

    def settle(self, ticket: Ticket) -> None:
        """The submit that followed a turn has ended, one way or another. Idempotent."""
        if ticket.promised is not None:
            ticket.promised.seats.promised -= 1
            ticket.promised = None

    def leave(self, ticket: Ticket) -> None:
        """The request waits no more. Idempotent; to be called in a `finally`."""
        self.settle(ticket)
        queue = self._queues.get(ticket.model)
        line = queue.tenants.get(ticket.tenant) if queue is not None else None
        if line is not None and ticket in line.tickets:
            line.tickets.remove(ticket)
            self._count(-1)
        if not ticket.turn.done():
            ticket.turn.cancel()
        self._tidy(ticket.model)

    def offer(self, link: WorkerLink) -> None:
        """A worker reported: give out its free seats, in fair order. A ticket that does not fit holds the line."""
        queue = self._queues.get(link.info.model)
        if queue is None or not link.accepting:
            return
        pages = link.load.free_pages
        while link.seats.free > 0:
            head = queue.next(link)
            if head is None:
                return
            start, line, ticket = head
            # One page more than the prompt fills: the look-ahead that admission asks for.
            need = -(-ticket.tokens // max(1, link.info.page_size)) + 1
            if need > pages and link.seats.taken + link.seats.promised > 0:
                return
            line.tickets.remove(ticket)
            self._count(-1)
            if not ticket.ahead:
                queue.virtual = start
            line.finish = start + ticket.cost
            pages -= need
            link.seats.promised += 1
            ticket.promised = link
            ticket.turn.set_result(link)

    def _line(self, ticket: Ticket) -> _Tenant:
        queue = self._queues.setdefault(ticket.model, _Queue())
        return queue.tenants.setdefault(ticket.tenant, _Tenant(finish=queue.virtual))

    def _tidy(self, model: str) -> None:
        """Forget a queue that nobody is in: its virtual time has no meaning then."""
        if not self.waiting(model):
            self._queues.pop(model, None)

    def _count(self, change: int) -> None:
        self._waiting += change
        metrics.gauge(names.GATEWAY_WAITING).set(self._waiting)
