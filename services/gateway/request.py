"""One client's request: what its handler does from a checked job to the terminal event.

The answer comes from the cache, from a flight, or from a generation of its own; this is where a client's limits, its
leaving and its terminal event are. The handler's own coroutine does everything in order and is never interrupted
inside a write to the client. Only the client's leaving cancels the handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Protocol

from kvmesh.errors import Cancelled, Internal, KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import row
from kvmesh.telemetry import names, tracing
from services.gateway import events, replay
from services.gateway.decision import Decision
from services.gateway.generation import Generation
from services.gateway.heals import Heals
from services.gateway.job import Job, Progress
from services.gateway.limits.contract import Hold, NoHold
from services.gateway.observe import Observer
from services.gateway.placement import Placer
from services.gateway.routers import Replica, Routers
from services.gateway.sink import End, RequestSettings, Sink, SinkClosed, Timers, out_of_time
from services.gateway.speech.reader import Reader

log = logging.getLogger(__name__)

# A client that does not even take the error of a request that was ended is cut off after this.
STALL_GRACE_S = 5.0
# For the tokenizer of another model of an alias, the first time that it is needed.
REMAKE_S = 5.0

_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class ClientGone(SinkClosed):
    """A write failed: there is nobody left to tell anything."""


class Runnable(Protocol):
    """What a request waits for: a generation of its own, or a flight that it follows."""

    def stop(self, error: KvmeshError) -> None:
        """End it with `error`; the first call counts."""

    async def run(self) -> End | None:
        """To its end; None = it cannot be had, and nothing was written: ask again without flights."""

    @property
    def usage(self) -> pb.Usage:
        """Tokens so far."""


class Flights(Protocol):
    """Generations that several requests share."""

    @property
    def enabled(self) -> bool:
        """Whether a request may lead or follow now."""

    def lead(self, request: Request, job: Job, progress: Progress, decision: Decision) -> Runnable:
        """The view of a flight that begins with this request; `decision.lead` names it."""

    def follow(self, request: Request, job: Job, progress: Progress, decision: Decision) -> Runnable:
        """The view of a flight that runs; `decision.follow` names it."""


class Shadows(Protocol):
    """Asks again for answers that came from the semantic cache."""

    def ask(self, job: Job, shadow_id: str, decided_by: Replica) -> None:
        """In the background; returns at once. `decided_by`: the router that wants to know."""


class Request:
    """One request of a client. `send` writes an event; `send_metadata` tells the client that it is being waited for;
    `set_trailing` sets the metadata that ends the call.

    To be made in the handler's own task. It is the sink of whatever serves it.
    """

    def __init__(
        self,
        settings: RequestSettings,
        *,
        placer: Placer,
        routers: Routers,
        heals: Heals,
        send: Callable[[pb.GenerateEvent], Awaitable[None]],
        send_metadata: Callable[[], Awaitable[None]],
        set_trailing: Callable[[Sequence[tuple[str, str]]], None] = lambda pairs: None,
        flights: Flights | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self.settings = settings
        self.placer = placer
        self.routers = routers
        self.heals = heals
        self._send = send
        self._send_metadata = send_metadata
        self._set_trailing = set_trailing
        self._flights = flights
        self._shadows = shadows
        self._loop = asyncio.get_running_loop()
        self._handler = asyncio.current_task()
        self.started = self._loop.time()
        self._accepted_at: float | None = None
        self._first_token = False
        self._grace: asyncio.TimerHandle | None = None
        self._timers: Timers | None = None
        self._deciding: asyncio.Task[Decision] | None = None
        self._running: Runnable | None = None
        self._progress = Progress()
        self._job: Job | None = None
        self._observer: Observer | None = None
        self._usage = pb.Usage()
        self._hold: Hold = NoHold()
        self._reader: Reader | None = None
        self._spoken = 0
        self._free = False
        self._served: pb.Served | None = None
        self.error: KvmeshError | None = None

    # --- ending from elsewhere
    def stop(self, error: KvmeshError) -> None:
        """End the request with `error`, now. The first error counts."""
        if self.error is not None:
            return
        self.error = error
        if self._deciding is not None:
            self._deciding.cancel()
        if self._running is not None:
            self._running.stop(error)
        self._cut_off_later()

    def _cut_off_later(self) -> None:
        """The handler may be stuck in a write; it gets a grace to tell the client, then it is ended."""
        if self._handler is not None and self._grace is None:
            self._grace = self._loop.call_later(STALL_GRACE_S, self._handler.cancel)

    def close(self) -> None:
        """Free everything; idempotent, for the handler's `finally`."""
        if self._grace is not None:
            self._grace.cancel()
        if self._timers is not None:
            self._timers.cancel()
        self._running = None

    def _expire(self, limit: str) -> None:
        if limit == "total" or not self._first_token:
            job = self._job if self._progress.queued else None
            self.stop(out_of_time(limit, self.placer.retry_after(job) if job is not None else None))

    # --- the client as a sink
    async def waiting(self) -> None:
        """See Sink."""
        if self._accepted_at is None:
            await self._send_metadata()

    async def accepted(self, event: pb.Accepted) -> None:
        """See Sink."""
        self._accepted_at = self._loop.time()
        self._served = self._served or pb.Served()
        self._reader = await self._reader_of(event.model)
        await self._send(pb.GenerateEvent(accepted=event))

    async def _reader_of(self, model: str) -> Reader | None:
        """A reader of what `model` says. An alias may stand for another one than this request was made for: an answer
        from the cache or a shared generation is written with that one's marks."""
        job = self._job
        assert job is not None
        make = job.reader
        if model != job.served and job.messages and job.remake is not None:
            # One that nobody serves any more is read with the marks that we know.
            with suppress(KvmeshError, TimeoutError):
                async with asyncio.timeout(REMAKE_S):
                    make = (await job.remake(model)).reader
        return make() if make is not None else None

    async def prompt(self, event: pb.PromptScored) -> None:
        """See Sink."""
        await self._send(pb.GenerateEvent(prompt=event))

    async def delta(self, event: pb.Delta) -> None:
        """See Sink."""
        self._first_token = self._first_token or bool(event.token_ids)
        count = len(event.token_ids)
        self._spoken += count
        if not self._free and self._hold.short(self._spoken):
            # Many tokens at once, as of a generation that is joined late: first they are taken, then they are shown.
            await self._hold.cover(self._spoken)
            if self.error is not None:
                raise self.error
        await self._send(events.delta(event if self._reader is None else self._reader.read(event)))
        if self._observer is not None:
            self._observer.tokens(event.choice, count, self._loop.time())
        if not self._free:
            self._hold.used(self._spoken)

    # --- the life
    async def run(self, job: Job, observer: Observer, hold: Hold | None = None) -> None:
        """Serve the job to its end. Raises KvmeshError only before acceptance; later errors are terminal events."""
        self._job, self._observer = job, observer
        self._hold = hold or NoHold()
        self._usage = pb.Usage(prompt_tokens=len(job.token_ids))
        self._timers = Timers(job.limits, self._expire)
        try:
            try:
                end = await self._serve(job)
                if self.error is not None:
                    raise self.error
                await self._finish(end)
                observer.finished(end.usage, end.finish_reasons)
                self._hold.settle(_charged(end), end.served, 0)
            except KvmeshError as error:
                raise self.error or error from None
            except (asyncio.CancelledError, ClientGone):
                observer.failed(self._tokens(), self.error or Cancelled("the client left"))
                raise
            except Exception as exc:
                log.exception("request %s failed", job.inner_id)
                raise Internal(f"internal error ({type(exc).__name__})") from exc
        except KvmeshError as error:
            await self._fail(error)
        finally:
            # Settled above where it went well.
            self._hold.settle(self._tokens(), self._served, row(self.error or Cancelled).code.value[0])
            self.close()
            observer.ended(self._loop.time())

    async def _serve(self, job: Job) -> End:
        """An answer from wherever it is to be had."""
        flights = self._flights if self._flights is not None and self._flights.enabled else None
        while True:
            decision = await self._decide(job, flights=flights is not None)
            if decision.answer is not None:
                with tracing.span(names.SPAN_GATEWAY_REPLAY):
                    return await self._replay(job, decision, decision.answer)
            following = flights is not None and decision.follow is not None
            if flights is not None and decision.follow is not None:
                running = flights.follow(self, job, self._progress, decision)
            elif flights is not None and decision.lead is not None:
                running = flights.lead(self, job, self._progress, decision)
            else:
                assert self._timers is not None
                self._timers.cancel()  # A generation has its own.
                running = self.generation(job, self._progress, decision, self, on_stop=self.stop)
            with tracing.span(names.SPAN_GATEWAY_FOLLOW) if following else nullcontext():
                end = await self._run(running)
            if end is not None:
                return end
            flights = None

    def generation(
        self,
        job: Job,
        progress: Progress,
        decision: Decision | None,
        sink: Sink,
        *,
        on_stop: Callable[[KvmeshError], None] | None = None,
    ) -> Generation:
        """A generation of the job into `sink`."""
        return Generation(
            job,
            self.settings,
            sink,
            placer=self.placer,
            routers=self.routers,
            heals=self.heals,
            progress=progress,
            decision=decision,
            started=self.started,
            on_stop=on_stop,
        )

    async def _run(self, running: Runnable) -> End | None:
        if self.error is not None:
            raise self.error
        self._running = running
        return await running.run()

    async def _decide(self, job: Job, *, flights: bool) -> Decision:
        """The decision, cancellable by `stop`."""
        if self.error is not None:
            raise self.error
        task = asyncio.create_task(self.placer.decide(job, self._progress, flights=flights), name="decide")
        self._deciding = task
        try:
            return await task
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if self.error is not None and (handler is None or not handler.cancelling()):
                raise self.error from None
            raise
        finally:
            self._deciding = None
            task.cancel()

    async def _replay(self, job: Job, decision: Decision, answer: router_pb2.CachedAnswer) -> End:
        """Stream a remembered answer like a fresh one."""
        self._free, self._served = True, pb.Served(cache=decision.cache)
        await self.accepted(
            pb.Accepted(
                request_id=job.request_id,
                model=decision.model,
                revision=answer.revision,
                seed=job.sampling.seed,
                prompt_tokens=len(job.token_ids),
            )
        )
        for delta in replay.deltas(answer):
            if self.error is not None:
                raise self.error
            await self.delta(delta)
        served = pb.Served(
            cache=decision.cache,
            cache_age_s=answer.age_s,
            cache_similarity=answer.score,
            cache_purge_id=answer.purge_id,
        )
        tokens = sum(len(choice.token_ids) for choice in answer.choices)
        end = End(
            pb.Usage(prompt_tokens=len(job.token_ids), completion_tokens=tokens),
            served,
            [_REASONS.get(choice.finish_reason, "stop") for choice in answer.choices],
        )
        self._report(job, end)
        decided_by = self._progress.decided_by
        if decision.shadow_id and self._shadows is not None and decided_by is not None:
            self._shadows.ask(job, decision.shadow_id, decided_by)
        return end

    def _report(self, job: Job, end: End) -> None:
        progress = self._progress
        if progress.decision_id and progress.decided_by is not None:
            ttft_ms = self._ttft_ms()
            total_ms = (self._loop.time() - self.started) * 1e3
            request = router_pb2.ReportRequest(
                decision_id=progress.decision_id,
                request_id=job.inner_id,
                usage=end.usage,
                ttft_ms=ttft_ms,
                total_ms=total_ms,
            )
            self.routers.report(request, job.tenant, progress.decided_by)

    # --- ends
    def _ttft_ms(self) -> float:
        return ((self._observer.ttft_s if self._observer is not None else None) or 0.0) * 1e3

    async def _finish(self, end: End) -> None:
        now = self._loop.time()
        served = end.served
        served.queue_ms = ((self._accepted_at or now) - self.started) * 1e3
        served.ttft_ms = self._ttft_ms()
        served.total_ms = (now - self.started) * 1e3
        self._set_trailing(cache_metadata(served))
        self._usage, self._served = end.usage, served
        await self._send(events.finished(end.usage, served))

    def _tokens(self) -> pb.Usage:
        return self._running.usage if self._running is not None else self._usage

    async def _fail(self, error: KvmeshError) -> None:
        """Tell the client: before acceptance by the call's status (raised here), after it by the terminal event."""
        if self.error is None:
            self.error = error
            self._cut_off_later()
        assert self._observer is not None
        usage = self._tokens()
        self._observer.failed(usage, error)
        if self._accepted_at is None:
            raise error
        await self._send(events.failed(error, usage))


def _charged(end: End) -> pb.Usage:
    """What was computed for it; a client is told of the choices that it got."""
    told, computed = end.usage, max(end.usage.completion_tokens, end.generated)
    return pb.Usage(prompt_tokens=told.prompt_tokens, cached_tokens=told.cached_tokens, completion_tokens=computed)


def cache_metadata(served: pb.Served) -> list[tuple[str, str]]:
    """Trailing metadata that tells what the cache did."""
    pairs = [("x-kvmesh-cache", served.cache)]
    if served.cache in ("exact", "semantic"):
        pairs.append(("x-kvmesh-cache-age", f"{served.cache_age_s:.3f}"))
        pairs.append(("x-kvmesh-cache-similarity", f"{served.cache_similarity:.4f}"))
    if served.cache_purge_id:
        pairs.append(("x-kvmesh-cache-purge-id", served.cache_purge_id))
    return pairs
