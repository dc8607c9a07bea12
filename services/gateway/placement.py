"""Where a request runs: ask the router, submit to the pair it names, then to its alternates, then wait in line.

Without a router the gateway chooses by itself: power of two choices over its last worker list, no cache, `degraded`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    KvmeshError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import is_retryable
from kvmesh.telemetry import metrics, names, tracing
from services.gateway.demux import Key
from services.gateway.fairqueue import FairQueue, Ticket
from services.gateway.fleet import Fleet
from services.gateway.inbox import Inbox
from services.gateway.job import Job, Progress
from services.gateway.link import WorkerLink
from services.gateway.routers import NoRouter, Routers

log = logging.getLogger(__name__)

# A worker that the router names and we are not connected to yet: it has just attached.
NEW_LINK_WAIT_S = 1.0
LOCAL_ALTERNATES = 3
MAX_ROUTES = 4
# Refusals that say something about the worker, not about the request: another one may take it.
_ELSEWHERE = (FailedPrecondition, DeadlineExceeded, NotFound, Internal, Cancelled, Unauthenticated, PermissionDenied)
PREFILL_TARGETS = 3


@dataclass(slots=True)
class Placed:
    """An accepted attempt."""

    link: WorkerLink
    key: Key
    inbox: Inbox
    model: str
    revision: str
    cached_tokens: int


@dataclass(slots=True)
class Candidate:
    """A worker to submit to, with its prefill workers, best first."""

    link: WorkerLink
    prefill: Sequence[engine_pb2.PrefillTarget] = ()


@dataclass(slots=True)
class Decision:
    """A cached answer, or candidates in order."""

    model: str
    revision: str = ""
    answer: router_pb2.CachedAnswer | None = None
    candidates: list[Candidate] = field(default_factory=list)


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
        self._rng = rng or random.Random()

    async def place(
        self, job: Job, progress: Progress, make_inbox: Callable[[], Inbox]
    ) -> Placed | router_pb2.CachedAnswer:
        """Place a job, waiting in line where all workers are full. The caller bounds the time by cancelling.

        Raises Unavailable when nobody can serve it, Overloaded when the line is full, and what a worker refuses it for.
        """
        ticket: Ticket | None = None
        try:
            while True:
                decision = await self._decide(job, progress)
                if decision.answer is not None:
                    return decision.answer
                lined_up = ticket is None and self._queue.waiting(decision.model)
                if not lined_up:
                    found = await self._try(job, progress, decision, make_inbox, ticket)
                    if found is not None:
                        progress.queued = False
                        return found
                # All are full, or others were first.
                if ticket is None:
                    ticket = self._queue.enter(
                        job.tenant,
                        decision.model,
                        cost=job.cost,
                        tokens=len(job.token_ids),
                        eligible=lambda link: self._eligible(link, job, progress),
                    )
                    if lined_up:
                        self._offer_all(decision.model)
                else:
                    self._queue.reenter(ticket)
                # Stays so while a turn is tried: a request that runs out of time then has found no room either.
                progress.queued = True
                await ticket.turn
        finally:
            if ticket is not None:
                self._queue.leave(ticket)

    def _offer_all(self, model: str) -> None:
        for link in self._fleet.links(model):
            self._queue.offer(link)

    # --- deciding
    async def _decide(self, job: Job, progress: Progress) -> Decision:
        """The router's decision, or our own where it has none to give."""
        with tracing.span(names.SPAN_GATEWAY_PLACE) as span:
            decision = await self._route(job, progress)
            if decision is None:
                decision = self._choose(job, progress)
                if not progress.degraded:
                    progress.degraded = True
                    metrics.counter(names.GATEWAY_DEGRADED).inc()
            kind = "answer" if decision.answer is not None else "placement"
            span.set_attribute(names.ATTR_DECISION, "degraded" if progress.degraded else kind)
            return decision

    async def _route(self, job: Job, progress: Progress) -> Decision | None:
        cache = job.cache
        # Each turn asks for less: another model's name once, then no cache. The bound is for a router that contradicts
        # itself.
        for _ in range(MAX_ROUTES if len(self._routers) else 0):
            request = job.route_request(
                self._fleet.gateway_id,
                cache=cache,
                exclude=sorted(progress.excluded),
                kinds=self._fleet.kinds(job.served),
            )
            try:
                response, decided_by = await self._routers.route(request, job.tenant)
            except NoRouter:
                return None
            except (NotFound, Unavailable) as error:
                # A router that has just started may know less than the frames that are open here.
                if self._usable(job, progress):
                    log.info("the router names no worker for %s (%s), but one is connected", job.model, error.message)
                    return None
                raise
            progress.decision_id, progress.decided_by = response.decision_id, decided_by
            if response.model and response.model != job.served and progress.attempt == 0:
                # The alias stands for another model than we tokenized for: ask again, by that name.
                await job.retarget(response.model)
                continue
            kind = response.WhichOneof("decision")
            if kind == "answer" and len(response.answer.choices) == job.sampling.n:
                model = response.model or job.served
                return Decision(model, response.answer.revision, answer=response.answer)
            if kind == "placement":
                return await self._placement(job, progress, response)
            # A running twin to follow, or an answer that does not fit: ask again for workers alone.
            cache = pb.CACHE_MODE_OFF
        if len(self._routers):
            log.error("the router gives no usable decision for request %s", job.inner_id)
        return None

    async def _placement(self, job: Job, progress: Progress, response: router_pb2.RouteResponse) -> Decision | None:
        placement = response.placement
        model = response.model or job.served
        pairs = [placement.pair, *placement.alternates]
        links = [(self._fleet.link(pair.decode), pair) for pair in pairs if pair.HasField("decode")]
        waited = False
        candidates = []
        for link, pair in links:
            if link is None or not self._eligible(link, job, progress):
                continue
            if not link.open and not waited:
                waited = True
                await link.wait_open(min(NEW_LINK_WAIT_S, job.limits.ttft.remaining()))
            if link.open:
                candidates.append(Candidate(link, pair.prefill))
        if not candidates:
            return None
        return Decision(model, placement.revision, candidates=candidates)

    def _fits(self, link: WorkerLink, job: Job) -> bool:
        info = link.info
        return (
            info.model == job.served
            and info.tokenizer_fingerprint in ("", job.fingerprint)
            and (not job.unified_only or info.role == engine_pb2.WORKER_ROLE_UNIFIED)
        )

    def _usable(self, job: Job, progress: Progress) -> list[WorkerLink]:
        return [link for link in self._fleet.links(job.served) if self._eligible(link, job, progress)]

    def _eligible(self, link: WorkerLink, job: Job, progress: Progress) -> bool:
        return link.info.worker_id not in progress.excluded and self._fits(link, job)

    def _choose(self, job: Job, progress: Progress) -> Decision:
        """Power of two choices from the last worker list; the rest follow as alternates, least loaded first."""
        usable = self._usable(job, progress)
        if not usable:
            if job.unified_only and self._fleet.links(job.served):
                raise FailedPrecondition("prompt_logprobs needs a worker of role unified, and none serves this model")
            raise Unavailable(f"no worker can serve model {job.served!r} now")
        pick = min(self._rng.sample(usable, min(2, len(usable))), key=_relative_load)
        # Alternates stay within one model, revision and tokenizer.
        rest = sorted(
            (link for link in usable if link is not pick and link.info.revision == pick.info.revision),
            key=_relative_load,
        )
        chosen = [pick, *rest[:LOCAL_ALTERNATES]]
        return Decision(
            job.served, pick.info.revision, candidates=[Candidate(link, self._prefill(link)) for link in chosen]
        )

    def _prefill(self, link: WorkerLink) -> list[engine_pb2.PrefillTarget]:
        """Prefill workers whose pages fit the decode worker, least loaded of two first."""
        info = link.info
        if info.role != engine_pb2.WORKER_ROLE_DECODE or not info.kvtransfer_address:
            return []
        fitting = [
            member
            for member in self._fleet.members()
            if member.info.role == engine_pb2.WORKER_ROLE_PREFILL
            and member.info.state == engine_pb2.WORKER_STATE_SERVING
            and member.info.kvtransfer_address
            and (member.info.model, member.info.revision) == (info.model, info.revision)
            and _same_kv(member.info, info)
        ]
        # Pages of another size are slow: only where there are no others.
        equal = [member for member in fitting if member.info.page_size == info.page_size]
        fitting = equal or fitting
        picked = self._rng.sample(fitting, min(PREFILL_TARGETS, len(fitting)))
        head = sorted(picked[:2], key=lambda member: member.load.queued_tokens)
        return [
            engine_pb2.PrefillTarget(
                worker_id=member.info.worker_id, address=member.info.address, incarnation=member.info.incarnation
            )
            for member in (*head, *picked[2:])
        ]

    # --- submitting
    async def _try(
        self,
        job: Job,
        progress: Progress,
        decision: Decision,
        make_inbox: Callable[[], Inbox],
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
            try:
                return await self._submit(job, progress, decision, candidate, make_inbox())
            except Overloaded:
                full = True
            except KvmeshError as error:
                if not (is_retryable(error) or isinstance(error, _ELSEWHERE)):
                    raise
                log.warning("worker %s did not take %s: %s", candidate.link.info.worker_id, job.inner_id, error.message)
                last = _for_client(error)
                progress.excluded.add(candidate.link.info.worker_id)
                progress.failures += 1
                if progress.failures >= self._max_attempts:
                    raise last from error
            finally:
                if ticket is not None:
                    self._queue.settle(ticket)
        if full:
            return None
        raise last if last is not None else Unavailable(f"no worker can serve model {job.served!r} now")

    async def _submit(
        self, job: Job, progress: Progress, decision: Decision, candidate: Candidate, inbox: Inbox
    ) -> Placed:
        attempt = progress.attempt
        progress.attempt += 1
        progress.submits += 1
        link = candidate.link
        attributes: tracing.Attributes = {names.ATTR_WORKER: link.info.worker_id, names.ATTR_ATTEMPT: attempt}
        with tracing.span(names.SPAN_GATEWAY_ATTEMPT, attributes=attributes):
            request = job.submit_request(self._fleet.gateway_id, attempt, decision.model, candidate.prefill)
            timeout_s = min(self._submit_timeout_s, job.limits.current(first_token_seen=False).remaining())
            response = await link.submit(request, inbox, tenant=job.tenant, timeout_s=timeout_s)
        return Placed(
            link=link,
            key=(job.inner_id, attempt),
            inbox=inbox,
            model=decision.model,
            revision=decision.revision or link.info.revision,
            cached_tokens=response.cached_tokens,
        )


def _for_client(error: KvmeshError) -> KvmeshError:
    """A worker that does not believe this gateway says nothing about the client's own key."""
    if isinstance(error, Unauthenticated | PermissionDenied):
        return Unavailable("a worker refuses this gateway")
    return error


def _relative_load(link: WorkerLink) -> float:
    """Sequences per seat. Our own open requests count even where the last report does not show them."""
    load = link.load
    known = max(load.running + load.waiting + load.transferring, len(link.demux))
    return known / max(1, link.info.max_batch)


def _same_kv(source: engine_pb2.WorkerInfo, target: engine_pb2.WorkerInfo) -> bool:
    """Whether KV of one can be written into the other's pages, be it token by token."""
    if source.kv_fingerprint and target.kv_fingerprint:
        return source.kv_fingerprint == target.kv_fingerprint
    return source.layout_fingerprint == target.layout_fingerprint
