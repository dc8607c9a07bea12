"""Stop strings over a stream of text: where the output ends, and how much of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stopped(NamedTuple):
    """`text` may be shown now. `stop` is the stop string that ended the output, None while it goes on."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds the first stop string to COMPLETE, wherever chunk boundaries fall; ties go to the longest one.

    Text that may be the beginning of a stop string is held back, so that no part of one is ever shown. The result
    depends on the text alone, never on how it was cut: output = everything before the stop string that completes first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string ends everything at once"
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        # Characters of what is held in which no stop string may end any more.
        self._past = 0
        self.stopped: str | None = None

    @property
    def held(self) -> str:
        """Text seen and not yet shown."""
        return self._held

    def push(self, text: str, *, armed: bool = True) -> Stopped:
        """Add text; nothing may follow once a stop string was met. No stop string ends in text that is not `armed`, but
        one may begin there."""
        assert self.stopped is None
        if not self._stops:
            return Stopped(text, None)
        seen = self._held + text
        match = self._match(seen) if armed else None
        if match is not None:
            start, stop = match
            self._held, self.stopped = "", stop
            return Stopped(seen[:start], stop)
        cut = self._hold_from(seen)
        self._held, self._past = seen[cut:], max(0, (self._past if armed else len(seen)) - cut)
        return Stopped(seen[:cut], None)

    def flush(self) -> str:
        """The output ended for another reason: what was held back is text after all."""
        text, self._held = self._held, ""
        return text

    def _match(self, seen: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = seen.find(stop, max(0, self._past - len(stop) + 1))
            if start >= 0:
                # The first occurrence of each stop is also the one of it that ends first.
                key = (start + len(stop), start, stop)
                if best is None or key < best:
                    best = key
        return None if best is None else (best[1], best[2])

    def _hold_from(self, seen: str) -> int:
        """Start of the longest suffix that is a proper prefix of some stop string."""
        for start in range(max(0, len(seen) - self._longest + 1), len(seen)):
            if seen[start] in self._first and any(stop.startswith(seen[start:]) for stop in self._stops):
                return start
        return len(seen)
