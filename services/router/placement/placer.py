"""Placement of a request: from the fleet as it is to ranked pairs, and what is remembered of a placement.

Everything named for one request belongs to one family (model, revision, tokenizer), so that any alternate can take
over. `place` changes nothing; `take` counts what was chosen: credit, session, probe.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition, Unavailable
from kvmesh.kv.hashing import CHAIN_STRIDE
from kvmesh.proto.v1 import router_pb2
from services.router.fleet import Family, Fleet
from services.router.placement import score
from services.router.placement.breaker import BreakerRules, Breakers
from services.router.placement.credit import CreditBook
from services.router.placement.pairs import Candidate, RankedPair, charges
from services.router.placement.pool import Pool
from services.router.placement.score import Floats, Ints, Weights
from services.router.placement.sessions import Served, Sessions, rendezvous

Clock = Callable[[], float]
Flags = npt.NDArray[np.bool_]

MAX_CHAINS = 8


@dataclass(frozen=True, slots=True)
class Rules:
    """What placement goes by.

    stale_s: KV events of a loaded worker are in doubt when none came for so long. local_prefill_tokens: where a decode
    worker lacks no more of the prompt than this, it prefills on its own; 0: one page. look_ahead_pages: what a decode
    worker needs beyond the prompt.
    """

    weights: Weights = field(default_factory=Weights)
    breakers: BreakerRules = field(default_factory=BreakerRules)
    alternates: int = 3
    stale_s: float = 3.0
    local_prefill_tokens: int = 0
    look_ahead_pages: int = 1
    credit_ttl_s: float = 2.0
    max_sessions: int = 65_536


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement needs to know of a request.

    chains: (tokens that one hash stands for, packed hashes). family: place within it alone. revision, tokenizer: pinned
    by output that is there already. session holds the tenant; "" = none.
    """

    model: str
    prompt_tokens: int
    chains: tuple[tuple[int, bytes], ...] = ()
    exclude: frozenset[str] = frozenset()
    unified_only: bool = False
    family: Family | None = None
    revision: str = ""
    tokenizer: str = ""
    session: str = ""

    @classmethod
    def of(cls, request: router_pb2.RouteRequest, model: str, tenant: str, family: Family | None = None) -> Ask:
        """The placement part of a request whose name stands for `model`."""
        chains = tuple((chain.block_size * CHAIN_STRIDE, chain.hashes) for chain in request.chains[:MAX_CHAINS])
        return cls(
            model=model,
            prompt_tokens=request.prompt_tokens,
            chains=chains,
            exclude=frozenset(request.exclude_workers),
            unified_only=request.sampling.HasField("prompt_logprobs"),
            family=family,
            revision=request.pinned_revision,
            tokenizer=request.pinned_tokenizer,
            session=f"{tenant}\0{request.session_id}" if request.session_id else "",
        )


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
        return [
            Candidate(pool.workers[self.at[i]].info, float(self.load[i]), int(self.matched[i]), float(self.scores[i]))
            for i in chosen.tolist()
        ]


class Placer:
    """Places requests over a fleet; owns credit, sessions and breakers. Lives on the event loop, never waits."""

    def __init__(
        self,
        fleet: Fleet,
        rules: Rules | None = None,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.rules = rules = rules or Rules()
        self._fleet = fleet
        self._clock = clock
        self._rng = np.random.default_rng((rng or random.Random()).getrandbits(64))
        self._pools: dict[str, Pool] = {}
        self._epoch = -1
        self._decayed_at = clock()
        self.credit = CreditBook(rules.credit_ttl_s, clock, on_change=self._credited)
        self.sessions = Sessions(rules.max_sessions)
        self.breakers = Breakers(rules.breakers, clock, on_change=self._show_breaker)
        fleet.add_listener(self)

    # --- deciding -------------------------------------------------------------------------------------------------

    def place(self, ask: Ask, alternates: int | None = None) -> list[RankedPair]:
        """The best pair and up to `alternates` further ones.

        Raises Unavailable when no decode worker is left, FailedPrecondition when only role unified would do and none
        serves the model.
        """
        more = self.rules.alternates if alternates is None else alternates
        pool = self.pool(ask.model)
        decoders, prefillers = self.rate(pool, ask)
        best = decoders.order
        family = pool.family[decoders.at[best]]
        best = best[family == family[0]][: more + 1]
        pairs = []
        for candidate, position in zip(decoders.candidates(pool, best), decoders.at[best].tolist(), strict=True):
            senders = prefillers.order[:0]
            if pool.receives[position] and not self._prefills_itself(candidate, ask, int(pool.page[position])):
                senders = self._senders(pool, prefillers, position)[: more + 1]
            pairs.append(RankedPair(candidate, tuple(prefillers.candidates(pool, senders))))
        return pairs

    def pool(self, model: str) -> Pool:
        """The workers of a model."""
        if self._epoch != self._fleet.epoch:
            self._epoch = self._fleet.epoch
            self._pools.clear()
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(model, self._fleet.workers)
        return pool

    def rate(self, pool: Pool, ask: Ask) -> tuple[Rated, Rated]:
        """All decode and all prefill workers that may serve the request, rated. Raises as `place` does."""
        prompt = max(1, ask.prompt_tokens)
        matched = self._fleet.index.match(ask.chains, self._fleet.columns.capacity)[pool.slots]
        np.minimum(matched, prompt - 1, out=matched)
        load = self._load()[pool.slots]
        decode = self._decoders(pool, ask)
        served = self.sessions.get(ask.session) if ask.session else None
        weights = self.rules.weights
        return (
            self._rated(pool, ask, decode, matched, load, weights.beta_decode, served and served.decode, fit=True),
            self._rated(
                pool, ask, self._prefillers(pool, ask), matched, load, weights.beta_prefill, served and served.prefill
            ),
        )

    def _rated(
        self,
        pool: Pool,
        ask: Ask,
        at: Ints,
        matched: Ints,
        load: Floats,
        beta: float,
        last: str | None,
        *,
        fit: bool = False,
    ) -> Rated:
        columns, weights = self._fleet.columns, self.rules.weights
        slots = pool.slots[at]
        matched, load = matched[at], load[at]
        relative = score.relative_load(load, ask.prompt_tokens)
        scores = score.score(matched, relative, ask.prompt_tokens, beta, weights)
        if ask.session and len(at):
            scores[self._of_session(pool, at, ask.session, last)] += weights.session
        preferred = self._room(pool, ask, at, matched) if fit else np.ones(len(at), np.bool_)
        if len(at) and self._blind(slots, ask):
            order = score.power_of_two(load, preferred, self._rng)
        else:
            order = score.ranking(
                scores,
                matched=matched,
                load=load,
                sequences=columns.sequences[slots],
                preferred=preferred,
                jitter=weights.jitter,
                rng=self._rng,
            )
        return Rated(at, matched, load, relative, scores, order)

    def _load(self) -> Floats:
        """Tokens by slot."""
        columns, weights = self._fleet.columns, self.rules.weights
        self.credit.sweep()
        load = weights.queued * columns.queued + weights.inflight * columns.inflight + columns.credit
        if weights.recent:
            self._decay()
            load += weights.recent * columns.recent
        return load

    def _decay(self) -> None:
        now = self._clock()
        self._fleet.columns.recent *= math.exp((self._decayed_at - now) / self.rules.weights.recent_s)
        self._decayed_at = now

    def _blind(self, slots: Ints, ask: Ask) -> bool:
        """True when nothing is known of what any of them holds: a score would only send all to one."""
        if not ask.chains:
            return True
        columns = self._fleet.columns
        quiet = columns.events_at[slots] < self._clock() - self.rules.stale_s
        loaded = columns.sequences[slots] + columns.queued[slots] > 0
        return not bool((columns.synced[slots] & ~(quiet & loaded)).any())

    def _room(self, pool: Pool, ask: Ask, at: Ints, matched: Ints) -> Flags:
        """Which of them can hold the prompt and the look-ahead now, as far as reports tell."""
        columns, slots, page = self._fleet.columns, pool.slots[at], pool.page[at]
        need = (ask.prompt_tokens - matched) / page + self.rules.look_ahead_pages
        free = columns.free_pages[slots] - columns.credit[slots] / page
        return (free >= need) | ~columns.reported[slots]

    def _of_session(self, pool: Pool, at: Ints, session: str, last: str | None) -> int:
        if last is not None:
            there = np.flatnonzero(at == pool.position.get(last, -1))
            if len(there):
                return int(there[0])
        return rendezvous(session, pool.names[at])

    def _decoders(self, pool: Pool, ask: Ask) -> Ints:
        """Positions of the decode workers that may serve the request."""
        at = pool.decode
        if not len(at):
            raise Unavailable(pool.absence())
        at = self._allowed(pool, ask, at)
        if not len(at):
            raise Unavailable(f"no worker serves model {pool.model!r} now but those that this request may not have")
        if ask.unified_only:
            at = at[pool.unified[at]]
            if not len(at):
                raise FailedPrecondition(
                    f"prompt_logprobs needs a worker of role unified; none serves model {pool.model!r}"
                )
        # A shorter context than the prompt's cannot serve it; where none is long enough, the worker says so itself.
        long_enough = at[pool.context[at] > ask.prompt_tokens]
        return self._unbroken(pool, long_enough if len(long_enough) else at)

    def _prefillers(self, pool: Pool, ask: Ask) -> Ints:
        return self._unbroken(pool, self._allowed(pool, ask, pool.prefill))

    def _allowed(self, pool: Pool, ask: Ask, at: Ints) -> Ints:
        """Those of the right family that did not fail this request."""
        if ask.family is not None:
            at = at[pool.family[at] == pool.family_number(ask.family)]
        if ask.revision or ask.tokenizer:
            right = [_pinned(family, ask) for family in pool.families]
            at = at[np.array(right, np.bool_)[pool.family[at]]]
        for worker_id in ask.exclude:
            position = pool.position.get(worker_id)
            if position is not None:
                at = at[at != position]
        return at

    def _unbroken(self, pool: Pool, at: Ints) -> Ints:
        """Those whose breaker lets a request through; all of them where none does: never refuse for it."""
        if self.breakers.all_closed:
            return at
        infos = [pool.workers[i].info for i in at.tolist()]
        allowed = at[np.array([self.breakers.allows(i.worker_id, i.incarnation) for i in infos], np.bool_)]
        return allowed if len(allowed) else at

    def _prefills_itself(self, decode: Candidate, ask: Ask, page: int) -> bool:
        """Whether so little of the prompt is missing on the decode worker that asking another costs more."""
        return ask.prompt_tokens - 1 - decode.matched <= (self.rules.local_prefill_tokens or page)

    def _senders(self, pool: Pool, prefillers: Rated, target: int) -> Ints:
        """Indices of those that can send to it; pages of another size, which are slow, only after all others."""
        order = prefillers.order
        at = prefillers.at[order]
        order = order[pool.fits[pool.kind[at], pool.kind[target]] & (at != target)]
        other_page = pool.page[prefillers.at[order]] != pool.page[target]
        sorted_by_page: Ints = order[np.argsort(other_page, kind="stable")]
        return sorted_by_page

    # --- what follows a decision ----------------------------------------------------------------------------------

    def take(self, request_id: str, pair: RankedPair, ask: Ask) -> None:
        """The pair was named for the request."""
        cost = charges(pair, ask.prompt_tokens)
        self.credit.take(request_id, cost)
        if self.rules.weights.recent:
            self._decay()
            for worker_id, tokens in cost.items():
                worker = self._fleet.get(worker_id)
                if worker is not None:
                    self._fleet.columns.recent[worker.slot] += tokens
        chosen = (pair.decode, *pair.prefill[:1])
        if ask.session:
            self.sessions.note(ask.session, Served(pair.decode.worker_id, chosen[1].worker_id if pair.prefill else ""))
        if not self.breakers.all_closed:
            for candidate in chosen:
                self.breakers.chosen(candidate.worker_id, candidate.info.incarnation)

    def report(self, request: router_pb2.ReportRequest) -> None:
        """The request is over: its credit ends, and breakers hear of it."""
        self.credit.end(request.request_id)
        for failure in request.failures:
            worker = self._fleet.get(failure.worker_id)
            if worker is not None and failure.incarnation in (0, worker.info.incarnation):
                self.breakers.failed(failure.worker_id, worker.info.incarnation, failure.code)
        if request.code == 0:
            for worker_id in {request.decode_worker, request.prefill_worker}:
                worker = self._fleet.get(worker_id)
                if worker is not None:
                    self.breakers.succeeded(worker_id, worker.info.incarnation)

    def sweep(self) -> None:
        """End old credit, and show breakers that have become half-open. A few times a second."""
        self.credit.sweep()
        if not self.breakers.all_closed:
            for worker in list(self._fleet.workers):
                self._show_breaker(worker.worker_id)

    def _credited(self, worker_id: str, tokens: int) -> None:
        worker = self._fleet.get(worker_id)
        if worker is not None:
            self._fleet.columns.credit[worker.slot] = tokens

    def _show_breaker(self, worker_id: str) -> None:
        worker = self._fleet.get(worker_id)
        if worker is not None:
            state = self.breakers.state(worker_id, worker.info.incarnation)
            if state != worker.breaker:
                self._fleet.show_breaker(worker, str(state))

    # --- FleetListener --------------------------------------------------------------------------------------------

    def worker_changed(self, worker_id: str) -> None:
        """A worker that comes back bears its breaker's state."""
        self._show_breaker(worker_id)

    def worker_loaded(self, worker_id: str) -> None:
        """Nothing: the fleet's columns hold it."""

    def worker_left(self, worker_id: str) -> None:
        """Its placements are lost."""
        self.credit.drop_worker(worker_id)

    def worker_replaced(self, worker_id: str) -> None:
        """The old process took its placements with it."""
        self.credit.drop_worker(worker_id)


def _pinned(family: Family, ask: Ask) -> bool:
    return (not ask.revision or family.revision == ask.revision) and (
        not ask.tokenizer or family.tokenizer == ask.tokenizer
    )
