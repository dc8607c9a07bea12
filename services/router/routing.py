"""One routing decision: cached answer or placement, within the time the gateway waits."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from kvmesh.config import RouterSettings
from kvmesh.errors import InvalidArgument, KvmeshError, NotFound, Unavailable
from kvmesh.kv.hashing import HASH_BYTES
from kvmesh.proto.v1 import router_pb2
from kvmesh.telemetry import metrics, names, tracing
from services.router.cache.answers import AnswerCache, Mode
from services.router.cache.fingerprint import CacheKey, cache_key, cacheable
from services.router.decisions import Decision, Decisions
from services.router.fleet import MAX_ID_BYTES, MAX_NAME_BYTES, Family, Fleet
from services.router.placement.models import resolve_model
from services.router.placement.pairs import RankedPair, decodes
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
        rules = Rules(alternates=settings.alternates, credit_ttl_s=settings.credit_ttl_s)
        self.placer = Placer(fleet, rules, clock=clock, rng=rng)
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
        key: CacheKey | None = None
        family, mode = None, self._mode(request)
        if mode > Mode.OFF:
            family = self._likely_family(request, model, tenant)
        if family is not None:
            key = cache_key(request, tenant, family)
            budget = MAX_CACHE_S if remaining_s is None else min(MAX_CACHE_S, remaining_s - PLACEMENT_RESERVE_S)
            tau = request.tau if request.HasField("tau") else self._settings.semantic_threshold
            answer = await self._cache.lookup(key, mode, tau=tau, revision=family.revision, budget_s=budget)
            if answer is not None:
                decision_id = self.decisions.add(None, 0.0)
                return router_pb2.RouteResponse(answer=answer, model=family.model, decision_id=decision_id)
        # Only now, without a further wait: what was true before the look-up may no longer be.
        pairs = self._place(request, model, tenant, family)
        placed = pairs[0].decode.family
        self.placer.take(request.request_id, pairs[0], Ask.of(request, model, tenant))
        kept = None
        if key is not None and placed == family:
            kept = Decision(tenant, placed.revision, key, near=mode >= Mode.SEMANTIC)
        return router_pb2.RouteResponse(
            placement=router_pb2.Placement(
                pair=pairs[0].to_proto(), alternates=[pair.to_proto() for pair in pairs[1:]], revision=placed.revision
            ),
            model=placed.model,
            decision_id=self.decisions.add(kept, request.total_ms / 1000 or DEFAULT_LIFE_S),
        )

    def _resolve(self, name: str) -> str:
        serving = [w.family for w in self._fleet.workers if w.serving and decodes(w.info)]
        try:
            return resolve_model(name, self._aliases, self._fleet.known_families(), serving)
        except NotFound:
            if self._fleet.gathering:
                raise Unavailable("this router has just started; workers are still attaching") from None
            raise

    def _mode(self, request: router_pb2.RouteRequest) -> Mode:
        # A request that names workers to avoid is on its second try; it may have tokens out already.
        if request.exclude_workers or not cacheable(request):
            return Mode.OFF
        return self._cache.mode(request.cache)

    def _likely_family(self, request: router_pb2.RouteRequest, model: str, tenant: str) -> Family | None:
        """The family that would serve now, or the only one that did: a cached answer needs no worker."""
        try:
            return self._place(request, model, tenant)[0].decode.family
        except KvmeshError:
            known = [family for family in self._fleet.known_families() if family.model == model]
            return known[0] if len(known) == 1 else None

    def _place(
        self, request: router_pb2.RouteRequest, model: str, tenant: str, family: Family | None = None
    ) -> list[RankedPair]:
        """Ranked pairs, of `family` as long as it serves; Unavailable when nothing does."""
        if family is not None:
            try:
                return self.placer.place(Ask.of(request, model, tenant, family))
            except Unavailable:
                # It left while the caches were asked; another revision may serve.
                pass
        return self.placer.place(Ask.of(request, model, tenant))

    async def report(self, request: router_pb2.ReportRequest, tenant: str) -> bool:
        """The end of a request: its credit ends, its answer is kept if it may be. True when it was."""
        self.placer.report(request)
        decision = self.decisions.take(request.decision_id, tenant)
        if decision is None or request.code != 0 or not request.HasField("answer"):
            return False
        return await self._cache.store(decision.key, request.answer, revision=decision.revision, near=decision.near)


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
    if request.HasField("tau") and not (math.isfinite(request.tau) and 0.0 <= request.tau <= 1.0):
        raise InvalidArgument("tau must be in [0, 1]", details={"field": "tau"})
