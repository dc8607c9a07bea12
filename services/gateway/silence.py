"""Tells when a peer has been silent for too long, and does not take our own standstill for its silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A timer this late (as a share of the limit) means that this process did not run: what came meanwhile is unread yet.
LATE_SHARE = 0.1
GRACE_SHARE = 0.25


class SilenceWatch:
    """Calls `on_silent` once when `heard` was not called for `limit_s` seconds. One timer, none per message.

    When the process itself was held up (stopped, starved of CPU), the peer's messages wait in our own buffers: the
    watch then gives a grace to read them before it judges.
    """

    def __init__(
        self, limit_s: float, on_silent: Callable[[], object], *, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._limit_s = limit_s
        self._on_silent = on_silent
        self._loop = loop or asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._graced = False
        self.silent = False
        self._timer = self._at(self._heard + limit_s)

    def heard(self) -> None:
        """Something came from the peer."""
        self._heard = self._loop.time()
        self._graced = False

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        self._timer.cancel()

    def _at(self, due: float) -> asyncio.TimerHandle:
        return self._loop.call_at(due, self._check, due)

    def _check(self, due: float) -> None:
        now = self._loop.time()
        if self._heard + self._limit_s > now:
            self._timer = self._at(self._heard + self._limit_s)
        elif now - due > LATE_SHARE * self._limit_s and not self._graced:
            self._graced = True
            self._timer = self._at(now + GRACE_SHARE * self._limit_s)
        else:
            self.silent = True
            self._on_silent()
