"""Wilson's interval of a rate."""

from __future__ import annotations

import math


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Lower and upper bound of `hits / trials`, 95 % by default; (0, 1) without trials."""
    if trials <= 0:
        return 0.0, 1.0
    rate = hits / trials
    middle = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    whole = 1 + z * z / trials
    low = 0.0 if hits <= 0 else max(0.0, (middle - spread) / whole)
    return low, 1.0 if hits >= trials else min(1.0, (middle + spread) / whole)
