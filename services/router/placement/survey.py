"""One look at the fleet for one request: who was rated how, and the pairs that follow. Kept, it explains a decision."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvmesh.errors import KvmeshError
from services.router.placement.ask import Ask
from services.router.placement.pairs import Candidate, RankedPair
from services.router.placement.pool import Pool
from services.router.placement.score import Floats, Ints


@dataclass(slots=True)
class Rated:
    """Candidates of one phase. Arrays are in parallel; `order` holds indices into them, best first."""

    at: Ints
    matched: Ints
    load: Floats
    relative: Floats
    scores: Floats
    order: Ints

    def candidates(self, pool: Pool, chosen: Ints) -> list[Candidate]:
        """Candidates for the result; `chosen` holds indices into the arrays."""
        rows = zip(
            self.at[chosen].tolist(),
            self.load[chosen].tolist(),
            self.matched[chosen].tolist(),
            self.scores[chosen].tolist(),
            strict=True,
        )
        return [Candidate(pool.infos[at], load, matched, score, pool.targets[at]) for at, load, matched, score in rows]


def unrated(at: Ints) -> Rated:
    """Candidates of a request that cannot be placed."""
    none = np.zeros(len(at))
    return Rated(at, none.astype(np.int64), none, none, none, np.arange(len(at)))


@dataclass(slots=True)
class Survey:
    """The fleet as one request saw it. It costs what the decision computed anyway, and never changes later.

    matched, load, credit: by position in the pool, load without credit. broken: positions that a breaker kept out.
    breakers: states by worker id, closed ones left out. error: why there are no pairs.
    """

    pool: Pool
    ask: Ask
    matched: Ints
    load: Floats
    credit: Floats
    decoders: Rated
    prefillers: Rated
    broken: set[int] = field(default_factory=set)
    breakers: dict[str, str] = field(default_factory=dict)
    pairs: list[RankedPair] = field(default_factory=list)
    error: KvmeshError | None = None
