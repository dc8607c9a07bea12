"""What looking for an answer comes to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from kvmesh.proto.v1 import router_pb2
from services.router.near.nearcache import Candidate

Served = Collection[tuple[str, str]]
"""Pairs of model and revision whose answers will do: what the name of the request stands for now."""


@dataclass(frozen=True, slots=True)
class ExactOutcome:
    """kind `hit`: the answer is there. `follow`, `lead`: the flight is. `skipped`: Redis is away, or was not asked."""

    kind: Literal["hit", "follow", "lead", "miss", "skipped"]
    answer: router_pb2.CachedAnswer | None = None
    flight: router_pb2.Flight | None = None


@dataclass(frozen=True, slots=True)
class NearAnswer:
    """result: as `NearOutcome` has it. candidates: what came near, and what became of it."""

    result: str
    answer: router_pb2.CachedAnswer | None = None
    candidates: tuple[Candidate, ...] = ()
