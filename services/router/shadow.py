"""Shadows: a small share of semantic hits is asked again in the background, and both answers are compared.

What comes of it is an estimate of the false-hit rate with its interval, exported and shown by `kvmesh cache stats`.
The share, and a budget of its own, bound what it costs; a shadow that is lost changes nothing.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]

MAX_OPEN = 256
LIFE_S = 900.0
ID_BYTES = 16
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Shadow:
    """A hit that is asked again: what was asked, and the answer that was served."""

    tenant: str
    asked: str
    served: str


class Shadows:
    """Chooses hits and counts verdicts. `rate`: share of hits (0 to 0.01). `per_minute`: bound on how many."""

    def __init__(
        self,
        rate: float,
        per_minute: float,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._rate = rate
        self._per_s = per_minute / 60.0
        self._burst = max(1.0, per_minute / 6.0)
        self._clock = clock
        self._rng = rng or random.Random()
        self._allowance = self._burst
        self._at = clock()
        self._open: OrderedDict[str, tuple[float, Shadow]] = OrderedDict()
        self.judged = 0
        self.wrong = 0

    def __len__(self) -> int:
        return len(self._open)

    def choose(self, shadow: Shadow) -> str:
        """An id when this hit is to be asked again, "" when not."""
        if self._rate <= 0 or self._rng.random() >= self._rate:
            return ""
        now = self._clock()
        self._allowance = min(self._burst, self._allowance + (now - self._at) * self._per_s)
        self._at = now
        if self._allowance < 1.0:
            return ""
        self._allowance -= 1.0
        while len(self._open) >= MAX_OPEN:
            self._open.popitem(last=False)
        shadow_id = secrets.token_hex(ID_BYTES)
        self._open[shadow_id] = (now + LIFE_S, shadow)
        return shadow_id

    def take(self, shadow_id: str, tenant: str) -> Shadow | None:
        """The shadow, once; None when it is unknown, too old or another tenant's."""
        found = self._open.get(shadow_id)
        if found is None or found[1].tenant != tenant:
            return None
        del self._open[shadow_id]
        expires, shadow = found
        return shadow if self._clock() < expires else None

    def count(self, right: bool) -> None:
        """A verdict."""
        self.judged += 1
        self.wrong += not right

    def estimate(self) -> tuple[float, float, float]:
        """Share of wrong hits among those judged, and its 95 % Wilson interval; (0, 0, 1) before the first."""
        return wilson(self.wrong, self.judged)


def wilson(wrong: int, total: int) -> tuple[float, float, float]:
    """(share, low, high) of a proportion at 95 %. Wilson 1927."""
    if total <= 0:
        return 0.0, 0.0, 1.0
    share = wrong / total
    spread = Z95 * math.sqrt(share * (1 - share) / total + Z95**2 / (4 * total**2))
    middle = share + Z95**2 / (2 * total)
    scale = 1 + Z95**2 / total
    return share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
