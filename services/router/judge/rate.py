"""From verdicts of a judge that errs to the rate of what it judges, with an interval that knows of its errors."""

from __future__ import annotations

import math
from typing import NamedTuple

Z95 = 1.959964


class Skill(NamedTuple):
    """How a judge did on labelled pairs: wrong ones that it called wrong, and right ones that it called right."""

    found: int
    wrong: int
    kept: int
    right: int

    @property
    def sensitivity(self) -> float:
        """Share of wrong pairs called wrong."""
        return self.found / self.wrong

    @property
    def specificity(self) -> float:
        """Share of right pairs called right."""
        return self.kept / self.right


SKILL = Skill(found=70, wrong=85, kept=82, right=85)
"""On the labelled pairs that were held out: `python benchmarks/router.py judge` prints it."""


class Estimate(NamedTuple):
    """A rate with its 95 % interval."""

    rate: float
    low: float
    high: float


def corrected(wrong: int, judged: int, skill: Skill = SKILL) -> Estimate:
    """The rate behind `wrong` verdicts of `judged` (Rogan and Gladen 1978); (0, 0, 1) before the first.

    The interval allows for chance in both the verdicts and the judge's own test (Lang and Reiczigel 2014).
    """
    gain = skill.sensitivity + skill.specificity - 1
    if judged <= 0 or gain <= 0:
        return Estimate(0.0, 0.0, 1.0)
    # Each of the three shares is drawn a little to the middle, as if some more trials had been half and half.
    n, n_wrong, n_right = judged + Z95**2, skill.wrong + 2, skill.right + 2
    share = (wrong + Z95**2 / 2) / n
    sensitivity, specificity = (skill.found + 1) / n_wrong, (skill.kept + 1) / n_right
    spread_wrong = sensitivity * (1 - sensitivity) / n_wrong
    spread_right = specificity * (1 - specificity) / n_right
    slope = sensitivity + specificity - 1
    if slope <= 0:
        return Estimate(0.0, 0.0, 1.0)
    middle = min(1.0, max(0.0, (share + specificity - 1) / slope))
    shift = 2 * Z95**2 * (middle * spread_wrong - (1 - middle) * spread_right)
    variance = share * (1 - share) / n + middle**2 * spread_wrong + (1 - middle) ** 2 * spread_right
    half = Z95 * math.sqrt(variance) / slope
    low, high = _unit(middle + shift - half), _unit(middle + shift + half)
    rate = _unit((wrong / judged + skill.specificity - 1) / gain)
    return Estimate(min(max(rate, low), high), low, high)


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))
