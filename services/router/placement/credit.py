"""Credit: what this router has placed and no worker has shown yet.

Load comes from the workers. Between a placement and the first report that lists it, though, a worker looks idler than
it is, and a burst would pile up on it. So each placement counts here, in tokens, until the worker's report lists the
request as seen, the gateway reports its end, the worker leaves, or `ttl_s` has passed; whichever comes first. Nothing
else ever touches a credit, so lost reports cannot skew load for longer than `ttl_s`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass(slots=True)
class _Account:
    """Credits of one worker: request id → tokens, and their sum."""

    tokens: dict[str, int] = field(default_factory=dict)
    total: int = 0


class CreditBook:
    """All credits of one router. Not thread-safe: it lives on the event loop.

    on_change(worker_id, tokens): told each time the sum of a worker changes.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Clock = time.monotonic,
        *,
        max_requests: int = 65536,
        on_change: Callable[[str, int], None] | None = None,
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._max_requests = max_requests
        self._on_change = on_change or (lambda worker_id, tokens: None)
        self._accounts: dict[str, _Account] = {}
        # request id → (time of placement, workers charged). Insertion order is expiry order: the lifetime is one value.
        self._placed: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()

    def take(self, request_id: str, charges: Mapping[str, int]) -> None:
        """Charge worker id → tokens (each at least 0) for a placement; an earlier placement of the request ends."""
        self.end(request_id)
        self.sweep()
        while len(self._placed) >= self._max_requests:
            self.end(next(iter(self._placed)))
        if not charges:
            return
        self._placed[request_id] = (self._clock(), tuple(charges))
        for worker_id, tokens in charges.items():
            assert tokens >= 0, tokens
            account = self._accounts.setdefault(worker_id, _Account())
            account.tokens[request_id] = tokens
            account.total += tokens
            self._on_change(worker_id, account.total)

    def seen(self, worker_id: str, request_ids: Iterable[str]) -> None:
        """The worker's report shows these requests: its own credits for them end, those of other workers stay."""
        for request_id in request_ids:
            self._refund(worker_id, request_id)

    def end(self, request_id: str) -> None:
        """The request is over or placed anew: every credit for it ends. Idempotent."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            for worker_id in placed[1]:
                self._refund(worker_id, request_id)

    def drop_worker(self, worker_id: str) -> None:
        """The worker left, or a new incarnation took its place: what was placed on it is gone."""
        if self._accounts.pop(worker_id, None) is not None:
            self._on_change(worker_id, 0)

    def sweep(self) -> None:
        """End the credits older than the lifetime."""
        oldest_kept = self._clock() - self._ttl_s
        while self._placed:
            request_id, (placed_at, _) = next(iter(self._placed.items()))
            if placed_at > oldest_kept:
                return
            self.end(request_id)

    def tokens(self, worker_id: str) -> int:
        """Tokens credited to a worker now."""
        account = self._accounts.get(worker_id)
        return account.total if account else 0

    def requests(self, worker_id: str) -> int:
        """Placements credited to a worker now."""
        account = self._accounts.get(worker_id)
        return len(account.tokens) if account else 0

    def snapshot(self) -> dict[str, int]:
        """Worker id → tokens, expired credits left out."""
        self.sweep()
        return {worker_id: account.total for worker_id, account in self._accounts.items()}

    @property
    def total(self) -> int:
        """Tokens credited over all workers."""
        return sum(account.total for account in self._accounts.values())

    def _refund(self, worker_id: str, request_id: str) -> None:
        account = self._accounts.get(worker_id)
        if account is None or request_id not in account.tokens:
            return
        account.total -= account.tokens.pop(request_id)
        if not account.tokens:
            del self._accounts[worker_id]
        self._on_change(worker_id, account.total)
