"""`kvmesh.v1.Decode`: Submit, Abort, Frames."""

from __future__ import annotations

import time
from typing import Any

from kvmesh.engine.events import EngineRequest, Mode, RequestKey
from kvmesh.engine.worker.context import WorkerContext
from kvmesh.engine.worker.convert import check_id, check_submit, choices_run
from kvmesh.engine.worker.frames import FramesHub
from kvmesh.engine.worker.requests import DecodeRequest, DecodeRequests
from kvmesh.engine.worker.state import WorkerStatus
from kvmesh.engine.worker.steps import RequestStep
from kvmesh.errors import Cancelled, FailedPrecondition
from kvmesh.grammar.source import GrammarSource
from kvmesh.kv.hashing import request_seed
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2
from kvmesh.rpc.auth import ServicerContext, tenant_from
from kvmesh.rpc.limits import RequestLimits
from kvmesh.telemetry import about, names, tracing

# More targets than this are never tried: each costs time that the request does not have.
MAX_TARGETS = 8


class DecodeService(engine_pb2_grpc.DecodeServicer):
    """The face of decode. `ctx` is set once the model is loaded; before that everything is refused."""

    def __init__(self, status: WorkerStatus, requests: DecodeRequests) -> None:
        self.status = status
        self.requests = requests
        self.ctx: WorkerContext | None = None
        self.hub: FramesHub | None = None

    def _serving(self) -> tuple[WorkerContext, FramesHub]:
        self.status.check_accepting()
        assert self.ctx is not None
        assert self.hub is not None
        return self.ctx, self.hub

    async def Submit(self, request: pb.SubmitRequest, context: ServicerContext) -> pb.SubmitResponse:
        """Accept a request or refuse it with a status; tokens and the one terminal arrive on Frames."""
        arrival = time.monotonic()
        ctx, hub = self._serving()
        tenant = tenant_from(context)
        check_id("gateway_id", request.gateway_id)
        ctx.check_model(request.model)
        stream = hub.get(request.gateway_id)
        sampling = check_submit(request, ctx.limits)
        grammar = self._grammar(ctx, request.sampling)
        key = RequestKey(request.request_id, request.attempt)
        self.requests.check_new(key)

        limits = RequestLimits.start(request.ttft_ms, request.total_ms)
        targets, cause = self._targets(ctx, request)
        best_of = choices_run(request.sampling)
        engine_request = EngineRequest(
            key=key,
            token_ids=list(request.token_ids),
            prompt_len=request.prompt_len,
            sampling=sampling,
            n=best_of,
            mode=Mode.LOCAL if cause else Mode.REMOTE,
            seed_bytes=request_seed(ctx.identity.base_seed, "", request.cache_salt),
            priority=request.priority,
            arrival=arrival,
            want_cumulative_logprob=best_of > (request.sampling.n or 1),
            ttft_deadline=limits.ttft.at,
            total_deadline=limits.total.at,
            local_remainder=ctx.settings.local_prefill_tokens,
            first_choice=request.first_choice,
        )
        ctx.core.check(engine_request)
        position = ctx.core.load().waiting
        span = tracing.start_span(
            names.SPAN_DECODE_REQUEST,
            attributes={
                names.ATTR_REQUEST_ID: key.request_id,
                names.ATTR_ATTEMPT: key.attempt,
                names.ATTR_TENANT: tenant,
                names.ATTR_WORKER: ctx.identity.worker_id,
                names.GEN_AI_REQUEST_MODEL: request.model,
            },
        )
        accepted = DecodeRequest(
            ctx,
            stream,
            engine_request,
            limits=limits,
            targets=targets,
            cache_salt=request.cache_salt,
            tenant=tenant,
            span=span,
            grammar=grammar,
            on_done=self.requests.done,
        )
        try:
            with about.of_request(key.request_id):
                self.requests.add(accepted)
        except BaseException:
            span.end()
            raise
        if cause:
            accepted.prefilled_here(cause)
        await ctx.at_step(RequestStep.SUBMITTED, key)
        return pb.SubmitResponse(incarnation=ctx.identity.incarnation, queue_position=position)

    def _grammar(self, ctx: WorkerContext, sampling: inference_pb2.SamplingParams) -> GrammarSource | None:
        if not sampling.HasField("grammar"):
            return None
        if ctx.grammars is None:
            raise FailedPrecondition("this worker serves no grammars", details={"field": "sampling.grammar"})
        return GrammarSource.of(sampling.grammar)

    def _targets(self, ctx: WorkerContext, request: pb.SubmitRequest) -> tuple[list[pb.PrefillTarget], str]:
        """Who may prefill, best first, or why it is done here, as far as that can be told before admission."""
        targets = list(request.prefill)[:MAX_TARGETS] or [
            pb.PrefillTarget(address=address) for address in ctx.settings.prefill_workers
        ]
        # Sending pages to itself would be a slow way to prefill here.
        targets = [target for target in targets if target.worker_id != ctx.identity.worker_id]
        if not targets:
            return [], "no_target"
        if request.sampling.HasField("prompt_logprobs"):
            # Scores of prompt tokens come from the prompt's own forward pass.
            return [], "scored"
        if ctx.link is None or ctx.link.client is None:
            return [], "no_sidecar"
        if len(request.token_ids) - 1 <= ctx.settings.local_prefill_tokens:
            return [], "short"
        return targets, ""

    async def Abort(self, request: pb.DecodeAbortRequest, context: ServicerContext) -> pb.DecodeAbortResponse:
        """End requests of this gateway. Idempotent: what is not there is not an error."""
        check_id("gateway_id", request.gateway_id)
        if self.hub is None:
            return pb.DecodeAbortResponse()
        try:
            stream = self.hub.get(request.gateway_id)
        except FailedPrecondition:
            # Its stream ended, and with it all its requests.
            return pb.DecodeAbortResponse()
        if not request.request_id:
            return pb.DecodeAbortResponse(
                aborted=self.requests.abort_stream(stream, Cancelled("aborted by the gateway"))
            )
        check_id("request_id", request.request_id)
        found = self.requests.get(RequestKey(request.request_id, request.attempt))
        if found is None or found.stream is not stream or found.ended:
            return pb.DecodeAbortResponse()
        if request.choices:
            found.abort_choices(request.choices)
        else:
            found.abort(Cancelled("aborted by the gateway"))
        return pb.DecodeAbortResponse(aborted=1)

    async def Frames(  # type: ignore[override,unused-ignore]
        self, request: pb.FramesRequest, context: Any
    ) -> None:
        """The gateway's stream, until either side ends it."""
        check_id("gateway_id", request.gateway_id)
        _, hub = self._serving()
        await hub.serve(request.gateway_id, context.write)
