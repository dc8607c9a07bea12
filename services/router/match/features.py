"""What the verifier looks at in a pair that no guard refused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from services.router.match.align import Alignment, relation, weight
from services.router.match.guards import soft_kinds
from services.router.match.reading import Reading

NAMES = (
    "cosine",
    "cosine below 0.9",
    "cosine below 0.75",
    "share of weight paired",
    "weight unpaired on both sides",
    "weight unpaired on the fuller side",
    "heaviest unpaired",
    "words unpaired",
    "words unpaired on one side only",
    "synonyms",
    "derived",
    "typos",
    "kinds differ",
    "kind known",
    "phrases moved",
    "sisters unpaired",
    "length ratio",
    "trigrams shared",
    "words shared as written",
    "words paired",
    "all paired",
)
Features = npt.NDArray[np.float64]


def features(a: Reading, b: Reading, pairs: Alignment, cosine: float) -> Features:
    """float64 (len(NAMES),); the same for (b, a)."""
    weight_a = [weight(a.lowered.get(word, word)) for word in pairs.only_a]
    weight_b = [weight(b.lowered.get(word, word)) for word in pairs.only_b]
    paired = sum(weight(a.lowered.get(word, word)) for word in pairs.exact)
    stood = len(pairs.synonyms) + len(pairs.derived) + len(pairs.typos)
    left_a, left_b = sum(weight_a), sum(weight_b)
    sisters = sum(
        relation(a.lowered.get(x, x), b.lowered.get(y, y)) in ("sister", "opposite")
        for x in pairs.only_a[:8]
        for y in pairs.only_b[:8]
    )
    total = 2 * (paired + stood) + left_a + left_b
    longer, shorter = max(len(a.raw), len(b.raw)), min(len(a.raw), len(b.raw))
    set_a, set_b = set(a.raw), set(b.raw)
    grams_a, grams_b = _grams(" ".join(a.raw)), _grams(" ".join(b.raw))
    return np.array(
        [
            cosine,
            max(0.0, 0.9 - cosine),
            max(0.0, 0.75 - cosine),
            2 * (paired + stood) / total if total else 1.0,
            min(left_a, left_b),
            max(left_a, left_b),
            max([*weight_a, *weight_b], default=0.0),
            len(weight_a) + len(weight_b),
            abs(len(weight_a) - len(weight_b)),
            len(pairs.synonyms),
            len(pairs.derived),
            len(pairs.typos),
            soft_kinds(a, b),
            a.kind == b.kind != "",
            pairs.moved,
            min(sisters, 2),
            shorter / longer if longer else 1.0,
            len(grams_a & grams_b) / max(1, len(grams_a | grams_b)),
            len(set_a & set_b) / max(1, len(set_a | set_b)),
            min(len(pairs.exact) + stood, 6),
            not weight_a and not weight_b,
        ],
        dtype=np.float64,
    )


@lru_cache(maxsize=4096)
def _grams(text: str) -> frozenset[str]:
    text = f" {text} "
    return frozenset(text[i : i + 3] for i in range(len(text) - 2))
