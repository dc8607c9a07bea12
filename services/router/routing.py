"""One routing decision: cached answer or placement, within the time the gateway waits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from kvmesh.config import RouterSettings
from kvmesh.errors import InvalidArgument, NotCached, NotFound, Unavailable
from kvmesh.kv.hashing import HASH_BYTES
from kvmesh.proto.v1 import router_pb2
from kvmesh.telemetry import metrics, names, tracing
from services.router.cache import policy
from services.router.cache.answers import AnswerCache
from services.router.cache.policy import CachePlan, Mode
from services.router.decisions import Decision, Decisions
from services.router.fleet import MAX_ID_BYTES, MAX_NAME_BYTES, Fleet
from services.router.placement.models import resolve_model
from services.router.placement.pairs import decodes
from services.router.placement.placer import Ask, Placer, Rules

Clock = Callable[[], float]

MAX_CACHE_S = 0.05
PLACEMENT_RESERVE_S = 0.03
"""Of the caller's deadline: what look-ups leave for placement and the way back."""

MAX_EXCLUDED = 256
DEFAULT_LIFE_S = 600.0


class Routing:
    """Decides for requests; owns the credit of its placements and the decisions that wait for a report."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        cache: AnswerCache,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._aliases = settings.alias_map
        self._fleet = fleet
        self._cache = cache
        self.placer = Placer(fleet, Rules.of(settings), clock=clock, rng=rng)
        self.decisions = Decisions(clock)

    async def route(
        self, request: router_pb2.RouteRequest, tenant: str, remaining_s: float | None
    ) -> router_pb2.RouteResponse:
        """A cached answer or a placement; `remaining_s` is what is left of the caller's deadline.

        Raises InvalidArgument, NotFound (no such model), Unavailable (it is not served now), FailedPrecondition.
        """
        check_request(request)
        with tracing.span(names.SPAN_ROUTER_ROUTE) as span:
            span.set_attribute(names.ATTR_REQUEST_ID, request.request_id)
            response = await self._route(request, tenant, remaining_s)
            decision = response.answer.kind if response.HasField("answer") else "placement"
            span.set_attribute(names.ATTR_DECISION, decision)
            span.set_attribute(names.GEN_AI_RESPONSE_MODEL, response.model)
            if decision == "placement":
                span.set_attribute(names.ATTR_DECODE_WORKER, response.placement.pair.decode.worker_id)
        metrics.counter(names.ROUTER_DECISIONS).labels(decision).inc()
        return response

    async def _route(
        self, request: router_pb2.RouteRequest, tenant: str, remaining_s: float | None
    ) -> router_pb2.RouteResponse:
        model = self._resolve(request.model)
        plan = self._cache.plan(request, tenant)
        answer = await self._remembered(request, plan, model, remaining_s)
        if answer is not None:
            decision_id = self.decisions.add(None, 0.0)
            return router_pb2.RouteResponse(
                answer=answer, model=answer.model, decision_id=decision_id, cache=answer.kind
            )
        if plan.only_cached:
            raise NotCached("there is no remembered answer, and no other was allowed")
        # Only now, without a further wait: what was true before the look-up may no longer be.
        pairs = self.placer.place(Ask.of(request, model, tenant))
        placed = pairs[0].decode.family
        self.placer.take(request.request_id, pairs[0], Ask.of(request, model, tenant))
        kept = Decision(tenant, placed.model, placed.revision, plan) if plan.mode > Mode.OFF and plan.write else None
        return router_pb2.RouteResponse(
            placement=router_pb2.Placement(
                pair=pairs[0].to_proto(), alternates=[pair.to_proto() for pair in pairs[1:]], revision=placed.revision
            ),
            model=placed.model,
            decision_id=self.decisions.add(kept, request.total_ms / 1000 or DEFAULT_LIFE_S),
            cache="miss" if plan.mode > Mode.OFF and plan.read else "bypass",
        )

    async def _remembered(
        self, request: router_pb2.RouteRequest, plan: CachePlan, model: str, remaining_s: float | None
    ) -> router_pb2.CachedAnswer | None:
        """A complete answer to this request: the same one's, or a similar one's."""
        if not plan.read:
            self._cache.missed(plan)
            return None
        until = time.monotonic() + (
            MAX_CACHE_S if remaining_s is None else min(MAX_CACHE_S, remaining_s - PLACEMENT_RESERVE_S)
        )
        served = self._served(model)
        # Gateways cannot follow yet.
        exact = await self._cache.exact_or_flight(
            plan, served, gateway_id=request.gateway_id, fly=False, budget_s=until - time.monotonic()
        )
        answer = exact.answer
        if answer is None:
            near = await self._cache.near_answer(plan, served, budget_s=until - time.monotonic())
            answer = near.answer
        if answer is None:
            self._cache.missed(plan)
        return answer

    def _served(self, model: str) -> set[tuple[str, str]]:
        """Whose answers will do: what serves now, or did when nothing does; a remembered answer needs no worker."""
        serving = {w.family for w in self._fleet.workers if w.serving and decodes(w.info)}
        known = {family for family in self._fleet.known_families() if family.model == model}
        return {(family.model, family.revision) for family in known & serving or known}

    def _resolve(self, name: str) -> str:
        serving = [w.family for w in self._fleet.workers if w.serving and decodes(w.info)]
        try:
            return resolve_model(name, self._aliases, self._fleet.known_families(), serving)
        except NotFound:
            if self._fleet.gathering:
                raise Unavailable("this router has just started; workers are still attaching") from None
            raise

    async def report(self, request: router_pb2.ReportRequest, tenant: str) -> bool:
        """The end of a request: its credit ends, its answer is kept if it may be. True when it was."""
        self.placer.report(request)
        decision = self.decisions.take(request.decision_id, tenant)
        if decision is None or request.code != 0 or not request.HasField("answer"):
            if decision is not None:
                await self._cache.end_flight(decision.flight)
            return False
        return await self._cache.store_answer(
            decision.plan, request.answer, model=decision.model, revision=decision.revision, flight=decision.flight
        )


def check_request(request: router_pb2.RouteRequest) -> None:
    """Raise InvalidArgument, naming the field, for a request that cannot be decided about."""
    if not 0 < len(request.request_id.encode()) <= MAX_ID_BYTES:
        raise InvalidArgument(f"request_id must have 1 to {MAX_ID_BYTES} bytes", details={"field": "request_id"})
    if not 0 < len(request.model.encode()) <= MAX_NAME_BYTES:
        raise InvalidArgument(f"model must have 1 to {MAX_NAME_BYTES} bytes", details={"field": "model"})
    if not request.prompt_tokens:
        raise InvalidArgument("the prompt has no tokens", details={"field": "prompt_tokens"})
    if any(len(chain.hashes) % HASH_BYTES or not chain.block_size for chain in request.chains):
        raise InvalidArgument("a chain has a block size and 16 bytes a hash", details={"field": "chains"})
    if len(request.exclude_workers) > MAX_EXCLUDED:
        raise InvalidArgument(f"at most {MAX_EXCLUDED} workers are excluded", details={"field": "exclude_workers"})
    policy.check(request)
