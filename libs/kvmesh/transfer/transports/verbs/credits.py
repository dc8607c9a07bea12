"""Credits: nothing overflows because everything is counted. Pure.

At the writer, per queue pair: a run takes its work requests from the send queue, one receive of the peer and one entry
of the mailbox. The send queue's come back with the run's completion. The peer's come back when it says how many
receives it has posted in all, which it does after it has read the entries of the receives that it posts again.

At the destination, per queue pair: that number is due once half the receives were posted again since it was last told.
So at most two such words can be on their way to a writer that does not poll, and it keeps more receives for them.
"""

from __future__ import annotations

from collections import deque

from kvmesh.errors import DataLoss, Internal

# Of the writer's receive queue and the destination's send queue.
CREDIT_WORDS = 4
_MODULUS = 1 << 32


class SendCredits:
    """One queue pair of a writer. depth: of its send queue; receives: of the peer's receive queue."""

    __slots__ = ("_completed", "_free", "_granted", "_outstanding", "_receives", "_started", "depth")

    def __init__(self, depth: int, receives: int) -> None:
        self.depth = depth
        self._receives = receives
        self._free = depth
        self._granted = receives
        self._started = 0
        self._completed = 0
        self._outstanding: deque[int] = deque()

    @property
    def room(self) -> int:
        """Work requests that the next run may have, its closing one included; 0 where none may start."""
        if self._started == self._granted or self._started - self._completed == self._receives or self._free < 2:
            return 0
        return self._free

    @property
    def outstanding(self) -> int:
        """Work requests posted and not completed."""
        return self.depth - self._free

    @property
    def runs(self) -> int:
        """Runs posted and not completed."""
        return len(self._outstanding)

    def take(self, requests: int) -> int:
        """Start a run of so many work requests; returns its number, 0 first."""
        if not 2 <= requests <= self.room:
            raise Internal(f"a run of {requests} work requests where {self.room} may be posted")
        self._free -= requests
        self._outstanding.append(requests)
        self._started += 1
        return self._started - 1

    def completed(self, run: int) -> None:
        """The closing request of a run has completed: so have all of it. In order. Raises DataLoss."""
        if run != self._completed or not self._outstanding:
            raise DataLoss(f"run {run} completed where run {self._completed} was next")
        self._free += self._outstanding.popleft()
        self._completed += 1

    def returned(self, word: int) -> None:
        """The peer says how many receives it has posted in all, modulo 2^32. Raises DataLoss where that cannot be."""
        more = (word - self._granted) % _MODULUS
        if self._granted + more > self._started + self._receives:
            raise DataLoss(
                f"the peer returns {more} receives, {self._started + self._receives - self._granted} at most"
            )
        self._granted += more

    def flushed(self) -> None:
        """The queue pair is gone, and all that was posted with it."""
        self._free = self.depth
        self._outstanding.clear()
        self._granted = self._started = self._completed = 0


class ReceiveCredits:
    """One queue pair of a destination. receives: of its receive queue, all posted at the start; words: that may be on
    their way at a time."""

    __slots__ = ("_consumed", "_posted", "_sending", "_told", "_words", "receives")

    def __init__(self, receives: int, words: int = CREDIT_WORDS) -> None:
        self.receives = receives
        self._words = words
        self._consumed = 0
        self._posted = receives
        self._told = receives
        self._sending = 0

    def consumed(self) -> int:
        """A receive has completed; returns the number of the run that it belongs to. Raises DataLoss."""
        if self._consumed == self._posted:
            raise DataLoss("a receive completed that was not posted")
        self._consumed += 1
        return self._consumed - 1

    @property
    def missing(self) -> int:
        """Receives to be posted again: their entries have been read."""
        return self._consumed + self.receives - self._posted

    def reposted(self, count: int) -> None:
        """They are."""
        if count > self.missing:
            raise Internal(f"{count} receives posted where {self.missing} were missing")
        self._posted += count

    def due(self) -> int | None:
        """The word to send to the writer now, None for none."""
        if self._sending == self._words or self._posted - self._told < (self.receives + 1) // 2:
            return None
        return self._posted % _MODULUS

    def telling(self) -> None:
        """That word is on its way."""
        self._told = self._posted
        self._sending += 1

    def told(self) -> None:
        """A word has left the send queue. Raises DataLoss."""
        if not self._sending:
            raise DataLoss("a word completed that was not sent")
        self._sending -= 1
