"""The class that a session has: it keeps it, unless it goes up. A bounded memory, by tenant and session."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

Clock = Callable[[], float]
Key = tuple[str, str, str]
"""Tenant, session id, alias."""

MAX_SESSIONS = 65536
MAX_ID_CHARS = 256


class Sessions:
    """Least recently used are forgotten first, and all after `ttl_s` seconds without a request."""

    def __init__(self, ttl_s: float, *, limit: int = MAX_SESSIONS, clock: Clock = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._clock = clock
        self._large: OrderedDict[Key, tuple[float, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._large)

    def is_large(self, key: Key) -> bool | None:
        """Whether the session's class is the large one; None for a session that is new or forgotten."""
        found = self._large.get(key)
        if found is None:
            return None
        expires, large = found
        if self._clock() >= expires:
            del self._large[key]
            return None
        return large

    def keep(self, key: Key, large: bool) -> None:
        """Remember a class; a large one is never taken back before it is forgotten."""
        large = large or self.is_large(key) is True
        self._large[key] = (self._clock() + self._ttl_s, large)
        self._large.move_to_end(key)
        while len(self._large) > self._limit:
            self._large.popitem(last=False)
