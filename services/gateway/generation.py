"""The life of one generation, from a decision to its end: place, stream, and go on elsewhere when a worker is lost.

One coroutine (`run`) does everything in order and is never interrupted inside a write to its sink. What may end a
generation from elsewhere (a limit, `stop`, a full buffer) goes through the inboxes: it frees the workers at once, and
`run` meets the error at its next step. It knows nothing of clients: its limits, its attempts and its report are its
own, so that it can outlive the handler that began it.

Healing: tokens that have been taken are kept. What of them is not finished is submitted again, a choice at a time, with
the output so far; the worker replays it, and noise is a function of (seed, choice, position), so that the text goes on
as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.trace import SpanContext

from kvmesh.errors import Cancelled, DataLoss, Internal, KvmeshError, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import is_retryable, row
from kvmesh.telemetry import metrics, names, tracing
from services.gateway.decision import Decision, NoWorker, Placed
from services.gateway.demux import Key
from services.gateway.heals import Heals
from services.gateway.inbox import Inbox, SlowReader
from services.gateway.job import Job, Progress, Share
from services.gateway.output import Output
from services.gateway.placement import Placer
from services.gateway.placings import Placings
from services.gateway.report import report
from services.gateway.routers import Routers
from services.gateway.sink import End, Ended, RequestSettings, Sink, SinkClosed, Timers, out_of_time

log = logging.getLogger(__name__)

# All choices were cut by stop strings: the worker's own end brings its figures, but nobody should wait for it.
END_WAIT_S = 1.0
# A request that loses worker after worker, though each gives it tokens, may be what kills them.
MAX_LOSSES = 32


class Past(NamedTuple):
    """What became of choices before: see `Share`. `lost`: the span of the attempt that they were lost with."""

    failures: int = 0
    turned_away: int = 0
    lost: SpanContext | None = None


NO_PAST = Past()


class Generation:
    """One generation of a job.

    `decision`: made by `Placer.decide` just now, with candidates; without one, workers alone are asked for.
    `resume`: choice -> its output so far, of a generation that is taken over; `ended`: its choices that had ended.
    `revision`: that readers were told of, the only one to go on with. `lead`: the flight that its report ends, if not
    the decision's. `started`: when the request came, on the loop's clock. `on_stop` is called once when `stop` ends it.
    """

    def __init__(
        self,
        job: Job,
        settings: RequestSettings,
        sink: Sink,
        *,
        placer: Placer,
        routers: Routers,
        heals: Heals,
        progress: Progress | None = None,
        decision: Decision | None = None,
        resume: Mapping[int, Sequence[int]] | None = None,
        ended: Mapping[int, Ended] | None = None,
        revision: str = "",
        lead: router_pb2.Flight | None = None,
        started: float | None = None,
        on_stop: Callable[[KvmeshError], None] | None = None,
    ) -> None:
        self._job = job
        self._settings = settings
        self._sink = sink
        self._placer = placer
        self._routers = routers
        self._heals = heals
        self._progress = progress or Progress()
        self._decision = decision
        self._lead = lead if lead is not None or decision is None else decision.lead
        self._cache = decision.cache if decision is not None else "bypass"
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time() if started is None else started
        self._on_stop = on_stop
        self._wake = asyncio.Event()
        self._timers: Timers | None = None
        self._output = Output(job.sampling, job.tokenizer)
        for choice, token_ids in (resume or {}).items():
            end = (ended or {}).get(choice, Ended(pb.FINISH_REASON_UNSPECIFIED))
            self._output.restore(choice, token_ids, end.finish, end.stop_reason)
        self._placings = Placings(job, self._progress, placer, heals, self._wake)
        self._parts: dict[Key, Placed] = {}
        self._worker = self._model = ""
        self._worker_end = engine_pb2.WorkerFinished()
        self._cached_tokens = 0
        self._accepted_at: float | None = None
        self._first_token_at: float | None = self._started if any((resume or {}).values()) else None
        self._revision = revision
        self._told = False
        self._scored = False
        self._loss: KvmeshError | None = None
        self._losses = 0
        # One worker may have had each choice for itself.
        self._most_losses = MAX_LOSSES * job.sampling.best_of
        self._heal_count = 0
        self._end_by: float | None = None
        self.error: KvmeshError | None = None

    # --- seen from elsewhere
    def stop(self, error: KvmeshError) -> None:
        """End it with `error`, now. The first error counts."""
        if self.error is not None:
            return
        self.error = error
        self._placings.cancel()
        for placed in list(self._parts.values()):
            placed.inbox.fail(error)
        self._wake.set()
        if self._on_stop is not None:
            self._on_stop(error)

    def close(self) -> None:
        """Free everything: timers, placings, attempts. Idempotent; `run` does it at its end."""
        if self._timers is not None:
            self._timers.cancel()
        self._placings.close()
        for placed in list(self._parts.values()):
            self._release(placed)
        # Nothing that is over refers in circles: buffers go with the request, not with the next collection.
        self._on_stop = None

    @property
    def usage(self) -> pb.Usage:
        """Tokens so far."""
        prompt_tokens = len(self._job.token_ids)
        return pb.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._output.completion_tokens,
            cached_tokens=min(self._cached_tokens, prompt_tokens),
        )

    @property
    def served(self) -> pb.Served:
        """Where and how, so far."""
        now, end = self._loop.time(), self._worker_end
        first = self._first_token_at
        return pb.Served(
            decode_worker=self._worker,
            prefill_worker=end.prefill_worker,
            transport=end.transport,
            transfer_bytes=end.transfer_bytes,
            cache=self._cache,
            degraded=self._progress.degraded,
            retries=max(0, self._progress.submits - 1),
            heals=self._heal_count,
            queue_ms=((self._accepted_at or now) - self._started) * 1e3,
            ttft_ms=(first - self._started) * 1e3 if first is not None else 0.0,
            total_ms=(now - self._started) * 1e3,
        )

    # --- the life
    async def run(self) -> End:
        """Everything, once. Raises KvmeshError for an end that is none, and what the sink raises."""
        code = row(Internal).code.value[0]
        answer: router_pb2.CachedAnswer | None = None
        self._timers = Timers(self._job.limits, self._expire)
        try:
            end = await self._run()
            code, answer = 0, end.answer
            return end
        except KvmeshError as error:
            told = self.error or error
            code = row(told).code.value[0]
            raise told from None
        except (asyncio.CancelledError, SinkClosed):
            code = row(self.error or Cancelled).code.value[0]
            raise
        except Exception as exc:
            log.exception("request %s failed", self._job.inner_id)
            raise Internal(f"internal error ({type(exc).__name__})") from exc
        finally:
            self.close()
            report(self._routers, self._job, self._progress, self.usage, self.served, code, answer, self._lead)

    async def _run(self) -> End:
        self._place(self._shares(self._output.unfinished), self._decision)
        while not self._over():
            await self._pause()
            if self.error is not None:
                raise self.error
            await self._collect()
            await self._advance()
        if self._output.buffered:
            for delta in self._output.best():
                await self._sink.delta(delta)
        for placed in list(self._parts.values()):
            self._release(placed)
        answer = self._output.answer(self._revision, len(self._job.token_ids)) if self._job.may_store else None
        if answer is not None:
            answer.model = self._model or self._job.served
        return End(self.usage, self.served, self._output.finish_reasons, answer, self._output.generated)

    def _over(self) -> bool:
        """True when every choice has ended, and the workers have said so or not in time.

        The output is whole by then, so losing a worker now loses its figures only.
        """
        if not self._output.ended:
            return False
        if self._end_by is None:
            self._end_by = self._loop.time() + END_WAIT_S
        return not self._parts or self._loop.time() >= self._end_by

    async def _pause(self) -> None:
        """Until something happened."""
        until = self._end_by
        if until is None and self._accepted_at is None and not self._told:
            until = self._loop.time() + self._settings.first_metadata_s
        if until is None:
            await self._wake.wait()
        else:
            try:
                async with asyncio.timeout_at(until):
                    await self._wake.wait()
            except TimeoutError:
                if self._end_by is None:
                    self._told = True
                    await self._sink.waiting()
        self._wake.clear()

    def _expire(self, limit: str) -> None:
        if limit == "total" or self._first_token_at is None:
            self.stop(out_of_time(limit, self._placer.retry_after(self._job) if self._progress.queued else None))

    # --- placing
    @property
    def _begun(self) -> bool:
        """True once there is output that the next worker must go on from."""
        return self._first_token_at is not None or self._scored

    def _shares(self, choices: Sequence[int], past: Past = NO_PAST) -> list[Share]:
        """How `choices` are submitted: all at once while there is nothing of them, else each for itself."""
        total = self._job.sampling.best_of
        tokens = {choice: list(self._output.tokens(choice)) for choice in choices}
        if len(choices) == total and not any(tokens.values()):
            return [self._share(0, total, (), past)]
        return [self._share(choice, 1, tokens[choice], past) for choice in choices]

    def _share(self, first_choice: int, choices: int, output: Sequence[int], past: Past) -> Share:
        return Share(
            first_choice,
            choices,
            output,
            heal=self._begun,
            again=self._loss is not None or self._begun,
            scored=self._scored,
            revision=self._revision,
            failures=past.failures,
            turned_away=past.turned_away,
            replaces=past.lost,
        )

    def _place(self, shares: Sequence[Share], decision: Decision | None = None) -> None:
        for share in shares:
            self._placings.begin(share, functools.partial(self._inbox, share), decision)

    def _inbox(self, share: Share) -> Inbox:
        return Inbox(
            positions=share.positions,
            max_tokens=self._settings.buffer_tokens,
            max_bytes=self._settings.buffer_bytes,
            on_failure=functools.partial(self._attempt_failed, share),
            wake=self._wake,
        )

    async def _collect(self) -> None:
        """Take the placings that are done."""
        for share, result in self._placings.done():
            try:
                placed = result()
            except KvmeshError as error:
                self._unplaced(share, error)
                continue
            self._parts[placed.key] = placed
            self._worker, self._model = placed.link.info.worker_id, placed.model
            self._cached_tokens = max(self._cached_tokens, placed.cached_tokens)
            if share.again:
                metrics.counter(names.GATEWAY_HEALS).labels("ok").inc()
                self._heal_count += share.heal
            if placed.inbox.error is not None:
                # It failed between the worker's acceptance and here.
                self._release(placed, forget=False)
            # What has been told once holds: an answer is of one revision, with output or without.
            self._revision = self._revision or placed.revision
            if self._accepted_at is None:
                await self._accept(placed)

    async def _accept(self, placed: Placed) -> None:
        self._accepted_at = self._loop.time()
        job = self._job
        await self._sink.accepted(
            pb.Accepted(
                request_id=job.request_id,
                model=placed.model,
                revision=placed.revision,
                seed=job.sampling.seed,
                prompt_tokens=len(job.token_ids),
            )
        )

    def _unplaced(self, share: Share, error: KvmeshError) -> None:
        """A share found no worker. After a loss, failing to find another is told as that loss."""
        if not share.again:
            raise error
        # What a worker refused, the placer has counted.
        left = share.failures < self._settings.max_attempts
        if share.heal and left and is_retryable(error) and not isinstance(error, NoWorker):
            self._place([share])
            return
        metrics.counter(names.GATEWAY_HEALS).labels("failed").inc()
        if self._loss is not None and (share.heal or isinstance(error, Unavailable)):
            raise self._loss from error
        raise error

    # --- streaming
    async def _advance(self) -> None:
        """Show what the workers sent; place again what was lost."""
        # A consumer that falls behind finds several frames at once and shows them as one: its cost is bounded.
        pending: dict[int, pb.Delta] = {}
        prompts: list[engine_pb2.PromptLogprobs] = []
        for placed in list(self._parts.values()):
            for item in placed.inbox.take():
                if isinstance(item, engine_pb2.SequenceDelta):
                    self._feed(placed, item, pending)
                elif isinstance(item, engine_pb2.PromptLogprobs):
                    if not self._scored:
                        prompts.append(item)
                    self._scored = True
                else:
                    self._finished(placed, item)
            if placed.inbox.error is not None:
                self._lost(placed, placed.inbox.error)
        for scored in prompts:
            await self._sink.prompt(
                pb.PromptScored(logprobs=[self._output.name_tokens(entry) for entry in scored.logprobs])
            )
        for delta in pending.values():
            await self._sink.delta(delta)

    def _feed(self, placed: Placed, given: engine_pb2.SequenceDelta, pending: dict[int, pb.Delta]) -> None:
        """Turn a worker's delta into the client's, joined to what is pending for the same choice."""
        if given.token_ids and self._first_token_at is None:
            self._first_token_at = self._loop.time()
        if not placed.spoke:
            # Of a probe that is a long stream, its end would be waited for by all that could go there.
            placed.spoke = True
            placed.link.breaker.left(placed.key)
        delta, stopped = self._output.feed(given)
        if stopped:
            placed.link.abort(placed.key, [given.choice])
        if delta is None:
            return
        before = pending.setdefault(delta.choice, delta)
        if before is not delta:
            text = before.text + delta.text
            before.MergeFrom(delta)  # Concatenates lists; a set finish reason wins.
            before.text = text

    def _finished(self, placed: Placed, end: engine_pb2.WorkerFinished) -> None:
        self._parts.pop(placed.key, None)
        self._worker, self._worker_end = placed.link.info.worker_id, end
        self._cached_tokens = max(self._cached_tokens, end.cached_tokens)
        if self._of(placed.share):
            error = Internal("the worker ended the request before its choices")
            self._progress.failed(placed.link, error)
            raise error
        placed.link.breaker.succeeded()
        placed.link.breaker.left(placed.key)

    def _of(self, share: Share) -> list[int]:
        """Choices of a share that have not ended."""
        mine = range(share.first_choice, share.first_choice + share.choices)
        return [choice for choice in self._output.unfinished if choice in mine]

    # --- losing
    def _attempt_failed(self, share: Share, error: KvmeshError) -> None:
        """From an inbox, whatever `run` is doing: the worker must not go on for nothing."""
        if isinstance(error, SlowReader):
            metrics.counter(names.GATEWAY_SLOW_READERS).inc()
            self.stop(error)
        for placed in list(self._parts.values()):
            if placed.share is share:
                self._release(placed, forget=False)

    def _release(self, placed: Placed, *, forget: bool = True) -> None:
        """Let go of an attempt; the worker is told unless it has ended it itself. Idempotent."""
        if forget:
            self._parts.pop(placed.key, None)
        placed.link.release(placed.key, abort=True)

    def _lost(self, placed: Placed, error: KvmeshError) -> None:
        """An attempt failed: what of it is unfinished goes on elsewhere, or the generation ends with the error."""
        self._release(placed)
        if self.error is not None:
            raise self.error
        share, info = placed.share, placed.link.info
        choices = self._of(share)
        if not choices:
            return
        # Nobody here asked the worker to cancel: it was told so by the end of a stream, like any loss.
        healable = is_retryable(error) or isinstance(error, Cancelled)
        if (healable and not isinstance(error, Overloaded)) or isinstance(error, Internal | DataLoss):
            self._progress.failed(placed.link, error)
        moved = any(len(self._output.tokens(choice)) > len(share.output) for choice in choices)
        failures, turned_away = (0, 0) if moved else (share.failures, share.turned_away)
        if isinstance(error, Overloaded):
            # No failure: it waits for room, as long as its limits let it.
            turned_away += 1
            self._progress.queued = True
        else:
            failures += 1
            self._losses += 1
        if not healable or failures >= self._settings.max_attempts or self._losses > self._most_losses:
            raise error
        self._loss = error
        log.warning("request %s is placed again: %s", self._job.inner_id, error.message)
        attributes: tracing.Attributes = {
            names.ATTR_WORKER: info.worker_id,
            names.ATTR_REPLAYED_TOKENS: sum(len(self._output.tokens(choice)) for choice in choices),
        }
        span = trace.get_current_span()
        span.add_event("worker lost", attributes)
        if not isinstance(error, Overloaded):
            # Its client never hears of it; whoever looks for lost workers does.
            tracing.keep(span)
        self._place(self._shares(choices, Past(failures, turned_away, placed.span)))
