"""Where a request runs: ask the router, submit to the pair it names, then to its alternates, then wait in line.

Without a router the gateway chooses by itself: power of two choices over its last worker list, no cache, `degraded`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from kvmesh.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    KvmeshError,
    NotCached,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import is_retryable
from kvmesh.telemetry import metrics, names, tracing
from services.gateway.choice import Choice
from services.gateway.decision import Candidate, Decision, NoWorker, Placed
from services.gateway.fleet import Fleet
from services.gateway.inbox import Inbox
from services.gateway.job import Job, Progress, Share
from services.gateway.link import WorkerLink
from services.gateway.queue import FairQueue, Ticket
from services.gateway.routers import NoRouter, Routers

log = logging.getLogger(__name__)

# A worker that the router names and we are not connected to yet: it has just attached.
NEW_LINK_WAIT_S = 1.0
MAX_ROUTES = 4
# A worker with a seat that the router does not name: its reports come many times a second.
NOT_NAMED_S = 0.5
# Refusals that say something about the worker, not about the request: another one may take it.
_ELSEWHERE = (
    *(FailedPrecondition, DeadlineExceeded, NotFound, Internal, DataLoss),
    *(Cancelled, Unauthenticated, PermissionDenied),
)


MakeInbox = Callable[[], Inbox]
Pace = Callable[[], AbstractAsyncContextManager[None]]


class Placer:
    """Places jobs. `submit_timeout_s` bounds one Submit; `max_attempts` bounds failures, not refusals for overload."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        routers: Routers,
        queue: FairQueue,
        submit_timeout_s: float,
        max_attempts: int,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._routers = routers
        self._queue = queue
        self._submit_timeout_s = submit_timeout_s
        self._max_attempts = max_attempts
        self._choice = Choice(fleet, rng or random.Random())

    async def decide(self, job: Job, progress: Progress, *, flights: bool = False) -> Decision:
        """What is to become of a request: an answer, a flight (only with `flights`) or candidates for `place`.

        Raises Unavailable when nobody can serve it, NotCached when only the cache may and cannot.
        """
        whole = Share(0, job.sampling.best_of)
        # The report goes to this decision, whatever is asked later: what may be remembered is bound to it.
        progress.decision_id, progress.decided_by = "", None
        decision = await self._decide(job, progress, whole, cache=job.cache, flights=flights, first=True)
        if job.cache_control.only_if_cached and decision.answer is None and decision.follow is None:
            raise NotCached("this answer is not in the cache, and the request allows nothing else")
        return decision

    async def place(
        self,
        job: Job,
        progress: Progress,
        share: Share,
        make_inbox: MakeInbox,
        *,
        decision: Decision | None = None,
        pace: Pace = nullcontext,
    ) -> Placed:
        """Place a share of a job, waiting in line where all workers are full. The caller bounds the time by cancelling.

        `decision`: one that was just made; without it, and after each turn in the line, workers alone are asked for.
        `pace` is entered for each look-up with its submits, not while waiting in line.

        Raises NoWorker when nobody can serve it, Overloaded when the line is full or too slow, Cancelled where a job
        that nobody waits for would have to wait, and what a worker refuses it for.
        """
        ticket: Ticket | None = None
        not_named: dict[WorkerLink, float] = {}
        try:
            while True:
                async with pace():
                    free = ticket.promised if ticket is not None else None
                    if decision is None:
                        decision = await self._decide(
                            job, progress, share, cache=pb.CACHE_MODE_OFF, flights=False, prefer=free
                        )
                    if free is not None and all(candidate.link is not free for candidate in decision.candidates):
                        not_named[free] = time.monotonic() + NOT_NAMED_S
                    model = decision.model
                    lined_up = ticket is None and self._queue.waiting(model, ahead=share.again)
                    if not lined_up:
                        found = await self._try(job, progress, share, decision, make_inbox, ticket)
                        if found is not None:
                            progress.queued = False
                            return found
                    decision = None
                # All are full, or others were first.
                if job.unattended:
                    # What nobody waits for would stand before those who do, and at their tenant's cost.
                    raise Cancelled("there is no room now for what nobody waits for")
                if ticket is None:
                    ticket = self._queue.enter(
                        job.tenant,
                        model,
                        cost=share.cost(job),
                        tokens=len(job.token_ids) + len(share.output),
                        eligible=lambda link: (
                            self._choice.eligible(link, job, progress, share)
                            and (not not_named or time.monotonic() >= not_named.get(link, 0.0))
                        ),
                        ahead=share.again,
                        priority=job.priority,
                        weight=job.weight,
                        within_s=job.limits.current(first_token_seen=share.heal).remaining(),
                    )
                    if lined_up:
                        self._offer_all(model)
                else:
                    self._queue.reenter(ticket)
                # Stays so while a turn is tried: a request that runs out of time then has found no room either.
                progress.queued = True
                await self._turn(ticket)
        finally:
            if ticket is not None:
                self._queue.leave(ticket)

    async def _turn(self, ticket: Ticket) -> None:
        began = time.monotonic()
        with tracing.span(names.SPAN_GATEWAY_QUEUE) as span:
            if ticket.estimate_s is not None and ticket.estimate_s < math.inf:
                span.set_attribute(names.ATTR_QUEUE_ESTIMATE, ticket.estimate_s)
            await ticket.turn
        waited = metrics.histogram(names.GATEWAY_QUEUE_TIME).labels(ticket.model, _priority_class(ticket.priority))
        waited.observe(time.monotonic() - began)

    def retry_after(self, job: Job) -> float:
        """Seconds after which a request that found no room may come back."""
        return self._queue.retry_after(job.tenant, job.served, priority=job.priority, weight=job.weight)

    def _offer_all(self, model: str) -> None:
        for link in self._fleet.links(model):
            self._queue.offer(link)

    # --- deciding
    async def _decide(
        self,
        job: Job,
        progress: Progress,
        share: Share,
        *,
        cache: pb.CacheMode.ValueType,
        flights: bool,
        first: bool = False,
        prefer: WorkerLink | None = None,
    ) -> Decision:
        """The router's decision, or our own where it has none to give."""
        with tracing.span(names.SPAN_GATEWAY_PLACE) as span:
            decision = await self._route(job, progress, share, cache, flights, first)
            if decision is None:
                decision = self._choice.choose(job, progress, share, prefer)
                if not progress.degraded:
                    progress.degraded = True
                    metrics.counter(names.GATEWAY_DEGRADED).inc()
            kind = "answer" if decision.answer is not None else "follow" if decision.follow is not None else "placement"
            span.set_attribute(names.ATTR_DECISION, "degraded" if progress.degraded else kind)
            return decision

    async def _route(
        self, job: Job, progress: Progress, share: Share, cache: pb.CacheMode.ValueType, flights: bool, first: bool
    ) -> Decision | None:
        # Each turn asks for less: another model's name once, then no flight, then no cache. The bound is for a router
        # that contradicts itself.
        for _ in range(MAX_ROUTES if len(self._routers) else 0):
            request = job.route_request(
                self._fleet.gateway_id,
                cache=cache,
                exclude=sorted(self._choice.excluded(progress)),
                no_flight=not flights,
                pinned_revision=share.revision,
                model=job.model if first else job.served,
                kinds=self._fleet.kinds(job.served),
            )
            try:
                response, decided_by = await self._routers.route(request, job.tenant)
            except NoRouter:
                return None
            except (NotFound, Unavailable) as error:
                # A router that has just started may know less than the frames that are open here.
                if self._choice.usable(job, progress, share):
                    log.info("the router names no worker for %s (%s), but one is connected", job.model, error.message)
                    return None
                if share.heal:
                    raise NoWorker(error.message) from error
                raise
            if first or not progress.decision_id:
                progress.decision_id, progress.decided_by = response.decision_id, decided_by
            kind = response.WhichOneof("decision")
            if response.model and response.model != job.served and first and kind in (None, "placement"):
                # The alias stands for another model than we tokenized for: ask again, with that one's prompt.
                await job.retarget(response.model)
                continue
            model = response.model or job.served
            if kind == "answer" and cache != pb.CACHE_MODE_OFF and len(response.answer.choices) == job.sampling.n:
                answer = response.answer
                return Decision(
                    model,
                    answer.revision,
                    answer=answer,
                    cache=response.cache or answer.kind,
                    shadow_id=response.shadow_id,
                )
            if kind == "follow" and flights:
                return Decision(model, follow=response.follow, cache=response.cache or "follow")
            if kind == "placement":
                return await self._placement(job, progress, share, response, flights)
            # An answer that does not fit, or a flight that was not asked for: ask again for workers alone.
            cache, flights = pb.CACHE_MODE_OFF, False
        if len(self._routers):
            log.error("the router gives no usable decision for request %s", job.inner_id)
        return None

    async def _placement(
        self, job: Job, progress: Progress, share: Share, response: router_pb2.RouteResponse, flights: bool
    ) -> Decision | None:
        placement = response.placement
        pairs = [placement.pair, *placement.alternates]
        links = [(self._fleet.link(pair.decode), pair) for pair in pairs if pair.HasField("decode")]
        waited = False
        candidates = []
        for link, pair in links:
            if link is None or not self._choice.eligible(link, job, progress, share):
                continue
            if not link.open and not waited:
                waited = True
                limit = job.limits.current(first_token_seen=share.heal)
                await link.wait_open(min(NEW_LINK_WAIT_S, limit.remaining()))
            if link.open:
                candidates.append(Candidate(link, pair.prefill))
        if not candidates:
            return None
        return Decision(
            response.model or job.served,
            placement.revision,
            candidates=candidates,
            lead=response.lead if flights and response.HasField("lead") else None,
            cache=response.cache or ("bypass" if job.cache == pb.CACHE_MODE_OFF else "miss"),
        )

    def serves(self, job: Job, progress: Progress, share: Share) -> bool:
        """Whether any worker could be asked now."""
        return bool(self._choice.usable(job, progress, share))

    # --- submitting
    async def _try(
        self,
        job: Job,
        progress: Progress,
        share: Share,
        decision: Decision,
        make_inbox: MakeInbox,
        ticket: Ticket | None,
    ) -> Placed | None:
        """Submit to the candidates in order; None when all that could serve are full."""
        candidates = decision.candidates
        if ticket is not None and ticket.promised is not None:
            # The seat that ended the wait is on this worker.
            free = ticket.promised
            candidates = sorted(candidates, key=lambda candidate: candidate.link is not free)
        full = False
        last: KvmeshError | None = None
        for candidate in candidates:
            if decision.heeds and not candidate.link.breaker.allows:
                full = True  # Another request is its probe by now: for this one it has no room.
                continue
            try:
                return await self._submit(job, progress, share, decision, candidate, make_inbox())
            except Overloaded:
                full = True
            except KvmeshError as error:
                if not (is_retryable(error) or isinstance(error, _ELSEWHERE)):
                    raise
                if job.limits.current(first_token_seen=share.heal).expired:
                    # It was the request that had no time, which says nothing about the worker.
                    raise
                log.warning("worker %s did not take %s: %s", candidate.link.info.worker_id, job.inner_id, error.message)
                last = _for_client(error)
                progress.failed(candidate.link, error)
                share.failures += 1
                if share.failures >= self._max_attempts:
                    raise last from error
            finally:
                if ticket is not None:
                    self._queue.settle(ticket)
        if full:
            return None
        raise last if last is not None else NoWorker(f"no worker can serve model {job.served!r} now")

    async def _submit(
        self, job: Job, progress: Progress, share: Share, decision: Decision, candidate: Candidate, inbox: Inbox
    ) -> Placed:
        attempt = progress.attempt
        progress.attempt += 1
        progress.submits += 1
        link = candidate.link
        attributes: tracing.Attributes = {
            names.ATTR_WORKER: link.info.worker_id,
            names.ATTR_ATTEMPT: attempt,
            names.ATTR_REPLAYED_TOKENS: len(share.output),
        }
        with tracing.span(names.SPAN_GATEWAY_ATTEMPT, attributes=attributes) as span:
            tracing.link(span, share.replaces, "replaces")
            request = job.submit_request(self._fleet.gateway_id, attempt, decision.model, candidate.prefill, share)
            limit = job.limits.current(first_token_seen=share.heal)
            timeout_s = min(self._submit_timeout_s, limit.remaining())
            response = await link.submit(request, inbox, tenant=job.tenant, timeout_s=timeout_s)
        return Placed(
            link=link,
            key=(job.inner_id, attempt),
            inbox=inbox,
            model=decision.model,
            revision=decision.revision or link.info.revision,
            cached_tokens=response.cached_tokens,
            share=share,
            span=span.get_span_context(),
        )


def _priority_class(priority: int) -> str:
    """Its name in metrics: clients choose the number freely."""
    return "normal" if priority == 0 else "high" if priority > 0 else "low"


def _for_client(error: KvmeshError) -> KvmeshError:
    """A worker that does not believe this gateway says nothing about the client's own key."""
    if isinstance(error, Unauthenticated | PermissionDenied):
        return Unavailable("a worker refuses this gateway")
    return error
