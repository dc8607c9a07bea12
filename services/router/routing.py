"""One routing decision, within the time the gateway waits.

Order: what the name stands for → the remembered answer, or the flight that will have it (one look at Redis) → a similar
question's answer → the class of an alias → a pair of workers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection

from kvmesh.config import RouterSettings
from kvmesh.errors import InvalidArgument, KvmeshError, NotCached, NotFound, Unavailable
from kvmesh.kv.hashing import HASH_BYTES
from kvmesh.proto.v1 import router_admin_pb2, router_pb2
from kvmesh.telemetry import about, metrics, names, tracing
from services.router.cache import policy, stored
from services.router.cache.answers import AnswerCache
from services.router.cache.policy import CachePlan, Mode
from services.router.classes.feedback import Feedback
from services.router.classes.pools import Classes
from services.router.decisions import Decision, Decisions
from services.router.explain import Trace, Traces
from services.router.fleet import MAX_ID_BYTES, MAX_NAME_BYTES, Family, Fleet
from services.router.gauges import FleetGauges
from services.router.judge import head, judge
from services.router.judge.evidence import closeness
from services.router.placement.ask import Ask, Rules
from services.router.placement.explain import explain
from services.router.placement.models import resolve_model
from services.router.placement.pairs import decodes
from services.router.placement.placer import Placer
from services.router.placement.survey import Survey
from services.router.shadow import Shadow, Shadows

Clock = Callable[[], float]

PLACEMENT_RESERVE_S = 0.03
"""Of the caller's deadline: what look-ups leave for placement and the way back."""

SHADOW_EMBED_S = 1.0

MAX_EXCLUDED = 256
MAX_CHAINS_SENT = 64
"""More than are looked at (see `ask.MAX_CHAINS`), so that a newer gateway may send more."""

DEFAULT_LIFE_S = 600.0


class Routing:
    """Decides for requests; owns placement, the decisions that wait for a report, and what they went by."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        cache: AnswerCache,
        *,
        classes: Classes | None = None,
        feedback: Feedback | None = None,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._aliases = settings.alias_map
        self._fleet = fleet
        self._cache = cache
        self._cache_s = (settings.redis_timeout_ms + settings.embed_timeout_ms) / 1000
        self._classes = classes or Classes({}, None, 2.0)
        self.feedback = feedback or Feedback()
        self._serving: tuple[int, frozenset[Family]] = (-1, frozenset())
        self._background: set[asyncio.Task[None]] = set()
        self.placer = Placer(fleet, Rules.of(settings), clock=clock, rng=rng)
        self.gauges = FleetGauges(fleet, self.placer.breakers)
        self.decisions = Decisions(clock)
        self.traces = Traces()
        self.shadows = Shadows(settings.shadow_rate, settings.shadow_per_minute, clock=clock, rng=rng)
        self._tell_false_hits()

    async def route(
        self, request: router_pb2.RouteRequest, tenant: str, remaining_s: float | None
    ) -> router_pb2.RouteResponse:
        """A remembered answer, a flight to follow or a placement; `remaining_s`: what is left of the caller's deadline.

        Raises InvalidArgument, NotFound (no such model), Unavailable (it is not served now), FailedPrecondition;
        NotCached for a request that only the cache may answer.
        """
        check_request(request)
        trace = Trace(request.request_id, request.client_request_id, tenant, request.model)
        with about.of_request(request.request_id), tracing.span(names.SPAN_ROUTER_ROUTE) as span:
            span.set_attribute(names.ATTR_REQUEST_ID, request.request_id)
            try:
                response = await self._decide(request, tenant, remaining_s, trace)
            except KvmeshError as error:
                trace.done(error.reason, "", "")
                raise
            finally:
                self.traces.add(trace)
            span.set_attribute(names.ATTR_DECISION, trace.decision)
            span.set_attribute(names.GEN_AI_RESPONSE_MODEL, response.model)
            if response.HasField("placement"):
                span.set_attribute(names.ATTR_DECODE_WORKER, response.placement.pair.decode.worker_id)
        metrics.counter(names.ROUTER_DECISIONS).labels(trace.decision).inc()
        return response

    async def _decide(
        self, request: router_pb2.RouteRequest, tenant: str, remaining_s: float | None, trace: Trace
    ) -> router_pb2.RouteResponse:
        models = self._models(request.model)
        plan = trace.plan = self._cache.plan(request, tenant)
        trace.outcome = "miss" if plan.mode > Mode.OFF and plan.read else "bypass"
        budget = self._cache_s if remaining_s is None else min(self._cache_s, remaining_s - PLACEMENT_RESERVE_S)
        until = time.monotonic() + budget
        served = self._served(models)
        with trace.part("exact"):
            # Of several models, which one answers is not known yet, and so neither who leads. A prompt that is to be
            # made anew leads nothing either: it would come back to follow itself.
            exact = await self._cache.exact_or_flight(
                plan,
                served,
                gateway_id=request.gateway_id,
                fly=len(models) == 1 and not self._other_prompt(request, models[0]),
                budget_s=budget,
                count=not plan.only_cached,
            )
        if exact.answer is not None:
            return self._answer(exact.answer, plan, trace)
        if exact.kind == "follow":
            return self._follow(request, tenant, exact.flight, plan, trace)
        try:
            with trace.part("semantic"):
                near = await self._cache.near_answer(
                    plan,
                    served,
                    budget_s=until - time.monotonic(),
                    explain=plan.only_cached,
                    count=not plan.only_cached,
                )
            trace.candidates = near.candidates
            if near.answer is not None:
                self._end_flight(exact.flight)
                remembered = next((each.text for each in near.candidates if each.served), "")
                return self._answer(near.answer, plan, trace, remembered)
            model = models[0]
            if len(models) > 1:
                with trace.part("class"):
                    model = await self._class(request, tenant, models, trace)
            ask = Ask.of(request, model, tenant)
            with trace.part("placement"):
                survey = self.placer.survey(ask)
            trace.rows = lambda: explain(survey)
            if plan.only_cached:
                raise NotCached("there is no remembered answer, and no other was allowed")
            if self._other_prompt(request, model):
                trace.done("other prompt", model, "")
                return router_pb2.RouteResponse(model=model, cache=trace.outcome)
            if len(models) > 1:
                with trace.part("exact"):
                    exact = await self._cache.exact_or_flight(
                        plan,
                        served,
                        gateway_id=request.gateway_id,
                        budget_s=until - time.monotonic(),
                        count=not plan.only_cached,
                    )
                if exact.answer is not None:
                    return self._answer(exact.answer, plan, trace)
                if exact.kind == "follow":
                    return self._follow(request, tenant, exact.flight, plan, trace)
            self._cache.missed(plan)
            return self._place(request, tenant, survey, plan, exact.flight, trace)
        except BaseException:
            # Whoever follows must not wait for a leader that never was.
            self._end_flight(exact.flight)
            raise

    # --- the four ends --------------------------------------------------------------------------------------------

    def _answer(
        self, answer: router_pb2.CachedAnswer, plan: CachePlan, trace: Trace, remembered: str = ""
    ) -> router_pb2.RouteResponse:
        """remembered: the question of a semantic hit."""
        trace.outcome = answer.kind
        trace.done(answer.kind, answer.model, answer.revision)
        shadow_id = ""
        if answer.kind == "semantic":
            shadow_id = self.shadows.choose(Shadow(plan.tenant, plan.key.text, remembered, answer.choices[0].text))
        return router_pb2.RouteResponse(
            answer=answer,
            model=answer.model,
            decision_id=self.decisions.add(None, 0.0),
            cache=answer.kind,
            shadow_id=shadow_id,
        )

    def _follow(
        self,
        request: router_pb2.RouteRequest,
        tenant: str,
        flight: router_pb2.Flight | None,
        plan: CachePlan,
        trace: Trace,
    ) -> router_pb2.RouteResponse:
        assert flight is not None
        trace.outcome = "follow"
        trace.done("follow", request.model, "")
        # A follower may come to lead: then the answer is its to report, and names who gave it.
        decision = Decision(tenant, "", "", plan, flight)
        return router_pb2.RouteResponse(
            follow=flight, decision_id=self.decisions.add(decision, _life_s(request)), cache="follow"
        )

    def _place(
        self,
        request: router_pb2.RouteRequest,
        tenant: str,
        survey: Survey,
        plan: CachePlan,
        flight: router_pb2.Flight | None,
        trace: Trace,
    ) -> router_pb2.RouteResponse:
        if survey.error is not None:
            raise survey.error
        pairs = survey.pairs
        placed = pairs[0].decode.family
        self.placer.take(request.request_id, pairs[0], survey.ask)
        self.gauges.placed(pairs[0])
        keep = (plan.mode > Mode.OFF and plan.write) or flight is not None
        decision = Decision(tenant, placed.model, placed.revision, plan, flight) if keep else None
        trace.done("placement", placed.model, placed.revision)
        return router_pb2.RouteResponse(
            placement=router_pb2.Placement(
                pair=pairs[0].to_proto(), alternates=[pair.to_proto() for pair in pairs[1:]], revision=placed.revision
            ),
            model=placed.model,
            decision_id=self.decisions.add(decision, _life_s(request)),
            lead=flight,
            cache=trace.outcome,
        )

    # --- names and classes ----------------------------------------------------------------------------------------

    def _families(self) -> frozenset[Family]:
        """Families that generate now; kept until the fleet changes."""
        if self._serving[0] != self._fleet.epoch:
            serving = frozenset(w.family for w in self._fleet.workers if w.serving and decodes(w.info))
            self._serving = (self._fleet.epoch, serving)
        return self._serving[1]

    def _models(self, name: str) -> tuple[str, ...]:
        """What a name may stand for: one model, or those of an alias's classes that somebody serves or served lately.

        A model named by the client is never replaced.
        """
        if any(family.model == name for family in self._families()):
            return (name,)
        known = self._fleet.known_families()
        models = {family.model for family in known}
        if name not in models:
            pools = tuple(model for model in self._classes.models(name) if model in models)
            if pools:
                return pools
        serving = [w.family for w in self._fleet.workers if w.serving and decodes(w.info)]
        try:
            return (resolve_model(name, self._aliases, known, serving),)
        except NotFound:
            if self._fleet.gathering:
                raise Unavailable("this router has just started; workers are still attaching") from None
            raise

    def _served(self, models: Collection[str]) -> set[tuple[str, str]]:
        """Whose answers will do: what serves now, or did when nothing does; a remembered answer needs no worker."""
        serving = [family for family in self._families() if family.model in models]
        families = serving or [family for family in self._fleet.known_families() if family.model in models]
        return {(family.model, family.revision) for family in families}

    async def _class(self, request: router_pb2.RouteRequest, tenant: str, models: tuple[str, ...], trace: Trace) -> str:
        """The model that is to answer for an alias with classes."""
        text = _last_user_text(request)
        near = self._cache.near
        vector = await near.embed(self._classes.reading(text)) if near is not None and text else None
        served = {family.model for family in self._families()}
        decision = self._classes.choose(request.model, text, vector, request.session_id, tenant, served)
        if decision is None:
            return models[0]
        trace.chosen = router_admin_pb2.ExplainedClass(
            alias=decision.alias,
            pool=decision.pool,
            probability=decision.probability,
            threshold=decision.threshold,
            reason=decision.reason,
            features=decision.features,
        )
        self.feedback.remember(tenant, (request.request_id, request.client_request_id), decision, text)
        return decision.model

    @staticmethod
    def _other_prompt(request: router_pb2.RouteRequest, model: str) -> bool:
        """Whether the prompt was made for another model than the one that is to answer: its tokens may mean nothing to
        this one, and its chains name other caches."""
        return request.tokenized_for not in ("", model)

    # --- the end of a request -------------------------------------------------------------------------------------

    async def report(self, request: router_pb2.ReportRequest, tenant: str) -> bool:
        """Credit ends, breakers hear of failures, the answer is kept if it may be. True when it was."""
        self.placer.report(request)
        decision = self.decisions.take(request.decision_id, tenant)
        if decision is None:
            return False
        flight = _flight(request, decision)
        if request.code != 0 or not request.HasField("answer"):
            await self._cache.end_flight(flight)
            return False
        model, revision = decision.model or request.answer.model, decision.revision or request.answer.revision
        return await self._cache.store_answer(
            decision.plan, request.answer, model=model, revision=revision, flight=flight
        )

    async def report_shadow(self, request: router_pb2.ReportShadowRequest, tenant: str) -> bool | None:
        """A shadowed hit was asked again: whether it was right, None where that cannot be told."""
        shadow = self.shadows.take(request.shadow_id, tenant)
        near = self._cache.near
        if shadow is None or near is None or not stored.complete(request.answer):
            return None
        fresh = request.answer.choices[0].text
        # One after the other: what waits for an answer must not wait for these.
        texts = (shadow.asked, shadow.remembered, head(shadow.served), head(fresh))
        vectors = [await near.embed(text, SHADOW_EMBED_S) for text in texts]
        verdict = judge(shadow.asked, shadow.remembered, shadow.served, fresh, closeness(*vectors))
        told = {True: "right", False: "wrong", None: "untold"}[verdict.right]
        metrics.counter(names.CACHE_SHADOWS).labels(told).inc()
        self.shadows.count(verdict.right)
        self._tell_false_hits()
        return verdict.right

    def _tell_false_hits(self) -> None:
        rate, low, high = self.shadows.estimate()
        for bound, value in (("rate", rate), ("low", low), ("high", high), ("raw", self.shadows.raw().rate)):
            metrics.gauge(names.CACHE_FALSE_HITS).labels(bound).set(value)

    def _end_flight(self, flight: router_pb2.Flight | None) -> None:
        """In the background: the request need not wait for it."""
        if flight is not None:
            task = asyncio.get_running_loop().create_task(self._cache.end_flight(flight), name="end-flight")
            self._background.add(task)
            task.add_done_callback(self._background.discard)


def _life_s(request: router_pb2.RouteRequest) -> float:
    return request.total_ms / 1000 or DEFAULT_LIFE_S


def _flight(request: router_pb2.ReportRequest, decision: Decision) -> router_pb2.Flight | None:
    """The flight that ends with this report: under the newer token, where the leader changed. A follower's own end
    (its report names no flight) is none of the flight's."""
    if decision.flight is None:
        return None
    if request.HasField("flight"):
        return request.flight if request.flight.flight_id == decision.flight.flight_id else None
    return decision.flight if decision.model else None


def _last_user_text(request: router_pb2.RouteRequest) -> str:
    if not request.messages:
        return request.prompt_text
    return next((message.content for message in reversed(request.messages) if message.role == "user"), "")


def check_request(request: router_pb2.RouteRequest) -> None:
    """Raise InvalidArgument, naming the field, for a request that cannot be decided about."""
    if not 0 < len(request.request_id.encode()) <= MAX_ID_BYTES:
        raise InvalidArgument(f"request_id must have 1 to {MAX_ID_BYTES} bytes", details={"field": "request_id"})
    if not 0 < len(request.model.encode()) <= MAX_NAME_BYTES:
        raise InvalidArgument(f"model must have 1 to {MAX_NAME_BYTES} bytes", details={"field": "model"})
    if not request.prompt_tokens:
        raise InvalidArgument("the prompt has no tokens", details={"field": "prompt_tokens"})
    for name in ("gateway_id", "client_request_id", "session_id"):
        if len(getattr(request, name).encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(f"{name} must have at most {MAX_NAME_BYTES} bytes", details={"field": name})
    if len(request.chains) > MAX_CHAINS_SENT:
        raise InvalidArgument(f"at most {MAX_CHAINS_SENT} chains", details={"field": "chains"})
    if any(len(chain.hashes) % HASH_BYTES or not chain.block_size for chain in request.chains):
        raise InvalidArgument("a chain has a block size and 16 bytes a hash", details={"field": "chains"})
    if len(request.exclude_workers) > MAX_EXCLUDED:
        raise InvalidArgument(f"at most {MAX_EXCLUDED} workers are excluded", details={"field": "exclude_workers"})
    policy.check(request)
