"""The life of one request, from a checked job to its terminal event.

The handler's own coroutine does everything in order and is never interrupted inside a write to the client. What may
end a request from elsewhere (a limit, Abort, a full buffer, a lost worker) goes through `stop` or the inbox: it frees
the worker at once, and the handler meets the error at its next step. Only the client's leaving cancels the handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvmesh.errors import Cancelled, DeadlineExceeded, Internal, KvmeshError, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import is_retryable, row
from kvmesh.telemetry import metrics, names
from services.gateway import events
from services.gateway.inbox import Inbox, Item, SlowReader
from services.gateway.job import Job, Progress
from services.gateway.observe import Observer
from services.gateway.output import Output
from services.gateway.placement import Placed, Placer
from services.gateway.routers import Routers

log = logging.getLogger(__name__)

# All choices were cut by stop strings: the worker's own end brings its figures, but the client should not wait for it.
END_WAIT_S = 1.0
# A client that does not even take the error of a request that was ended is cut off after this.
STALL_GRACE_S = 5.0


class ClientGone(Exception):
    """A write failed: there is nobody left to tell anything."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Sizes and times of every request."""

    first_metadata_s: float = 10.0
    buffer_tokens: int = 8192
    buffer_bytes: int = 4 << 20
    max_attempts: int = 3


class Request:
    """One request of a client. `send` writes an event; `send_metadata` tells the client that it is being waited for.

    To be made in the handler's own task.
    """

    def __init__(
        self,
        settings: RequestSettings,
        *,
        placer: Placer,
        routers: Routers,
        send: Callable[[pb.GenerateEvent], Awaitable[None]],
        send_metadata: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._placer = placer
        self._routers = routers
        self._send = send
        self._send_metadata = send_metadata
        self._loop = asyncio.get_running_loop()
        self._handler = asyncio.current_task()
        self.started = self._loop.time()
        self._accepted_at: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._placing: asyncio.Task[Placed | router_pb2.CachedAnswer] | None = None
        self._placed: Placed | None = None
        self._progress = Progress()
        self._lost: KvmeshError | None = None
        self._first_token = False
        self._shown = False
        self._output: Output | None = None
        self._worker_end = engine_pb2.WorkerFinished()
        self._usage = pb.Usage()
        self._served = pb.Served()
        self.error: KvmeshError | None = None

    # --- ending from elsewhere
    def stop(self, error: KvmeshError) -> None:
        """End the request with `error`, now. The first error counts."""
        if self.error is not None:
            return
        self.error = error
        if self._placing is not None:
            self._placing.cancel()
        if self._placed is not None:
            self._placed.inbox.fail(error)
        self._cut_off_later()

    def _cut_off_later(self) -> None:
        """The handler may be stuck in a write; it gets a grace to tell the client, then it is ended."""
        if self._handler is not None:
            self._timers.append(self._loop.call_later(STALL_GRACE_S, self._handler.cancel))

    def close(self) -> None:
        """Free everything; idempotent, for the handler's `finally`."""
        for timer in self._timers:
            timer.cancel()
        self._release()

    def _attempt_failed(self, error: KvmeshError) -> None:
        """From the inbox, whatever the handler is doing: the worker must not go on for nothing."""
        if isinstance(error, SlowReader):
            metrics.counter(names.GATEWAY_SLOW_READERS).inc()
            self.stop(error)
        self._release()

    def _release(self) -> None:
        """Let go of the present attempt; the worker is told unless it has ended it itself. Idempotent."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.link.release(placed.key, abort=True)

    def _expire(self, limit: str) -> None:
        if limit != "total" and self._first_token:
            return
        if self._progress.queued:
            self.stop(Overloaded(f"no worker had room within the limit ({limit})", retry_after=1.0))
        else:
            self.stop(DeadlineExceeded(f"the limit ({limit}) ran out", details={"limit": limit}))

    # --- the life
    async def run(self, job: Job, observer: Observer) -> None:
        """Serve the job to its end. Raises KvmeshError only before acceptance; later errors are terminal events."""
        code = 0
        answer: router_pb2.CachedAnswer | None = None
        ttft, total = job.limits.ttft.remaining(), job.limits.total.remaining()
        self._timers.append(self._loop.call_later(total, self._expire, "total"))
        if ttft < total:
            self._timers.append(self._loop.call_later(ttft, self._expire, "time to first token"))
        try:
            try:
                answer = await self._serve(job, observer)
            except KvmeshError as error:
                raise self.error or error from None
            except (asyncio.CancelledError, ClientGone):
                code = row(self.error or Cancelled).code.value[0]
                self._note_failure(job, observer, self.error or Cancelled("the client left"))
                raise
            except Exception as exc:
                log.exception("request %s failed", job.inner_id)
                raise Internal(f"internal error ({type(exc).__name__})") from exc
        except KvmeshError as error:
            code = row(error).code.value[0]
            await self._fail(job, observer, error)
        finally:
            self.close()
            observer.ended(self._loop.time())
            self._report(job, observer, code, answer)

    async def _serve(self, job: Job, observer: Observer) -> router_pb2.CachedAnswer | None:
        """Attempts until one ends well; returns the answer to remember."""
        while True:
            placed = await self._place(job)
            if isinstance(placed, router_pb2.CachedAnswer):
                await self._serve_cached(job, placed, observer)
                return None
            self._placed = placed
            if placed.inbox.error is not None:
                # It failed between the worker's acceptance and here.
                self._release()
            if self._accepted_at is None:
                await self._accept(job, placed.model, placed.revision)
            try:
                return await self._stream(job, placed, observer)
            except KvmeshError as error:
                self._release()
                if not self._again(error, placed):
                    raise
                log.warning("request %s is placed again: %s", job.inner_id, error.message)

    def _again(self, error: KvmeshError, placed: Placed) -> bool:
        """Whether a failed attempt is followed by another: only while the client has seen no output."""
        if self.error is not None or self._shown or not is_retryable(error):
            return False
        self._progress.failures += 1
        if self._progress.failures >= self._settings.max_attempts:
            return False
        if not isinstance(error, Overloaded):
            self._progress.excluded.add(placed.link.info.worker_id)
        self._lost = error
        self._first_token = False
        return True

    async def _place(self, job: Job) -> Placed | router_pb2.CachedAnswer:
        """Place the job, cancellable by `stop`. After a lost attempt, failing to find another reports that loss."""
        if self.error is not None:
            raise self.error
        healing = self._lost is not None
        task = asyncio.create_task(self._placer.place(job, self._progress, lambda: self._inbox(job)), name="place")
        self._placing = task
        placed: Placed | router_pb2.CachedAnswer | None = None
        try:
            await asyncio.wait([task], timeout=self._settings.first_metadata_s)
            if not task.done() and self._accepted_at is None:
                await self._send_metadata()
            placed = await task
        except BaseException as exc:
            if healing:
                metrics.counter(names.GATEWAY_HEALS).labels("failed").inc()
            handler = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and self.error is not None and not handler.cancelling():
                raise self.error from None
            if isinstance(exc, Unavailable) and self._lost is not None:
                raise self._lost from exc
            raise
        finally:
            self._placing = None
            if placed is None:
                _abandon(task)
        if healing:
            metrics.counter(names.GATEWAY_HEALS).labels("ok").inc()
        if self.error is not None:
            # Accepted in the very moment the request was stopped.
            if isinstance(placed, Placed):
                placed.link.release(placed.key, abort=True)
            raise self.error
        return placed

    def _inbox(self, job: Job) -> Inbox:
        return Inbox(
            choices=job.sampling.best_of,
            max_tokens=self._settings.buffer_tokens,
            max_bytes=self._settings.buffer_bytes,
            on_failure=self._attempt_failed,
        )

    async def _accept(self, job: Job, model: str, revision: str) -> None:
        self._accepted_at = self._loop.time()
        seed, prompt_tokens = job.sampling.seed, len(job.token_ids)
        await self._send(events.accepted(job.request_id, model, revision, seed, prompt_tokens))

    # --- streaming
    async def _stream(self, job: Job, placed: Placed, observer: Observer) -> router_pb2.CachedAnswer | None:
        output = self._output = Output(job.sampling, job.tokenizer)
        ended = False
        while not ended:
            items = await (self._last_items(placed) if output.ended else placed.inbox.get())
            if items is None:
                break
            # A handler that falls behind finds several frames at once and sends them as one: its cost is bounded.
            pending: dict[int, pb.Delta] = {}
            for item in items:
                if isinstance(item, engine_pb2.SequenceDelta):
                    self._feed(placed, output, item, pending)
                elif isinstance(item, engine_pb2.PromptLogprobs):
                    self._shown = True
                    await self._send(events.prompt([output.name_tokens(entry) for entry in item.logprobs]))
                else:
                    self._worker_end, ended = item, True
            for delta in pending.values():
                await self._deliver(delta, observer)
        if not output.ended:
            raise Internal("the worker ended the request before its choices")
        if output.buffered:
            for delta in output.best():
                await self._deliver(delta, observer)
        self._release()
        await self._finish(job, placed, output, observer)
        return output.answer(placed.revision, len(job.token_ids)) if job.may_store else None

    async def _last_items(self, placed: Placed) -> list[Item] | None:
        """What follows after all choices were cut by stop strings here; None when the worker does not say in time.

        The answer is whole by then, so losing the worker now loses its figures only.
        """
        try:
            async with asyncio.timeout(END_WAIT_S):
                return list(await placed.inbox.get())
        except TimeoutError:
            return None
        except KvmeshError:
            if self.error is not None:
                raise
            return None

    def _feed(
        self, placed: Placed, output: Output, given: engine_pb2.SequenceDelta, pending: dict[int, pb.Delta]
    ) -> None:
        """Turn a worker's delta into the client's, joined to what is pending for the same choice."""
        self._first_token = self._first_token or bool(given.token_ids)
        delta, stopped = output.feed(given)
        if stopped and self._placed is placed:
            placed.link.abort(placed.key, [given.choice])
        if delta is None:
            return
        before = pending.setdefault(delta.choice, delta)
        if before is not delta:
            text = before.text + delta.text
            before.MergeFrom(delta)  # Concatenates lists; a set finish reason wins.
            before.text = text

    async def _deliver(self, delta: pb.Delta, observer: Observer) -> None:
        self._shown = True
        await self._send(events.delta(delta))
        observer.tokens(delta.choice, len(delta.token_ids), self._loop.time())

    async def _serve_cached(self, job: Job, answer: router_pb2.CachedAnswer, observer: Observer) -> None:
        """Stream a remembered answer like a fresh one."""
        self._first_token = True
        if self._accepted_at is None:
            await self._accept(job, job.served, answer.revision)
        for index, choice in enumerate(answer.choices):
            reason = choice.finish_reason
            delta = pb.Delta(choice=index, text=choice.text, token_ids=choice.token_ids, finish_reason=reason)
            await self._deliver(delta, observer)
        tokens = sum(len(choice.token_ids) for choice in answer.choices)
        self._usage = pb.Usage(prompt_tokens=len(job.token_ids), completion_tokens=tokens)
        self._served = self._how(observer)
        self._served.cache = answer.kind
        await self._end_well(observer, ["stop"] * len(answer.choices))

    # --- ends
    async def _finish(self, job: Job, placed: Placed, output: Output, observer: Observer) -> None:
        end = self._worker_end
        self._usage = pb.Usage(
            prompt_tokens=len(job.token_ids),
            completion_tokens=output.completion_tokens,
            cached_tokens=max(end.cached_tokens, placed.cached_tokens),
        )
        self._served = self._how(observer)
        self._served.decode_worker = placed.link.info.worker_id
        self._served.prefill_worker = end.prefill_worker
        self._served.transport = end.transport
        self._served.transfer_bytes = end.transfer_bytes
        await self._end_well(observer, output.finish_reasons)

    def _how(self, observer: Observer) -> pb.Served:
        now = self._loop.time()
        return pb.Served(
            cache="none",
            degraded=self._progress.degraded,
            retries=max(0, self._progress.submits - 1),
            queue_ms=((self._accepted_at or now) - self.started) * 1e3,
            ttft_ms=(observer.ttft_s or 0.0) * 1e3,
            total_ms=(now - self.started) * 1e3,
        )

    async def _end_well(self, observer: Observer, reasons: list[str]) -> None:
        await self._send(events.finished(self._usage, self._served))
        observer.finished(self._usage, reasons)

    def _note_failure(self, job: Job, observer: Observer, error: KvmeshError) -> None:
        tokens = self._output.completion_tokens if self._output is not None else 0
        self._usage = pb.Usage(prompt_tokens=len(job.token_ids), completion_tokens=tokens)
        observer.failed(self._usage, error)

    async def _fail(self, job: Job, observer: Observer, error: KvmeshError) -> None:
        """Tell the client: before acceptance by the call's status (raised here), after it by the terminal event."""
        self._release()
        if self.error is None:
            self.error = error
            self._cut_off_later()
        self._note_failure(job, observer, error)
        if self._accepted_at is None:
            raise error
        await self._send(events.failed(error, self._usage))

    def _report(self, job: Job, observer: Observer, code: int, answer: router_pb2.CachedAnswer | None) -> None:
        decided_by = self._progress.decided_by
        if self._progress.decision_id and decided_by is not None:
            self._routers.report(
                router_pb2.ReportRequest(
                    decision_id=self._progress.decision_id,
                    request_id=job.inner_id,
                    code=code,
                    usage=self._usage,
                    decode_worker=self._served.decode_worker,
                    prefill_worker=self._served.prefill_worker,
                    answer=answer if code == 0 else None,
                    ttft_ms=(observer.ttft_s or 0.0) * 1e3,
                    total_ms=(self._loop.time() - self.started) * 1e3,
                ),
                job.tenant,
                decided_by,
            )


def _abandon(task: asyncio.Task[Placed | router_pb2.CachedAnswer]) -> None:
    """End a placing whose result nobody takes; an attempt that a worker has just accepted is aborted there.

    The task may be done already: the handler can be cancelled in the very step in which its result arrives.
    """
    task.cancel()

    def late(done: asyncio.Task[Placed | router_pb2.CachedAnswer]) -> None:
        if not done.cancelled() and done.exception() is None:
            result = done.result()
            if isinstance(result, Placed):
                result.link.release(result.key, abort=True)

    task.add_done_callback(late)
