"""The queue of a gateway: start-time fair queueing over tenants, by priority, one queue a model.

Between tenants of one priority the one with the lowest virtual start goes next; a release charges its cost (prompt +
output tokens, over the tenant's weight) to its tenant, so a tenant that asks for much gets its turn less often, and one
that was idle neither saves up nor loses anything. A ticket that leaves unserved costs nothing. A higher priority goes
first. What other gateways released is charged here as well (`shared`).

Requests that were running already (`ahead`: their worker was lost) go before all that have not begun, in the order of
their coming, and however many wait.

The line is bounded. When it is full, a newcomer takes the place of the newest ticket of a lower priority, or of a
tenant of its own priority that holds more places; and one whose first token cannot come in time at the pace that the
queue has is refused at once (`pace`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from kvmesh.errors import Overloaded
from kvmesh.telemetry import metrics, names
from services.gateway.link import WorkerLink
from services.gateway.queue.line import Line, ModelQueue, Ticket
from services.gateway.queue.pace import Pace

RETRY_AFTER_S = 1.0
"""Where nothing has been measured yet."""

RETRY_BOUNDS_S = (0.5, 60.0)
MAX_TOLD_S = 3600.0
"""Of the estimate, in the metric: autoscalers cannot reckon with infinity."""

# Of the limit, for the wait: after its turn a prompt is computed.
WAIT_SHARE = 0.9


class FairQueue:
    """All waiting requests. Lives on the event loop; nothing blocks.

    max_waiting: tickets in all. early_refusal: refuse who cannot be served within its limit. shared: keep what was
    released for `take_charges`. clock: seconds.
    """

    def __init__(
        self,
        max_waiting: int,
        *,
        early_refusal: bool = True,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._max_waiting = max_waiting
        self._early_refusal = early_refusal
        self._shared = shared
        self._clock = clock
        self._rng = rng or random.Random()
        self._queues: dict[str, ModelQueue] = {}
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self._charges: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._numbers = itertools.count()
        self._waiting = 0
        self._tokens: Counter[str] = Counter()
        self.busy = asyncio.Event()
        """Set while anybody waits."""

    def __len__(self) -> int:
        return self._waiting

    def waiting(self, model: str, *, ahead: bool = False) -> bool:
        """True when a newcomer for `model` has to line up."""
        queue = self._queues.get(model)
        if queue is None:
            return False
        return bool(queue.ahead.tickets) if ahead else queue.waiting

    def estimate(self, tenant: str, model: str, *, priority: int = 0, weight: float = 1.0) -> float | None:
        """Seconds that a newcomer would wait, 0 when nobody is before it; None when nothing was measured yet."""
        queue = self._queues.get(model)
        cost = queue.before(tenant, priority, weight) if queue is not None else 0
        return self._paces[model].wait_s(cost, self._clock()) if cost else 0.0

    def retry_after(self, tenant: str, model: str, *, priority: int = 0, weight: float = 1.0) -> float:
        """Seconds after which to come back: the estimated wait, spread so that not all come back at once."""
        return self._retry(self.estimate(tenant, model, priority=priority, weight=weight))

    def _retry(self, estimate: float | None) -> float:
        low, high = RETRY_BOUNDS_S
        wait = RETRY_AFTER_S if not estimate else min(max(estimate, low), high)
        return wait * self._rng.uniform(0.8, 1.2)

    # --- in and out
    def enter(
        self,
        tenant: str,
        model: str,
        *,
        cost: int,
        tokens: int,
        eligible: Callable[[WorkerLink], bool],
        ahead: bool = False,
        priority: int = 0,
        weight: float = 1.0,
        within_s: float = math.inf,
    ) -> Ticket:
        """Line up at the end of the tenant's line, or of those `ahead`. `within_s`: what is left for the first token.

        Overloaded when too many wait, or when its turn would come too late.
        """
        estimate: float | None = None
        if not ahead:
            estimate = self.estimate(tenant, model, priority=priority, weight=weight)
            if estimate is not None:
                # Also of who is refused for it: else the longest waits would be the ones that nobody is told of.
                metrics.gauge(names.GATEWAY_QUEUE_DELAY).labels(model).set(min(estimate, MAX_TOLD_S))
            if self._early_refusal and estimate is not None and estimate > within_s * WAIT_SHARE:
                metrics.counter(names.GATEWAY_REFUSED).labels("late").inc()
                raise Overloaded(
                    "all workers are full, and its turn would not come within the limit (time to first token)",
                    retry_after=self._retry(estimate),
                )
            self._make_room(tenant, priority, estimate)
        turn: asyncio.Future[WorkerLink] = asyncio.get_running_loop().create_future()
        ticket = Ticket(tenant, model, max(1, cost), tokens, next(self._numbers), turn, eligible)
        ticket.ahead, ticket.priority, ticket.weight, ticket.estimate_s = ahead, priority, weight, estimate
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue()
        queue.holder(ticket).put(ticket)
        self._paces[model].begin(self._clock())
        self._count(ticket, 1)
        return ticket

    def reenter(self, ticket: Ticket) -> None:
        """The ticket's turn came and its worker was full after all: back to its place, the charge taken back."""
        assert ticket.turn.done()
        self.settle(ticket)
        ticket.turn = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(ticket.model, ModelQueue())
        queue.put_back(ticket)
        now = self._clock()
        self._paces[ticket.model].begin(now)
        self._paces[ticket.model].released(-ticket.cost, now)
        self._charge(ticket, -ticket.cost)
        self._count(ticket, 1)

    def settle(self, ticket: Ticket) -> None:
        """The submit that followed a turn has ended, one way or another. Idempotent."""
        if ticket.promised is not None:
            ticket.promised.seats.promised -= 1
            ticket.promised = None

    def leave(self, ticket: Ticket) -> None:
        """The request waits no more. Idempotent; to be called in a `finally`."""
        self.settle(ticket)
        self._take_out(ticket)
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
            ticket = queue.next(link)
            if ticket is None:
                return
            # One page more than the prompt fills: the look-ahead that admission asks for.
            need = -(-ticket.tokens // max(1, link.info.page_size)) + 1
            if need > pages and link.seats.taken + link.seats.promised > 0:
                return
            queue.release(ticket)
            self._paces[ticket.model].released(ticket.cost, self._clock())
            self._charge(ticket, ticket.cost)
            self._count(ticket, -1)
            pages -= need
            link.seats.promised += 1
            ticket.promised = link
            ticket.turn.set_result(link)

    # --- other gateways
    @property
    def owes(self) -> bool:
        """True when something was released that `take_charges` has not told."""
        return bool(self._charges)

    def take_charges(self) -> dict[str, dict[str, int]]:
        """Model -> tenant -> cost released here since the last call; with every model that somebody waits for."""
        taken, self._charges = self._charges, defaultdict(lambda: defaultdict(int))
        return {model: dict(taken.get(model, {})) for model in {*taken, *self._queues}}

    def charged_elsewhere(self, model: str, tenant: str, cost: int) -> None:
        """Another gateway has released `cost` of a tenant's."""
        queue = self._queues.get(model)
        if queue is not None:
            queue.charged_elsewhere(tenant, cost)

    # --- inside
    def _charge(self, ticket: Ticket, cost: int) -> None:
        if self._shared:
            self._charges[ticket.model][ticket.tenant] += cost

    def _make_room(self, tenant: str, priority: int, estimate: float | None) -> None:
        if self._waiting < self._max_waiting:
            return
        victim = self._least(tenant, priority)
        if victim is None:
            metrics.counter(names.GATEWAY_REFUSED).labels("full").inc()
            raise Overloaded("all workers are full and too many requests wait", retry_after=self._retry(estimate))
        metrics.counter(names.GATEWAY_REFUSED).labels("shed").inc()
        error = Overloaded(
            "all workers are full, and another request has taken its place in line",
            retry_after=self.retry_after(victim.tenant, victim.model, priority=victim.priority, weight=victim.weight),
        )
        self._take_out(victim)
        if not victim.turn.done():
            victim.turn.set_exception(error)
            victim.turn.exception()  # Its request may be cancelled before it looks.
        self._tidy(victim.model)

    def _least(self, tenant: str, priority: int) -> Ticket | None:
        """Who has to go for a newcomer: the newest of whoever holds the most places at the lowest priority."""
        levels = [
            (number, level)
            for queue in self._queues.values()
            for number, level in queue.levels.items()
            if number <= priority and any(level.busy())
        ]
        lowest = min((number for number, _ in levels), default=priority)
        lines: list[Line] = []
        mine = 0
        for number, level in levels:
            if number == lowest:
                lines += [line for _, line in level.busy()]
                mine = max(mine, len(level.lines[tenant].tickets) if tenant in level.lines else 0)
        longest = max(lines, key=lambda line: (len(line.tickets), line.tickets[-1].number), default=None)
        if longest is None or (lowest == priority and len(longest.tickets) <= mine + 1):
            return None
        return longest.tickets[-1]

    def _take_out(self, ticket: Ticket) -> None:
        queue = self._queues.get(ticket.model)
        if queue is not None and ticket.lined_up:
            queue.holder(ticket).take(ticket)
            self._count(ticket, -1)

    def _tidy(self, model: str) -> None:
        """Forget a queue that nobody is in: its virtual time has no meaning then."""
        queue = self._queues.get(model)
        if queue is not None and not queue.waiting:
            del self._queues[model]
            self._paces[model].end(self._clock())
            metrics.gauge(names.GATEWAY_QUEUE_DELAY).labels(model).set(0.0)

    def _count(self, ticket: Ticket, change: int) -> None:
        self._waiting += change
        model = ticket.model
        self._tokens[model] += change * ticket.tokens
        metrics.gauge(names.GATEWAY_WAITING_TOKENS).labels(model).set(self._tokens[model])
        metrics.gauge(names.GATEWAY_WAITING).set(self._waiting)
        if self._waiting:
            self.busy.set()
        else:
            self.busy.clear()
