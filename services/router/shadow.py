"""Shadows: a small share of semantic hits is asked again in the background, and both answers are compared.

What comes of it is an estimate of the false-hit rate with its interval, exported and shown by `kvmesh cache stats`;
it allows for the judge's own errors.
The share, and a budget of its own, bound what it costs; a shadow that is lost changes nothing.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from services.router.judge.rate import Estimate, corrected
from services.router.match.wilson import wilson

Clock = Callable[[], float]

MAX_OPEN = 256
LIFE_S = 900.0
MAX_VERDICTS = 4096
"""The newest, which the estimate is of: what was mended long ago says nothing of the cache as it is now."""

ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shadow:
    """A hit that is asked again: what was asked, what was remembered, and the answer that was served."""

    tenant: str
    asked: str
    remembered: str
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
        self._verdicts: deque[bool] = deque(maxlen=MAX_VERDICTS)
        self.judged = 0
        self.wrong = 0
        self.untold = 0
        """Shadows that were answered, but could not be judged."""

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

    def count(self, right: bool | None) -> None:
        """A verdict; None: it cannot be told. Those count apart, as if wrong as often as others."""
        if right is None:
            self.untold += 1
            return
        self.judged += 1
        self.wrong += not right
        self._verdicts.append(right)

    def raw(self) -> Estimate:
        """Share of the newest that were called wrong, and its 95 % Wilson interval; (0, 0, 1) before the first."""
        judged = len(self._verdicts)
        wrong = judged - sum(self._verdicts)
        return Estimate(wrong / judged if judged else 0.0, *wilson(wrong, judged))

    def estimate(self) -> Estimate:
        """The rate of wrong hits that this share speaks for; (0, 0, 1) before the first."""
        judged = len(self._verdicts)
        return corrected(judged - sum(self._verdicts), judged)
