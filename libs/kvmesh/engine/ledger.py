"""Which requests' pages may be exposed: the one piece of state that service threads and the core both decide on.

The core may end a request at any moment (a deadline, a failed step) and give its pages to another. A descriptor that
left just then would let a peer write into foreign pages. So permission is granted here, under a lock, before `expose`
returns, and the core withdraws it here before it frees anything: whoever comes second sees the other's decision.
"""

from __future__ import annotations

import threading

from kvmesh.engine.events import RequestKey
from kvmesh.errors import Cancelled, FailedPrecondition


class ExposureLedger:
    """Per awaiting request: the generation granted, or None."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[RequestKey, int | None] = {}

    def open(self, key: RequestKey) -> None:
        """Core: the request awaits KV."""
        with self._lock:
            self._entries[key] = None

    def grant(self, key: RequestKey, generation: int) -> None:
        """Service: raises Cancelled if the request does not await KV, FailedPrecondition if a generation is live."""
        with self._lock:
            if key not in self._entries:
                raise Cancelled(f"request {key.request_id} does not await KV")
            if self._entries[key] is not None:
                raise FailedPrecondition(f"request {key.request_id} still has a live generation")
            self._entries[key] = generation

    def drained(self, key: RequestKey, generation: int) -> None:
        """Service: that generation is over, another may be granted."""
        with self._lock:
            if self._entries.get(key) == generation:
                self._entries[key] = None

    def granted(self, key: RequestKey) -> int | None:
        """The generation granted now."""
        with self._lock:
            return self._entries.get(key)

    def close(self, key: RequestKey) -> int | None:
        """Core: no more grants; returns the generation that is out, if any."""
        with self._lock:
            return self._entries.pop(key, None)
