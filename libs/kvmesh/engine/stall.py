"""Stall detector: there is work and nothing moves. It watches from a thread of its own, as the core's may be stuck."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvmesh.engine.events import Counters

_log = logging.getLogger(__name__)


class StallWatch:
    """`work` says that there is something to do, `progress` that something was done, `idle` that nothing is left to do
    here: no request, or none that could run before a peer has sent or taken its pages."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float],
        dump: Callable[[], str],
        on_stall: Callable[[bool], None] | None,
        counters: Counters,
    ) -> None:
        self._timeout = timeout_s
        self._clock = clock
        self._dump = dump
        self._on_stall = on_stall
        self._counters = counters
        self._since: float | None = None
        self._failed = False
        self._told = False
        self._stop = threading.Event()
        self._look_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def stalled(self) -> bool:
        """Judged now, so that it needs no thread."""
        since = self._since
        return self._failed or (since is not None and self._clock() - since > self._timeout)

    def work(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def progress(self) -> None:
        self._since = self._clock()

    def idle(self) -> None:
        self._since = None

    def fail(self) -> None:
        """The core is dead: stalled for good."""
        self._failed = True
        self.look()

    def start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def look(self) -> None:
        """Compare with what was told last, and tell the change once."""
        with self._look_lock:
            now = self.stalled
            if now == self._told:
                return
            self._told = now
        if now:
            self._counters.stalls += 1
            _log.error("no progress for %.1f s with work to do:\n%s", self._timeout, self._dump())
        else:
            _log.warning("the engine makes progress again")
        if self._on_stall is not None:
            self._on_stall(now)

    def _watch(self) -> None:
        while not self._stop.wait(self._timeout / 4):
            try:
                self.look()
            except Exception:
                _log.exception("stall watch failed")
