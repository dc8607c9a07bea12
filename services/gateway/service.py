"""kvmesh.v1.Inference: the gRPC face of the gateway. The work is in `request`, `prepare` and `placement`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvmesh.errors import Cancelled, DeadlineExceeded, NotFound
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc.auth import ServicerContext
from kvmesh.rpc.credentials import Credentials
from kvmesh.rpc.limits import RequestLimits
from kvmesh.telemetry import names, tracing
from services.gateway import validate
from services.gateway.fleet import Fleet
from services.gateway.generation import RequestSettings
from services.gateway.heals import Heals
from services.gateway.observe import Observer
from services.gateway.placement import Placer
from services.gateway.prepare import Preparer, Rules, request_limits
from services.gateway.registry import Registry, new_id
from services.gateway.request import ClientGone, Flights, Request, Shadows
from services.gateway.routers import Routers

T = TypeVar("T")
Wrap = Callable[[pb.GenerateEvent], pb.GenerateResponse | pb.ChatResponse]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate, Chat, Abort, ListModels, GetModel."""

    def __init__(
        self,
        *,
        credentials: Credentials,
        preparer: Preparer,
        rules: Rules,
        request_settings: RequestSettings,
        registry: Registry,
        placer: Placer,
        routers: Routers,
        heals: Heals,
        fleet: Fleet,
        flights: Flights | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self._credentials = credentials
        self._preparer = preparer
        self._rules = rules
        self._request_settings = request_settings
        self._registry = registry
        self._placer = placer
        self._routers = routers
        self._heals = heals
        self._fleet = fleet
        self._flights = flights
        self._shadows = shadows

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:  # type: ignore[override]
        """Continue a raw prompt."""
        await self._run(request, context, "text_completion", lambda event: pb.GenerateResponse(event=event))

    async def Chat(self, request: pb.ChatRequest, context: ServicerContext) -> None:  # type: ignore[override]
        """Continue a conversation."""
        await self._run(request, context, "chat", lambda event: pb.ChatResponse(event=event))

    async def _run(
        self, request: pb.GenerateRequest | pb.ChatRequest, context: ServicerContext, operation: str, wrap: Wrap
    ) -> None:
        principal = self._credentials.authenticate(context)
        self._preparer.check(request, principal)
        limits = request_limits(request.limits, self._rules, context.time_remaining())
        request_id = request.request_id or new_id()

        async def send(event: pb.GenerateEvent) -> None:
            try:
                await context.write(wrap(event))
            except Exception as exc:
                raise ClientGone from exc

        async def send_metadata() -> None:
            await context.send_initial_metadata(())

        running = Request(
            self._request_settings,
            placer=self._placer,
            routers=self._routers,
            heals=self._heals,
            send=send,
            send_metadata=send_metadata,
            set_trailing=context.set_trailing_metadata,
            flights=self._flights,
            shadows=self._shadows,
        )
        attributes = {
            names.GEN_AI_OPERATION_NAME: operation,
            names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
            names.GEN_AI_REQUEST_MODEL: request.model,
            names.ATTR_REQUEST_ID: request_id,
            names.ATTR_TENANT: principal.tenant,
        }
        with self._registry.hold(principal, request_id, running):
            try:
                with tracing.span(names.gen_ai_span(operation, request.model), attributes=attributes) as span:
                    job = await _in_time(limits, self._preparer.job(request, principal, request_id, limits))
                    span.set_attribute(names.GEN_AI_RESPONSE_MODEL, job.served)
                    await running.run(job, Observer(span, operation, job.served, running.started))
            except ClientGone as exc:
                raise Cancelled("the client left") from exc
            finally:
                running.close()

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        """End a running request of the same tenant."""
        principal = self._credentials.authenticate(context)
        if not request.request_id:
            raise validate.bad("request_id", "is required")
        validate.check_request_id(request.request_id)
        error = Cancelled("the request was aborted by its caller")
        return pb.AbortResponse(found=self._registry.stop(principal.tenant, request.request_id, error))

    async def ListModels(self, request: pb.ListModelsRequest, context: ServicerContext) -> pb.ListModelsResponse:
        """Models that the caller may use and workers serve."""
        policy = self._credentials.authenticate(context).policy
        return pb.ListModelsResponse(models=[model for model in self._fleet.models() if policy.allows(model.name)])

    async def GetModel(self, request: pb.GetModelRequest, context: ServicerContext) -> pb.GetModelResponse:
        """One model, by its name or an alias."""
        policy = self._credentials.authenticate(context).policy
        if not request.name:
            raise validate.bad("name", "is required")
        validate.check_model(request.name)
        policy.check_model(request.name)
        info = self._fleet.example(request.name)
        for model in self._fleet.models():
            if info is not None and model.name == info.model:
                return pb.GetModelResponse(model=model)
        raise NotFound(f"no worker serves model {request.name!r}", details={"field": "name"})


async def _in_time(limits: RequestLimits, work: Awaitable[T]) -> T:
    """Preparing counts too: a tokenizer that takes long to load must not outlast the request's limits."""
    try:
        async with asyncio.timeout(limits.current(first_token_seen=False).timeout()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(
            "the limit (time to first token) ran out", details={"limit": "time to first token"}
        ) from None
