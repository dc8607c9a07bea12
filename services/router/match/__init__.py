"""Whether two questions that embed alike may share an answer: guards by rule, then a small trained verifier."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import InvalidArgument
from services.router.match.align import align
from services.router.match.features import features
from services.router.match.guards import ALL, refuse, same_text
from services.router.match.reading import read
from services.router.match.verifier import shipped

# Chosen on generated validation pairs, see tools/training/train_verifier.py.
DEFAULT_THRESHOLD = 0.4
# The verifier was trained on pairs from here on. NaN is below it.
LEAST_COSINE = 0.5


@dataclass(frozen=True, slots=True)
class Rules:
    """What a tenant's route asks of a pair: which guards are on, and how sure the verifier must be (0 is always)."""

    guards: frozenset[str] = ALL
    threshold: float = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        """Raises InvalidArgument on an unknown guard or a threshold outside 0..1."""
        if unknown := self.guards - ALL:
            raise InvalidArgument(f"unknown guards: {', '.join(sorted(unknown))}; there are {', '.join(sorted(ALL))}")
        if not 0.0 <= self.threshold <= 1.0:
            raise InvalidArgument(f"the verifier's threshold must be within 0 and 1, not {self.threshold}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`guard`: what refused, "verifier" for the model, "" when the pair is the same."""

    same: bool
    guard: str
    probability: float


DEFAULT = Rules()


def judge(asked: str, remembered: str, cosine: float, rules: Rules = DEFAULT) -> Verdict:
    """May the answer to `remembered` be given to `asked`? Symmetric in the two; safe from any thread."""
    if asked == remembered:
        return Verdict(True, "", 1.0)
    a, b = read(asked), read(remembered)
    if same_text(a, b):
        return Verdict(True, "", 1.0)
    if not cosine >= LEAST_COSINE:
        return Verdict(False, "cosine", 0.0)
    if a.raw > b.raw:
        a, b = b, a
    pairs = align(a, b)
    guard = refuse(a, b, pairs, rules.guards)
    if guard:
        return Verdict(False, guard, 0.0)
    probability = shipped().probability(features(a, b, pairs, cosine))
    same = probability >= rules.threshold
    return Verdict(same, "" if same else "verifier", probability)
