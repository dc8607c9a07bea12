"""`kvmesh.v1.Prefill.Run`: compute a prompt's KV and write it into the pages that the descriptor names.

    checked → submitted → admitted → transfer started → computing → computed → sent → done

Source pages are read by the sidecar for as long as the transfer has writes in flight. They go back to the core in ONE
place, `_finish`, which runs in a task of its own after the transfer's `done` has resolved, whatever ended the call; and
so do the host pages through which they travel where the sidecar does not reach the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context

from kvmesh.engine import events
from kvmesh.engine.cuda.staging import Lease
from kvmesh.engine.events import CoreEvent, EngineRequest, Mode, RequestKey
from kvmesh.engine.worker.context import WorkerContext
from kvmesh.engine.worker.convert import MAX_PRIORITY, MAX_SALT_BYTES, check_id, check_tokens, refuse
from kvmesh.engine.worker.state import WorkerStatus
from kvmesh.engine.worker.steps import RequestStep
from kvmesh.errors import Cancelled, FailedPrecondition, Internal, InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.hashing import request_seed
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, kvtransfer_pb2
from kvmesh.rpc.auth import ServicerContext, tenant_from
from kvmesh.telemetry import about, names, tracing
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.descriptor import (
    DescriptorLimits,
    check_descriptor,
    check_layouts_match,
    layout_from_proto,
    source_pages,
)
from kvmesh.transfer.handles import TransferHandle

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Run:
    """One Run in the core. The futures resolve as the core reports; each is failed by an early Ended."""

    key: RequestKey
    public: RequestKey
    admitted: asyncio.Future[events.Admitted] = field(init=False)
    computed: asyncio.Future[events.PrefillComputed] = field(init=False)
    ended: asyncio.Future[events.Ended] = field(init=False)
    is_admitted: bool = False
    # On the monotonic clock, for spans.
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    accepted_at: float | None = None
    started_at: float | None = None
    computed_at: float | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.admitted, self.computed = loop.create_future(), loop.create_future()
        self.ended = loop.create_future()

    def on_event(self, event: CoreEvent) -> None:
        """From the pump."""
        if isinstance(event, events.Admitted):
            self.is_admitted = True
            self.admitted_at = time.monotonic()
            _resolve(self.admitted, event)
        elif isinstance(event, events.PrefillComputed):
            self.computed_at = time.monotonic()
            _resolve(self.computed, event)
        elif isinstance(event, events.Ended):
            error = event.error or Internal("the core ended a prefill that was not released")
            _fail(self.admitted, error)
            _fail(self.computed, error)
            _resolve(self.ended, event)

    def phases(self, span: Span) -> None:
        """One span each for waiting and for computing, below that of the call."""
        now, parent = time.monotonic(), set_span_in_context(span, Context())
        tracing.past_span(names.SPAN_ENGINE_QUEUE, self.arrived_at, self.admitted_at or now, parent=parent)
        if self.started_at is not None:
            tracing.past_span(names.SPAN_ENGINE_COMPUTE, self.started_at, self.computed_at or now, parent=parent)


def _resolve(future: asyncio.Future[T], event: T) -> None:
    if not future.done():
        future.set_result(event)


def _fail(future: asyncio.Future[T], error: KvmeshError) -> None:
    if not future.done():
        future.set_exception(error)
        # Looked at here: whoever has left already does not wait for it.
        future.exception()


class PrefillService(engine_pb2_grpc.PrefillServicer):
    """The face of prefill. `ctx` is set once the model is loaded."""

    def __init__(self, status: WorkerStatus, on_seen: Callable[[str], None] | None = None) -> None:
        """`on_seen(request_id)`: told of each prompt taken (routers end their credit by it)."""
        self.status = status
        self.ctx: WorkerContext | None = None
        self._on_seen = on_seen
        self._live: set[_Run] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Runs whose pages are not back yet."""
        return len(self._live)

    async def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until no run is left; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self, error: KvmeshError) -> None:
        """End every run with `error`; its call fails with it and its transfer is drained."""
        for run in self._live:
            if self.ctx is not None:
                self.ctx.core.abort(run.key, error=error)

    async def Run(self, request: pb.RunRequest, context: ServicerContext) -> AsyncIterator[pb.RunResponse]:
        """accepted, then done; or the call's status says why not."""
        self.status.check_accepting()
        assert self.ctx is not None
        ctx = self.ctx
        tenant = tenant_from(context)
        descriptor = _check(ctx, request)
        client = self._sidecar(ctx)
        run = _Run(
            # Two calls may be under way for one (request, attempt): the first still draining, the second placed again.
            RequestKey(f"{request.request_id}\0{next(ctx.serials)}", request.attempt),
            RequestKey(request.request_id, request.attempt),
        )
        engine_request = _engine_request(ctx, request, run.key, context.time_remaining())
        ctx.core.check(engine_request)
        await ctx.at_step(RequestStep.RUN_RECEIVED, run.public)
        with (
            about.of_request(request.request_id),
            tracing.span(names.SPAN_ENGINE_PREFILL, attributes=_attributes(ctx, request, tenant)) as span,
        ):
            self._submit(ctx, run, engine_request)
            if self._on_seen is not None:
                self._on_seen(request.request_id)
            outcome = _Outcome()
            try:
                await ctx.at_step(RequestStep.RUN_SUBMITTED, run.public)
                admitted = await run.admitted
                await ctx.at_step(RequestStep.RUN_ADMITTED, run.public)
                yield pb.RunResponse(
                    accepted=pb.RunAccepted(incarnation=ctx.identity.incarnation, cached_tokens=admitted.cached_tokens)
                )
                run.accepted_at = time.monotonic()
                outcome.client = client
                handle = await self._start_transfer(ctx, client, descriptor, admitted, outcome)
                await ctx.at_step(RequestStep.TRANSFER_STARTED, run.public)
                first, _ = source_pages(ctx.identity.layout, descriptor)
                done = await self._compute_and_send(ctx, run, handle, first)
                await ctx.at_step(RequestStep.SENT, run.public)
                outcome.sent = True
            finally:
                run.phases(span)
                finishing = ctx.spawn_cleanup(self._finish(ctx, run, outcome), name="prefill-finish")
            usage = (await run.ended).usage
            await asyncio.wait({finishing}, timeout=1.0)
            done.queue_ms = usage.queue_ms
            _describe(span, done)
            yield pb.RunResponse(done=done)

    def _sidecar(self, ctx: WorkerContext) -> SidecarClient:
        client = ctx.link.client if ctx.link is not None else None
        if client is None:
            raise Unavailable("this worker's sidecar is not connected")
        return client

    def _submit(self, ctx: WorkerContext, run: _Run, request: EngineRequest) -> None:
        ctx.pump.register(run.key, run)
        try:
            ctx.core.submit(request)
        except KvmeshError:
            ctx.pump.forget(run.key)
            raise
        self._live.add(run)
        self._idle.clear()

    async def _start_transfer(
        self,
        ctx: WorkerContext,
        client: SidecarClient,
        descriptor: kvtransfer_pb2.Descriptor,
        admitted: events.Admitted,
        outcome: _Outcome,
    ) -> TransferHandle:
        """The sidecar takes the descriptor; what the prefix cache holds leaves at once."""
        layout, staging = ctx.identity.layout, ctx.staging
        first, count = source_pages(layout, descriptor)
        pages: Sequence[int] = admitted.pages[first : first + count]
        ready = max(0, min(admitted.first_block - first, len(pages)))
        if staging is not None:
            outcome.lease = lease = await staging.take(pages, ctx.settings.prefill_timeout_s)
            await staging.fill(lease, ready)
            staging.expose(lease, for_write=False)
            pages = lease.pages
        outcome.descriptor = descriptor
        outcome.starting = asyncio.ensure_future(
            client.start_transfer(
                descriptor,
                {group.name: pages for group in layout.groups},
                ready_pages=ready,
                traceparent=tracing.traceparent(),
            )
        )
        # Shielded: cancelled half-way, the transfer would run without anybody who knows it.
        handle = await asyncio.shield(outcome.starting)
        if staging is not None and outcome.lease is not None:
            staging.start(outcome.lease, handle.transfer_id)
        return handle

    async def _compute_and_send(
        self, ctx: WorkerContext, run: _Run, handle: TransferHandle, first_block: int
    ) -> pb.RunDone:
        """Compute chunk by chunk while pages leave; returns when every write has completed."""
        run.started_at = time.monotonic()
        ctx.core.start_prefill(run.key, handle.transfer_id, first_block)
        await ctx.at_step(RequestStep.COMPUTING, run.public)
        # A transfer that fails ends the computation, not only the other way round.
        either: set[asyncio.Future[Any]] = {run.computed, handle.done}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if handle.done.done() and not run.computed.done():
            handle.done.result()
        computed = await run.computed
        await ctx.at_step(RequestStep.COMPUTED, run.public)
        sent = await asyncio.shield(handle.done)
        done = pb.RunDone(
            bytes=sent, compute_ms=computed.compute_ms, transport=handle.transport, chunks=computed.chunks
        )
        if run.accepted_at is not None and run.computed_at is not None:
            done.computed_ms = (run.computed_at - run.accepted_at) * 1e3
        return done

    async def _finish(self, ctx: WorkerContext, run: _Run, outcome: _Outcome) -> None:
        """Stop what still runs, wait until no write is in flight, give the pages back."""
        try:
            if not outcome.sent:
                ctx.core.abort(run.key, error=Cancelled("prefill was given up"))
            if ctx.staging is not None and outcome.lease is not None and not outcome.sent:
                ctx.staging.draining(outcome.lease)
            if outcome.starting is not None:
                if not outcome.starting.done() and outcome.client is not None and outcome.descriptor is not None:
                    # Towards a destination that is dead its answer would take as long as the sidecar tries.
                    outcome.client.give_up_start(outcome.descriptor, "prefill was given up")
                handle: TransferHandle | None = None
                with contextlib.suppress(KvmeshError):
                    handle = await outcome.starting
                if handle is not None:
                    if not handle.done.done() and outcome.client is not None:
                        try:
                            await outcome.client.cancel_transfer(handle, "prefill was given up")
                        except Exception as error:
                            # Told or not: pages that are read may not go before `done`.
                            log.warning("cancelling the transfer of %s failed: %r", run.public.request_id, error)
                    with contextlib.suppress(KvmeshError):
                        await asyncio.shield(handle.done)
        finally:
            ctx.core.release(run.key)
            try:
                if ctx.staging is not None and outcome.lease is not None:
                    await ctx.staging.give_back(outcome.lease)
            finally:
                self._live.discard(run)
                if not self._live:
                    self._idle.set()


@dataclass(eq=False, slots=True)
class _Outcome:
    """How far a Run came, for `_finish`."""

    client: SidecarClient | None = None
    descriptor: kvtransfer_pb2.Descriptor | None = None
    starting: asyncio.Future[TransferHandle] | None = None
    # The host pages that the transfer is read from, where those of the engine are not.
    lease: Lease | None = None
    sent: bool = False


def _check(ctx: WorkerContext, request: pb.RunRequest) -> kvtransfer_pb2.Descriptor:
    """The descriptor, once everything about the request makes sense. InvalidArgument, NotFound, FailedPrecondition."""
    check_id("request_id", request.request_id)
    ctx.check_model(request.model)
    check_tokens(request.token_ids, ctx.limits)
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise refuse("cache_salt", f"longer than {MAX_SALT_BYTES} bytes")
    if abs(request.priority) > MAX_PRIORITY:
        raise refuse("priority", f"must be within ±{MAX_PRIORITY}")
    layout = ctx.identity.layout
    try:
        descriptor = kvtransfer_pb2.Descriptor.FromString(request.descriptor)
    except DecodeError:
        raise refuse("descriptor", "does not parse") from None
    check_descriptor(descriptor, DescriptorLimits())
    target = layout_from_proto(descriptor.layout)
    try:
        check_layouts_match(layout, target)
    except InvalidArgument as error:
        raise FailedPrecondition(error.message, details={"field": "descriptor"}) from None
    tokens = len(request.token_ids)
    if descriptor.num_tokens != tokens:
        raise refuse("descriptor.num_tokens", f"is {descriptor.num_tokens}, token_ids has {tokens}")
    first = descriptor.first_block
    if first * target.page_size >= tokens:
        raise refuse("descriptor.first_block", "leaves nothing to send")
    wanted = target.pages_for(tokens) - first
    for group in descriptor.groups:
        if len(group.pages) != wanted:
            raise refuse("descriptor.groups", f"group {group.group!r} names {len(group.pages)} pages, not {wanted}")
    return descriptor


def _engine_request(
    ctx: WorkerContext, request: pb.RunRequest, key: RequestKey, remaining_s: float | None
) -> EngineRequest:
    now = time.monotonic()
    deadline = None if remaining_s is None or math.isinf(remaining_s) else now + remaining_s
    return EngineRequest(
        key=key,
        token_ids=list(request.token_ids),
        prompt_len=len(request.token_ids),
        mode=Mode.PREFILL_ONLY,
        seed_bytes=request_seed(ctx.identity.base_seed, "", request.cache_salt),
        priority=request.priority,
        arrival=now,
        ttft_deadline=deadline,
        total_deadline=deadline,
    )


def _attributes(ctx: WorkerContext, request: pb.RunRequest, tenant: str) -> Mapping[str, str | int]:
    return {
        names.ATTR_REQUEST_ID: request.request_id,
        names.ATTR_ATTEMPT: request.attempt,
        names.ATTR_TENANT: tenant,
        names.ATTR_WORKER: ctx.identity.worker_id,
        names.GEN_AI_USAGE_INPUT_TOKENS: len(request.token_ids),
    }


def _describe(span: Span, done: pb.RunDone) -> None:
    span.set_attributes({names.ATTR_TRANSPORT: done.transport, names.ATTR_TRANSFER_BYTES: done.bytes})
