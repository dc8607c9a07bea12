"""Requests accepted by decode: each from Submit to its one terminal in a frame."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from kvmesh.engine import events
from kvmesh.engine.events import CoreEvent, EngineRequest, Mode, RequestKey
from kvmesh.engine.worker.context import WorkerContext
from kvmesh.engine.worker.convert import delta_proto, error_proto, logprob_proto
from kvmesh.engine.worker.frames import GatewayStream
from kvmesh.engine.worker.remote_prefill import RemotePrefill
from kvmesh.engine.worker.steps import RequestStep, no_hook
from kvmesh.errors import AlreadyExists, Cancelled, DeadlineExceeded, Internal, KvmeshError, Unavailable
from kvmesh.grammar.source import GrammarSource
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.rpc.limits import RequestLimits
from kvmesh.rpc.status import public_error
from kvmesh.telemetry import about, names, tracing
from kvmesh.transfer.handles import SlotResult

log = logging.getLogger(__name__)

# The core ends a request at its deadline. Where it cannot (a step hangs), the terminal is sent without it after this.
OVERDUE_S = 5.0


class DecodeRequest:
    """One accepted (request, attempt). Everything happens on the event loop."""

    def __init__(
        self,
        ctx: WorkerContext,
        stream: GatewayStream,
        request: EngineRequest,
        *,
        limits: RequestLimits,
        targets: Iterable[pb.PrefillTarget],
        cache_salt: str,
        tenant: str,
        span: Span,
        on_done: Callable[[DecodeRequest], None],
        grammar: GrammarSource | None = None,
    ) -> None:
        self.ctx = ctx
        self.key = request.key
        self.stream = stream
        self.engine_request = request
        self.limits = limits
        self.targets = list(targets)
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.ended = False
        self.prefill_retries = 0
        self.remote_cached = 0
        self._remote: tuple[str, SlotResult] | None = None
        self._span = span
        self._on_done = on_done
        self._flow: asyncio.Task[None] | None = None
        self._last_token: dict[int, float] = {}
        self._reasons: set[str] = set()
        self._tokens_seen = 0
        self._counted_local = False
        # For the spans of its phases, on the monotonic clock.
        self._admitted_at: float | None = None
        self._kv_at: float | None = None
        self._first_at: float | None = None
        # While its grammar is compiled it is not in the core yet; choices may be aborted meanwhile.
        self._grammar = grammar
        self._compiling: asyncio.Task[None] | None = None
        self._early: set[int] = set()

    def start(self) -> None:
        """Hand it to the core, at once or when its grammar is there. Raises what the core refuses; no terminal follows
        then."""
        if self._grammar is not None:
            self._compiling = self.ctx.spawn(self._compile(self._grammar), name="grammar")
        else:
            self._submit()

    def _submit(self) -> None:
        self.ctx.pump.register(self.key, self)
        try:
            self.ctx.core.submit(self.engine_request)
        except KvmeshError:
            self.ctx.pump.forget(self.key)
            raise

    async def _compile(self, grammar: GrammarSource) -> None:
        """Wait for the grammar as others wait for pages; what fails here ends the request."""
        compiler, request = self.ctx.grammars, self.engine_request
        assert compiler is not None
        try:
            async with asyncio.timeout(self.limits.current(first_token_seen=False).timeout()):
                match = await compiler.begin(
                    grammar,
                    request.token_ids[request.prompt_len :],
                    request.sampling.stop_token_ids,
                    request.sampling.ignore_eos,
                )
            self.engine_request = dataclasses.replace(request, grammar=match)
            self._compiling = None
            self._submit()
        except KvmeshError as error:
            self.finish(error, None)
        except TimeoutError:
            self.finish(DeadlineExceeded("the grammar was not compiled in time"), None)
        except asyncio.CancelledError:
            # Its own end, or the compiler's.
            self.finish(Unavailable("the worker is stopping"), None)
            raise
        except BaseException as error:  # a panic of the library's is no Exception
            log.exception("compiling a grammar failed")
            self.finish(Internal(f"compiling the grammar failed: {error!r}"), None)
        else:
            if self._early:
                self.abort_choices(self._early)

    def abort(self, error: KvmeshError) -> None:
        """End it with `error`; the terminal follows from the core."""
        if self._compiling is not None:
            self.finish(error, None)
        else:
            self.ctx.core.abort(self.key, error=error)

    def abort_choices(self, choices: Iterable[int]) -> None:
        """End single choices silently."""
        if self._compiling is not None:
            self._early.update(choices)
        else:
            self.ctx.core.abort(self.key, choices=list(choices))

    def prefilled_here(self, cause: str) -> None:
        """The prompt is computed on this worker: counted once, by its first cause."""
        if not self._counted_local:
            self._counted_local = True
            self.ctx.meters.local_prefill(cause)

    def received(self, target: pb.PrefillTarget, result: SlotResult) -> None:
        """The prompt's KV came from `target`."""
        self._remote = (target.worker_id or target.address, result)

    @property
    def span(self) -> Span:
        """Its own, from Submit to the terminal."""
        return self._span

    def trace_context(self) -> Context:
        """Parent for spans of this request's own work."""
        return trace.set_span_in_context(self._span, Context())

    # -- events of the core

    def on_event(self, event: CoreEvent) -> None:
        """In the core's order."""
        if self.ended:
            return
        if isinstance(event, events.Tokens):
            self._on_tokens(event)
        elif isinstance(event, events.Admitted):
            self._on_admitted(event)
        elif isinstance(event, events.PromptScored):
            self.stream.prompt(
                pb.PromptLogprobs(
                    request_id=self.key.request_id,
                    attempt=self.key.attempt,
                    logprobs=[logprob_proto(score) for score in event.logprobs],
                )
            )
        elif isinstance(event, events.Ended):
            self.finish(event.error, event.usage)

    def _on_admitted(self, event: events.Admitted) -> None:
        self._span.add_event("admitted", {names.ATTR_PREFIX_HIT_TOKENS: event.cached_tokens})
        self._admitted_at = self._admitted_at or time.monotonic()
        if event.awaiting:
            self._flow = self.ctx.spawn(RemotePrefill(self.ctx, self, event).run(), name="remote-prefill")
            self._flow.add_done_callback(self._on_fetched)
            return
        if self.engine_request.mode is Mode.REMOTE:
            self.prefilled_here("short")
        self._announce(RequestStep.ADMITTED)

    def _on_fetched(self, _: asyncio.Task[None]) -> None:
        self._kv_at = self._kv_at or time.monotonic()

    def _on_tokens(self, event: events.Tokens) -> None:
        now = time.monotonic()
        last = self._last_token.get(event.choice)
        if event.token_ids:
            if self._tokens_seen == 0:
                self._first_at = now
            if self._tokens_seen < 2:
                self._announce(RequestStep.FIRST_TOKEN if self._tokens_seen == 0 else RequestStep.DECODING)
            self._tokens_seen += 1
            if last is not None:
                self.ctx.meters.inter_token((now - last) / len(event.token_ids))
            self._last_token[event.choice] = now
        if event.finish_reason is not None:
            self._reasons.add(event.finish_reason.value)
        self.stream.tokens(delta_proto(self.key, event))

    def finish(self, error: KvmeshError | None, usage: events.Usage | None) -> None:
        """The terminal: once, whoever calls it first."""
        if self.ended:
            return
        self.ended = True
        if self._flow is not None:
            self._flow.cancel()
        if self._compiling is not None and self._compiling is not asyncio.current_task():
            self._compiling.cancel()
        end = pb.RequestEnd(request_id=self.key.request_id, attempt=self.key.attempt)
        e2e = time.monotonic() - self.engine_request.arrival
        if error is None and usage is not None:
            end.finished.CopyFrom(self._finished(usage))
            self.ctx.meters.finished(usage, e2e, self._reasons)
            self._span.set_attributes(
                {
                    names.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
                    names.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
                    names.GEN_AI_FINISH_REASONS: sorted(self._reasons),
                }
            )
        else:
            public = public_error(error) if error is not None else Cancelled("ended")
            end.error.CopyFrom(error_proto(public))
            self.ctx.meters.failed(usage, e2e, public.reason)
            tracing.mark_failed(self._span, public.reason)
            if public.reason not in names.LEAVINGS:
                told = about.about(self.key.request_id, self._span)
                log.warning("attempt %d failed: %s", self.key.attempt, public.reason, extra=told)
        self.stream.end(end)
        self._phases()
        self._span.end()
        self._on_done(self)

    def _phases(self) -> None:
        """One span each for waiting, computing the prompt (where that was done here) and decoding."""
        now, parent = time.monotonic(), self.trace_context()
        arrival, admitted = self.engine_request.arrival, self._admitted_at
        tracing.past_span(names.SPAN_ENGINE_QUEUE, arrival, admitted or now, parent=parent)
        if admitted is None:
            return
        ready = self._kv_at or admitted
        if self._counted_local:
            tracing.past_span(names.SPAN_ENGINE_COMPUTE, ready, self._first_at or now, parent=parent)
            ready = self._first_at or now
        if self._first_at is not None:
            tracing.past_span(names.SPAN_ENGINE_DECODE, ready, now, parent=parent)

    def _finished(self, usage: events.Usage) -> pb.WorkerFinished:
        finished = pb.WorkerFinished(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            # Both caches cover a prefix of the prompt: the longer one counts.
            cached_tokens=max(usage.cached_tokens, self.remote_cached),
            queue_ms=usage.queue_ms,
            prefill_ms=usage.prefill_ms,
            decode_ms=usage.decode_ms,
            prefill_retries=self.prefill_retries,
            preemptions=usage.preemptions,
        )
        if self._remote is not None:
            worker, result = self._remote
            finished.prefill_worker = worker
            finished.transport = result.transport
            finished.transfer_bytes = result.bytes
            self._span.set_attributes(
                {
                    names.ATTR_PREFILL_WORKER: worker,
                    names.ATTR_TRANSPORT: result.transport,
                    names.ATTR_TRANSFER_BYTES: result.bytes,
                }
            )
        return finished

    def _announce(self, step: RequestStep) -> None:
        if self.ctx.at_step is not no_hook:
            self.ctx.spawn(self._hook(step), name="step-hook")

    async def _hook(self, step: RequestStep) -> None:
        await self.ctx.at_step(step, self.key)


class DecodeRequests:
    """The requests that live on this worker, by key and by the stream that they belong to."""

    def __init__(self, on_seen: Callable[[str], None] | None = None) -> None:
        """`on_seen(request_id)`: told of each accepted request (routers end their credit by it)."""
        self._by_key: dict[RequestKey, DecodeRequest] = {}
        self._by_stream: dict[GatewayStream, set[DecodeRequest]] = {}
        self._on_seen = on_seen
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def check_new(self, key: RequestKey) -> None:
        """Raises AlreadyExists for one that runs."""
        if key in self._by_key:
            raise AlreadyExists(f"attempt {key.attempt} of this request runs already", details={"field": "request_id"})

    def add(self, request: DecodeRequest) -> None:
        """Start it; raises what the core refuses."""
        self._by_key[request.key] = request
        try:
            request.start()
        except BaseException:
            del self._by_key[request.key]
            raise
        self._by_stream.setdefault(request.stream, set()).add(request)
        self._idle.clear()
        if self._on_seen is not None:
            self._on_seen(request.key.request_id)

    def done(self, request: DecodeRequest) -> None:
        """Forget one that has its terminal."""
        self._by_key.pop(request.key, None)
        siblings = self._by_stream.get(request.stream)
        if siblings is not None:
            siblings.discard(request)
            if not siblings:
                del self._by_stream[request.stream]
        if not self._by_key:
            self._idle.set()

    def get(self, key: RequestKey) -> DecodeRequest | None:
        """The request of a key, if it lives."""
        return self._by_key.get(key)

    def of_stream(self, stream: GatewayStream) -> list[DecodeRequest]:
        """Requests whose terminals go to that stream."""
        return list(self._by_stream.get(stream, ()))

    def all(self) -> list[DecodeRequest]:
        """Every live request."""
        return list(self._by_key.values())

    def abort_stream(self, stream: GatewayStream, error: KvmeshError) -> int:
        """The stream is gone: its requests end, unseen."""
        requests = self.of_stream(stream)
        for request in requests:
            request.abort(error)
        return len(requests)

    def end_overdue(self) -> None:
        """Send the terminal of requests that the core has left behind its deadline (a step that hangs)."""
        now = time.monotonic()
        for request in self.all():
            if now > request.limits.total.at + OVERDUE_S:
                error = DeadlineExceeded("the request's time limit ran out", details={"limit": "total"})
                request.abort(error)
                request.finish(error, None)

    async def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until none lives; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
