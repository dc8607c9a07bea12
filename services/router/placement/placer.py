"""Placement of a request: from the fleet as it is to ranked pairs, and what is remembered of a placement.

Everything named for one request belongs to one family (model, revision, tokenizer), so that any alternate can take
over. `place` changes nothing; `take` counts what was chosen: credit, session, probe.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition, KvmeshError, Unavailable
from kvmesh.proto.v1 import router_pb2
from services.router.fleet import Family, Fleet
from services.router.placement import score
from services.router.placement.ask import Ask, Rules
from services.router.placement.breaker import Breakers, State
from services.router.placement.credit import CreditBook
from services.router.placement.pairs import Candidate, RankedPair, charges, work
from services.router.placement.pool import Pool
from services.router.placement.score import Floats, Ints
from services.router.placement.sessions import Served, Sessions, rendezvous
from services.router.placement.survey import Rated, Survey, unrated

__all__ = ["Ask", "Placer", "Rules"]

Clock = Callable[[], float]
Flags = npt.NDArray[np.bool_]

PLACED_S = 60.0
MAX_PLACED = 65_536
"""Placements whose work can be taken back: from a request that waits in line, each turn is one."""


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
        # Request id → (time, work by worker id) of the last seconds' placements, oldest first.
        self._placed: OrderedDict[str, tuple[float, dict[str, float]]] = OrderedDict()
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
        survey = self.survey(ask, alternates)
        if survey.error is not None:
            raise survey.error
        return survey.pairs

    def survey(self, ask: Ask, alternates: int | None = None) -> Survey:
        """`place`, with all that led to it; where there is no pair, with the reason in `error`."""
        more = self.rules.alternates if alternates is None else alternates
        pool = self.pool(ask.model)
        matched = self._fleet.index.match(ask.chains, self._fleet.columns.capacity)[pool.slots]
        np.minimum(matched, max(0, ask.prompt_tokens - 1), out=matched)
        load = self._load()[pool.slots]
        credit = self._fleet.columns.credit[pool.slots]
        survey = Survey(pool, ask, matched, load, credit, unrated(pool.decode[:0]), unrated(pool.prefill[:0]))
        try:
            self._rate(survey)
        except KvmeshError as error:
            survey.error = error
        else:
            survey.pairs = self._pairs(survey, more)
        return survey

    def pool(self, model: str) -> Pool:
        """The workers of a model."""
        if self._epoch != self._fleet.epoch:
            self._epoch = self._fleet.epoch
            self._pools.clear()
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(model, self._fleet.workers)
        return pool

    def _rate(self, survey: Survey) -> None:
        """Rate the decode workers that may serve the request, and the prefill workers of the best one's family."""
        pool, ask, weights = survey.pool, survey.ask, self.rules.weights
        served = self.sessions.get(ask.session) if ask.session else None
        at = self._unbroken(survey, self._decoders(pool, ask))
        last = served.decode if served is not None else None
        survey.decoders = self._rated(survey, at, weights.beta_decode, last, room=True)
        family = pool.family[survey.decoders.at[survey.decoders.order[0]]]
        at = self._allowed(pool, ask, pool.prefill)
        at = self._unbroken(survey, at[pool.family[at] == family])
        last = served.prefill if served is not None else None
        survey.prefillers = self._rated(survey, at, weights.beta_prefill, last, room=False)

    def _pairs(self, survey: Survey, more: int) -> list[RankedPair]:
        pool, decoders, prefillers = survey.pool, survey.decoders, survey.prefillers
        best = decoders.order
        family = pool.family[decoders.at[best]]
        best = best[family == family[0]][: more + 1]
        pairs = []
        senders: dict[int, tuple[Candidate, ...]] = {}
        for candidate, position in zip(decoders.candidates(pool, best), decoders.at[best].tolist(), strict=True):
            if not pool.receives[position] or self._prefills_itself(candidate, survey.ask):
                pairs.append(RankedPair(candidate, ()))
                continue
            kind = int(pool.kind[position])
            if kind not in senders:
                senders[kind] = tuple(prefillers.candidates(pool, _senders(pool, prefillers, kind)[: more + 1]))
            pairs.append(RankedPair(candidate, senders[kind]))
        return pairs

    def _rated(self, survey: Survey, at: Ints, beta: float, last: str | None, *, room: bool) -> Rated:
        pool, ask, columns, weights = survey.pool, survey.ask, self._fleet.columns, self.rules.weights
        slots = pool.slots[at]
        matched, load = survey.matched[at], survey.load[at] + survey.credit[at]
        relative = score.relative_load(load, ask.prompt_tokens, weights.idle)
        scores = score.score(matched, relative, ask.prompt_tokens, beta, weights)
        if ask.session and len(at):
            scores[self._of_session(pool, at, ask.session, last)] += weights.session
        preferred = self._room(pool, ask, at, matched) if room else np.ones(len(at), np.bool_)
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
        """Tokens by slot, credit apart."""
        columns, weights = self._fleet.columns, self.rules.weights
        self.credit.sweep()
        load = weights.queued * columns.queued + weights.inflight * columns.inflight
        if weights.recent:
            self._decay()
            load += weights.recent * self._busy() * columns.recent
        return load

    def _busy(self) -> float:
        """0 on an idle fleet, 1 where half of the workers or more have something to do. What was placed a moment ago is
        load only where there is load: on an idle fleet it is done, and must not drive the next request away from what
        it left behind."""
        columns = self._fleet.columns
        there = int(np.count_nonzero(columns.reported))
        working = columns.reported & (columns.sequences + columns.queued + columns.credit > 0)
        return min(1.0, 2 * int(np.count_nonzero(working)) / there) if there else 1.0

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
        if ask.grammar:
            at = at[pool.grammars[at]]
            if not len(at):
                raise FailedPrecondition(f"no worker of model {pool.model!r} serves grammars")
        # A shorter context than the prompt's cannot serve it; where none is long enough, the worker says so itself.
        long_enough = at[pool.context[at] > ask.prompt_tokens]
        return long_enough if len(long_enough) else at

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

    def _unbroken(self, survey: Survey, at: Ints) -> Ints:
        """Those whose breaker lets a request through; all of them where none does: never refuse for it."""
        if self.breakers.all_closed:
            return at
        infos = [survey.pool.infos[i] for i in at.tolist()]
        for info in infos:
            state = self.breakers.state(info.worker_id, info.incarnation)
            if state is not State.CLOSED:
                survey.breakers[info.worker_id] = state
        allowed = np.array([self.breakers.allows(i.worker_id, i.incarnation) for i in infos], np.bool_)
        if not allowed.any():
            return at
        survey.broken.update(at[~allowed].tolist())
        return at[allowed]

    def _prefills_itself(self, decode: Candidate, ask: Ask) -> bool:
        """Whether so little of the prompt is missing on the decode worker that asking another costs more."""
        return ask.prompt_tokens - 1 - decode.matched <= (self.rules.local_prefill_tokens or decode.info.page_size)

    # --- what follows a decision ----------------------------------------------------------------------------------

    def take(self, request_id: str, pair: RankedPair, ask: Ask) -> None:
        """The pair was named for the request."""
        weights = self.rules.weights
        cost = charges(pair, ask.prompt_tokens, queued=weights.queued, inflight=weights.inflight)
        self.credit.take(request_id, cost)
        if weights.recent:
            self._take_work(request_id, work(pair, ask.prompt_tokens, weights))
        chosen = (pair.decode, *pair.prefill[:1])
        if ask.session:
            self.sessions.note(ask.session, Served(pair.decode.worker_id, chosen[1].worker_id if pair.prefill else ""))
        if not self.breakers.all_closed:
            for candidate in chosen:
                self.breakers.chosen(candidate.worker_id, candidate.info.incarnation, request_id)

    def _take_work(self, request_id: str, tokens: dict[str, float]) -> None:
        """Work of a placement; that of an earlier one of the request, which was refused or lost, is taken back."""
        self._decay()
        now, recent = self._decayed_at, self._fleet.columns.recent
        at, before = self._placed.pop(request_id, (now, {}))
        left = math.exp((at - now) / self.rules.weights.recent_s)
        for worker_id in {*before, *tokens}:
            worker = self._fleet.get(worker_id)
            if worker is not None:
                change = tokens.get(worker_id, 0.0) - left * before.get(worker_id, 0.0)
                # A worker that came back since has none of it.
                recent[worker.slot] = max(0.0, recent[worker.slot] + change)
        self._placed[request_id] = (now, tokens)
        while len(self._placed) > MAX_PLACED or now - next(iter(self._placed.values()))[0] > PLACED_S:
            self._placed.popitem(last=False)

    def report(self, request: router_pb2.ReportRequest) -> None:
        """The request is over: its credit ends, and breakers hear of it."""
        self.credit.end(request.request_id)
        self._placed.pop(request.request_id, None)
        for failure in request.failures:
            worker = self._fleet.get(failure.worker_id)
            if worker is not None and failure.incarnation in (0, worker.info.incarnation):
                self.breakers.failed(failure.worker_id, worker.info.incarnation, failure.code)
        if request.code == 0:
            for worker_id in {request.decode_worker, request.prefill_worker}:
                worker = self._fleet.get(worker_id)
                if worker is not None:
                    self.breakers.succeeded(worker_id, worker.info.incarnation)
        self.breakers.ended(request.request_id)

    def sweep(self) -> None:
        """End old credit, and show breakers that have become half-open. A few times a second."""
        self.credit.sweep()
        self.breakers.expire()
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


def _senders(pool: Pool, prefillers: Rated, kind: int) -> Ints:
    """Indices of those that can send to workers of that kind; pages of another size, which are slow, only after
    all others."""
    order = prefillers.order
    order = order[pool.fits[pool.kind[prefillers.at[order]], kind]]
    other_page = pool.page[prefillers.at[order]] != pool.kinds[kind].page_size
    if other_page.any():
        order = np.concatenate([order[~other_page], order[other_page]])
    return order
