"""The exposed tail of a transfer: what decode waited for KV after its source had computed the last of it.

Two machines share no clock, so two durations are compared that begin with one message, `RunAccepted`: on decode until
the pages could be read (all bytes counted, and copied from host memory where they went through it), on prefill until
the last layer was computed. The message's own way is on neither: the tail comes out too short by it (a fraction of a
millisecond), never too long. 0 = the transfer was hidden behind the computation.
"""

from __future__ import annotations

import time

from kvmesh.telemetry import metrics, names


class ExposedTail:
    """Of one transfer. Told of three moments, in whatever order they are known; observed once all are."""

    __slots__ = ("_accepted", "_computed_s", "_ready", "_transport")

    def __init__(self) -> None:
        self._accepted: float | None = None
        self._ready: float | None = None
        self._computed_s: float | None = None
        self._transport = ""

    def accepted(self) -> None:
        """Prefill has taken the request, now."""
        self._accepted = time.monotonic()
        self._observe()

    def ready(self, transport: str) -> None:
        """The pages can be read, now. `transport`: that they came by."""
        self._ready, self._transport = time.monotonic(), transport
        self._observe()

    def computed(self, after_ms: float) -> None:
        """Prefill tells that it had computed so long after it had accepted; 0 = it does not tell."""
        if after_ms > 0:
            self._computed_s = after_ms / 1e3
            self._observe()

    def _observe(self) -> None:
        if self._accepted is None or self._ready is None or self._computed_s is None:
            return
        tail = max(0.0, self._ready - self._accepted - self._computed_s)
        metrics.histogram(names.TRANSFER_EXPOSED).labels(self._transport).observe(tail)
        self._computed_s = None
