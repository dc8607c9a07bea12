"""What a look-up in the semantic cache tells, and how it is decided which remembered answer serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from services.router.cache.fingerprint import CacheKey
from services.router.match import Verdict
from services.router.near.index import Near, NearIndex

MAX_CANDIDATES = 8
BELOW_TAU = 0.05
LEAST_SHOWN = 0.8
"""Candidates are listed from BELOW_TAU below τ on, but from LEAST_SHOWN at most; only those from τ on can serve."""


def floor(tau: float) -> float:
    """Least cosine of a candidate that is listed."""
    return min(tau, max(tau - BELOW_TAU, LEAST_SHOWN))


class Hit(NamedTuple):
    """A remembered answer, as it was stored.

    score: cosine of its question with the one asked. age_s: seconds since it was stored. purge_id: hex. text: its
    question. verifier: probability that both ask the same, NaN where that was not asked.
    """

    score: float
    answer: bytes
    age_s: float = 0.0
    purge_id: str = ""
    text: str = ""
    verifier: float = math.nan


class Candidate(NamedTuple):
    """A remembered question that came near, and what became of it. guard: why it was refused, "" for no reason."""

    similarity: float
    text: str
    guard: str
    verifier: float
    served: bool
    purge_id: str


class NearOutcome(NamedTuple):
    """Of a look-up: `result` is "hit", "miss", "guarded", "timeout" or "skipped"."""

    result: str
    hit: Hit | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an entry lies in Redis and what it is purged by. expires_ms: since 1970. See `kvmesh.store.keys`."""

    entry_id: bytes
    tag: str
    exact: str
    tenant: str
    model: str
    family: str
    epoch: int
    expires_ms: int


Decide = Callable[[str, float], Verdict]


def choose(
    index: NearIndex, key: CacheKey, near: list[Near], tau: float, decide: Decide, explain: bool
) -> tuple[NearOutcome, Near | None]:
    """What a look-up found, and the entry that is to serve; the nearest that is judged to ask the same does."""
    candidates: list[Candidate] = []
    hit: Hit | None = None
    served: Near | None = None
    refused = False
    for each in near:
        entry, guard, verifier = each.entry, "", math.nan
        eligible = each.score >= tau and hit is None
        if eligible or explain:
            guard, verifier = _verdict(key, each, decide)
        serves = eligible and not guard
        refused = refused or (eligible and bool(guard))
        purge_id = entry.entry_id.hex()
        if serves:
            index.touch(each.kept)
            served = each
            hit = Hit(each.score, entry.answer or b"", each.age_s, purge_id, entry.text, verifier)
        candidates.append(Candidate(each.score, entry.text, guard, verifier, serves, purge_id))
    result = "hit" if hit is not None else "guarded" if refused else "miss"
    return NearOutcome(result, hit, tuple(candidates)), served


def _verdict(key: CacheKey, near: Near, decide: Decide) -> tuple[str, float]:
    """(what refuses, "" for nothing; the verifier's probability, NaN where it was not asked)."""
    entry = near.entry
    if key.text == entry.text:
        # The same text in other tokens was rendered differently: something else than the text is different.
        return ("" if key.prompt == entry.prompt else "rendering"), math.nan
    verdict = decide(entry.text, near.score)
    if verdict.same:
        return "", verdict.probability
    by_verifier = verdict.guard in ("", "verifier")
    return verdict.guard or "verifier", verdict.probability if by_verifier else math.nan
