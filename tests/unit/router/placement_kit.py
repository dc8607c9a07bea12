"""A fleet that is told what a test says, and a placer over it; no streams, no clock but the test's."""

from __future__ import annotations

import random
from typing import Any

from kvmesh.proto.v1 import engine_pb2
from router_helpers import SEED, FakeClock, chain, kv_events, worker_info
from services.router.fleet import Fleet, Session
from services.router.placement.index import split
from services.router.placement.placer import Ask, Placer, Rules
from services.router.placement.score import Weights

PAGE = 4
STEP = 8 * PAGE
"""Tokens of one hash."""

TOKENS = list(range(1000, 1000 + 64 * STEP))


PLAIN = Weights(beta_prefill=1.0, beta_decode=1.0, inflight=0.1, recent=0.0, idle=0.0, jitter=0.0, session=0.1)
"""Numbers that a test can follow, whatever the defaults are tuned to."""


class Mesh:
    """Workers by id; each holds a prefix of TOKENS."""

    def __init__(self, rules: Rules | None = None, seed: int = 0) -> None:
        self.clock = FakeClock()
        self.fleet = Fleet(3.0, self.clock)
        self.placer = Placer(self.fleet, rules, clock=self.clock, rng=random.Random(seed))
        self.sessions: dict[str, Session] = {}
        self.sequences: dict[str, int] = {}

    def add(
        self,
        worker_id: str,
        role: str = "decode",
        *,
        load: int = 0,
        matched: int = 0,
        free: int | None = None,
        **fields: Any,
    ) -> Mesh:
        """A worker with `load` tokens that holds `matched` tokens (whole hashes of them); free pages: of 1000."""
        session = self.sessions[worker_id] = Session()
        self.fleet.register(worker_info(worker_id, role, **({"total_pages": 1000} | fields)), session)
        self.load(worker_id, queued_tokens=load, total_pages=1000, free_pages=1000 if free is None else free)
        self.sequences[worker_id] = 0
        held = split(chain(TOKENS, fields.get("base_seed", SEED), fields.get("page_size", PAGE)).hashes)
        self.events(worker_id, held[: matched // (8 * fields.get("page_size", PAGE))])
        return self

    def load(self, worker_id: str, **load: int) -> None:
        self.fleet.report(self.sessions[worker_id], engine_pb2.WorkerLoad(**load))

    def events(self, worker_id: str, stored: list[bytes] | None = None, removed: list[bytes] | None = None) -> None:
        self.sequences[worker_id] += 1
        self.fleet.kv_events(
            self.sessions[worker_id], kv_events(self.sequences[worker_id], stored or (), removed or ())
        )

    def leave(self, worker_id: str) -> None:
        self.fleet.detach(self.sessions.pop(worker_id))

    def ask(self, prompt_tokens: int = 3 * STEP + 4, **fields: Any) -> Ask:
        """A request whose prompt begins TOKENS."""
        chains = ((STEP, chain(TOKENS[:prompt_tokens]).hashes),)
        return Ask(**({"model": "tiny", "prompt_tokens": prompt_tokens, "chains": chains} | fields))

    def ranked(self, prompt_tokens: int = 3 * STEP + 4, alternates: int = 8, **fields: Any) -> list[str]:
        """Decode workers, best first."""
        pairs = self.placer.place(self.ask(prompt_tokens, **fields), alternates)
        return [pair.decode.worker_id for pair in pairs]

    def pairs(self, prompt_tokens: int = 3 * STEP + 4, alternates: int = 8, **fields: Any) -> dict[str, list[str]]:
        """Decode worker → its prefill workers, best first."""
        pairs = self.placer.place(self.ask(prompt_tokens, **fields), alternates)
        return {pair.decode.worker_id: [c.worker_id for c in pair.prefill] for pair in pairs}
