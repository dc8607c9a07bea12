"""From a prompt to a pool: `Classes.choose`. An alias has a small and a large model; no other model is ever named."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from kvmesh.config import RouterSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.telemetry import metrics, names
from services.router.classes import model
from services.router.classes.features import NAMES, of_neutral
from services.router.classes.neutral import neutral
from services.router.classes.sessions import MAX_ID_CHARS, Key, Sessions

log = logging.getLogger(__name__)

Pool = Literal["small", "large"]


@dataclass(frozen=True, slots=True)
class Pools:
    """The two models of an alias."""

    small: str
    large: str


@dataclass(frozen=True, slots=True)
class ClassDecision:
    """What was chosen, and why: `reason` is "probability", "session", "no_vector", "not_served".

    `probability` that the small pool suffices is 0, and `features` are empty, where it is not known (no vector).
    """

    alias: str
    model: str
    pool: Pool
    probability: float
    threshold: float
    reason: str
    features: Mapping[str, float]


class Classes:
    """Pools by alias, and the classifier that chooses between them. Owned by the event loop; nothing blocks."""

    def __init__(
        self,
        pools: Mapping[str, Pools],
        weights: model.Weights | None,
        threshold: float,
        *,
        session_ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without weights there are no pools. `threshold`: least probability for the small pool."""
        assert weights is not None or not pools
        self._pools = dict(pools)
        self._weights = weights
        self.threshold = threshold
        self.sessions = Sessions(session_ttl_s, clock=clock)

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> Classes:
        """Raises FailedPrecondition for weights that cannot be used, or that did not prove that they pay."""
        pools = {alias: Pools(small, large) for alias, (small, large) in settings.class_pools.items()}
        if not pools:
            return cls({}, None, 2.0)
        if settings.embedder == "none" or settings.cache != "semantic":
            raise FailedPrecondition(
                "classes need vectors, which the semantic cache makes: set embedder and cache=semantic, or no classes"
            )
        path = settings.class_weights or model.FILE
        weights = model.load(path, embedder=settings.embedder)
        if not weights.passed and not settings.class_unproven:
            raise FailedPrecondition(
                f"{path.name} did not meet the rule on held-out subjects: train on labels of your own models "
                "(tools/training/train_complexity.py), or accept it with class_unproven"
            )
        threshold = settings.class_threshold
        if threshold is None:
            threshold = weights.threshold(settings.class_quality)
            if threshold > 1.0:
                log.warning("no threshold keeps the quality %.3f: every class is large", settings.class_quality)
        return cls(pools, weights, threshold, session_ttl_s=settings.class_session_ttl_s)

    @property
    def aliases(self) -> dict[str, str]:
        """Alias → large model: what an alias stands for where nothing can be asked."""
        return {alias: pools.large for alias, pools in self._pools.items()}

    @property
    def version(self) -> str:
        """Changes with whatever decides which model answers for an alias; "" without classes."""
        if not self._pools or self._weights is None:
            return ""
        told = repr((sorted(self._pools.items()), self.threshold)).encode() + model.dump(self._weights)
        return hashlib.blake2b(told, digest_size=8).hexdigest()

    def has(self, alias: str) -> bool:
        """Whether a name is an alias with classes."""
        return alias in self._pools

    def models(self, alias: str) -> tuple[str, ...]:
        """What an alias may stand for, the large model first; empty where it has no classes."""
        pools = self._pools.get(alias)
        return (pools.large, pools.small) if pools is not None else ()

    @staticmethod
    def reading(text: str) -> str:
        """The text to embed for `choose`: without sentences that speak to the router, mostly `text` itself."""
        return neutral(text)

    def choose(
        self,
        alias: str,
        text: str,
        vector: npt.NDArray[Any] | None,
        session_id: str = "",
        tenant: str = "",
        served: Collection[str] | None = None,
    ) -> ClassDecision | None:
        """The pool for a prompt; None where the name has no classes.

        `text`: the last user text as sent. `vector`: the embedding of `reading(text)`, or None (no embedder, too long,
        too late). `served`: models that are served now; None = both of the alias's.
        """
        pools = self._pools.get(alias)
        if pools is None or self._weights is None:
            return None
        small, probability, reason = False, 0.0, "no_vector"
        told: dict[str, float] = {}
        if vector is not None and self._weights.usable(vector):
            seen = of_neutral(neutral(text), len(text))
            told = dict(zip(NAMES, seen.tolist(), strict=True))
            probability = self._weights.probability(seen, vector)
            small, reason = probability >= self.threshold, "probability"
        key: Key = (tenant, session_id[:MAX_ID_CHARS], alias)
        if session_id:
            before = self.sessions.is_large(key)
            if small and before is True:
                small, reason = False, "session"
            elif not small and before is False and reason == "no_vector":
                # A late or missing vector is no sign of difficulty.
                small, reason = True, "session"
        meant_small = small
        chosen, other = (pools.small, pools.large) if small else (pools.large, pools.small)
        if served is not None and chosen not in served and other in served:
            chosen, small, reason = other, not small, "not_served"
        if session_id:
            # Up for good, for whatever reason; down to small only while the large model is away.
            self.sessions.keep(key, large=not (meant_small and small))
        pool: Pool = "small" if small else "large"
        metrics.counter(names.CLASS_DECISIONS).labels(alias, pool, reason).inc()
        return ClassDecision(alias, chosen, pool, probability, self.threshold, reason, told)
