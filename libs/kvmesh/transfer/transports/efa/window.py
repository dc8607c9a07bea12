"""What a writer may have in flight. Pure. (The destination's side is `verbs.credits.ReceiveCredits`.)

Every write takes a place of the writer's send queue, until it has completed, and one of the destination's receives,
until the destination says that it has posted more. Completions come in any order, so they are only counted.
"""

from __future__ import annotations

from kvmesh.errors import DataLoss, Internal

# Receives that a writer keeps for credit words. At most two can be on their way to one that does not poll: a word is
# due when half of the receives were posted again, and it has no more credit than what it has read of.
WORD_RECEIVES = 4
# A destination sends its next word when the last one has completed: they cannot overtake one another by much.
WORDS_IN_FLIGHT = 1
_MODULUS = 1 << 32
_HALF = 1 << 31


class SendWindow:
    """depth: of the send queue; receives: of the destination's receive queue, all posted at the start."""

    __slots__ = ("_completed", "_granted", "_receives", "_started", "depth")

    def __init__(self, depth: int, receives: int) -> None:
        self.depth = depth
        self._receives = receives
        self._granted = receives
        self._started = 0
        self._completed = 0

    @property
    def room(self) -> int:
        """Writes that may be posted now."""
        return min(self.depth - self._started + self._completed, self._granted - self._started)

    @property
    def outstanding(self) -> int:
        """Writes posted and not completed."""
        return self._started - self._completed

    def take(self, count: int) -> None:
        """So many are posted."""
        if not 1 <= count <= self.room:
            raise Internal(f"{count} writes where {self.room} may be posted")
        self._started += count

    def completed(self, count: int = 1) -> None:
        """So many of them have. Raises DataLoss."""
        if self._completed + count > self._started:
            raise DataLoss("a write completed that was not posted")
        self._completed += count

    def returned(self, word: int) -> None:
        """The peer says how many receives it has posted in all, modulo 2^32. A word that was overtaken says nothing
        new. Raises DataLoss where that cannot be."""
        more = (word - self._granted) % _MODULUS
        if more >= _HALF:
            if _MODULUS - more > self._granted - self._receives:
                raise DataLoss(f"the peer takes back {_MODULUS - more} receives")
            return
        if self._granted + more > self._started + self._receives:
            raise DataLoss(
                f"the peer returns {more} receives, {self._started + self._receives - self._granted} at most"
            )
        self._granted += more

    def abandon(self) -> None:
        """The queue pair is gone, and all that was posted with it."""
        self._completed = self._started
