"""Byte counters that a writing engine stores to and nobody announces: a memfd per link, and one thread that looks.

A word a (source rank, slot): generation << 44 | bytes of that generation that have landed. It only grows within a
generation. The thread sleeps while nothing is granted, and looks ever more rarely while nothing changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvmesh.errors import InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.transfer.immediate import MAX_SLOTS, pack, unpack
from kvmesh.transfer.poller import sharpen_timers
from kvmesh.transfer.posting import BYTES_MASK, GENERATION_SHIFT, WORD_BYTES
from kvmesh.transfer.transports.base import Arrival

log = logging.getLogger(__name__)
MIN_SLEEP_S = 50e-6
MAX_SLEEP_S = 2e-3
# The part of the time since the last change that is slept.
SLEEP_PART = 1 / 16
# Stale words that are remembered as told.
MAX_STALE = 4096
# Of a source on this host. Each has a word per slot that is looked at, and a page of memory for hundreds of them.
MAX_RANKS = 64


class LinkCounters:
    """The counters of one link. `grant`, `revoke`, `read` on the loop; `changed` on the watch's thread."""

    def __init__(self, ranks: int, on_change: Callable[[], None]) -> None:
        """Raises InvalidArgument (a peer says how many ranks it has), Unavailable."""
        if not 1 <= ranks <= MAX_RANKS:
            raise InvalidArgument(f"counters are for 1..{MAX_RANKS} ranks of a source, not {ranks}")
        self.ranks = ranks
        self.on_change = on_change
        self.region = Region.create("kv-counters", ranks * MAX_SLOTS * WORD_BYTES)
        self._words = self.region.buf.cast("Q")
        # By immediate: bytes told so far, per rank.
        self._granted: dict[int, list[int]] = {}
        # The watch's: words as it saw them last.
        self._seen: dict[int, list[int]] = {}
        self._stale: set[int] = set()

    def _load(self, slot: int) -> list[int]:
        return [self._words[rank * MAX_SLOTS + slot] for rank in range(self.ranks)]

    def grant(self, immediate: int) -> None:
        """Zero the slot's words: its writer has not been told yet."""
        slot, _ = unpack(immediate)
        for rank in range(self.ranks):
            self._words[rank * MAX_SLOTS + slot] = 0
        self._granted[immediate] = [0] * self.ranks
        self._seen[immediate] = [0] * self.ranks

    def revoke(self, immediate: int) -> None:
        """The generation is over."""
        self._granted.pop(immediate, None)
        self._seen.pop(immediate, None)

    @property
    def active(self) -> bool:
        """True while anything may arrive."""
        return bool(self._granted)

    def changed(self) -> bool:
        """True where a word has changed since the last call."""
        found = False
        for immediate, seen in self._seen.items():
            words = self._load(immediate >> 20)
            if words != seen:
                self._seen[immediate] = words
                found = True
        return found

    def read(self) -> list[Arrival]:
        """What has landed since the last call. A word of another generation is reported once, as stale."""
        arrivals = []
        for immediate, told in self._granted.items():
            slot, generation = unpack(immediate)
            for rank, word in enumerate(self._load(slot)):
                nbytes = word & BYTES_MASK
                if word >> GENERATION_SHIFT != generation:
                    if word and word not in self._stale:
                        if len(self._stale) >= MAX_STALE:
                            self._stale.clear()
                        self._stale.add(word)
                        arrivals.append(Arrival(pack(slot, word >> GENERATION_SHIFT & 0xFFFFF), nbytes))
                elif nbytes > told[rank]:
                    arrivals.append(Arrival(immediate, nbytes - told[rank]))
                    told[rank] = nbytes
        return arrivals

    def close(self) -> None:
        """Let go of the memory; nothing is granted any more."""
        self._granted.clear()
        self._seen.clear()
        self._words.release()
        self.region.close()


class CounterWatch:
    """One thread for all links."""

    def __init__(self) -> None:
        self._links: set[LinkCounters] = set()
        self._changed = threading.Condition()
        self._last = 0.0
        self._thread: threading.Thread | None = None
        self._stopping = False

    def grant(self, counters: LinkCounters, immediate: int) -> None:
        """See LinkCounters; from now on it is watched."""
        with self._changed:
            counters.grant(immediate)
            self._links.add(counters)
            self._last = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvmesh-counters", daemon=True)
                self._thread.start()
            self._changed.notify()

    def revoke(self, counters: LinkCounters, immediate: int) -> None:
        """See LinkCounters."""
        with self._changed:
            counters.revoke(immediate)
            if not counters.active:
                self._links.discard(counters)

    def remove(self, counters: LinkCounters) -> None:
        """Close a link's counters."""
        with self._changed:
            self._links.discard(counters)
            counters.close()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        sharpen_timers()
        while True:
            with self._changed:
                while not self._links and not self._stopping:
                    self._changed.wait(60.0)
                if self._stopping:
                    return
                now = time.monotonic()
                for counters in self._links:
                    if counters.changed():
                        self._last = now
                        counters.on_change()
                idle = now - self._last
            time.sleep(min(max(idle * SLEEP_PART, MIN_SLEEP_S), MAX_SLEEP_S))
