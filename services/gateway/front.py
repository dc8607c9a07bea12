"""One request from any face: gRPC, HTTP, KServe. Faces translate; what they share is here.

A face authenticates (`credentials`), makes a `Caller` of its connection and calls `run`: it raises KvmeshError before
acceptance, and afterwards every end is a terminal event that the caller was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc

from kvmesh.errors import Cancelled, DeadlineExceeded, KvmeshError, NotFound
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Credentials, Principal
from kvmesh.rpc.limits import RequestLimits
from kvmesh.rpc.status import grpc_code
from kvmesh.telemetry import about, names, tracing
from services.gateway import embed as embedding
from services.gateway import validate
from services.gateway.access import AccessLine, AccessRules
from services.gateway.fleet import Fleet
from services.gateway.heals import Heals
from services.gateway.limits.contract import Limiter, LimitState
from services.gateway.observe import Observer
from services.gateway.peers.abort import Peers
from services.gateway.placement import Placer
from services.gateway.prepare import Preparer, Rules, request_limits
from services.gateway.registry import Registry
from services.gateway.request import ClientGone, Flights, Request, Shadows
from services.gateway.routers import Routers
from services.gateway.sink import RequestSettings
from services.gateway.tally import Tallies, Tally

T = TypeVar("T")


class Caller(Protocol):
    """A face's end of one call. All of it is called from the task that called `Front.run`."""

    def admitted(self, state: LimitState) -> None:
        """The tenant's limits let it in; before anything is sent."""

    async def waiting(self) -> None:
        """Nothing to send for a while: tell the client that it is being waited for."""

    async def send(self, event: pb.GenerateEvent) -> None:
        """An event of the stream; an awaited write is back pressure. What it raises means that the client is gone."""

    def trailing(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Metadata that ends the call; before the terminal event is sent."""


@dataclass(slots=True)
class Front:
    """The parts that a request passes."""

    credentials: Credentials
    preparer: Preparer
    rules: Rules
    request_settings: RequestSettings
    registry: Registry
    placer: Placer
    routers: Routers
    heals: Heals
    fleet: Fleet
    limiter: Limiter
    flights: Flights | None = None
    shadows: Shadows | None = None
    peers: Peers | None = None
    tallies: Tallies = field(default_factory=Tallies)
    access: AccessRules = field(default_factory=AccessRules)
    begun: asyncio.Event | None = None
    """Where it is given, requests wait for it before anything else."""

    async def run(
        self,
        principal: Principal,
        request: pb.GenerateRequest | pb.ChatRequest,
        caller: Caller,
        *,
        request_id: str,
        remaining_s: float | None = None,
    ) -> None:
        """Serve it to its end. `request_id`: the client's own or a fresh one. `remaining_s`: of the call's deadline."""
        operation = "chat" if isinstance(request, pb.ChatRequest) else "text_completion"
        line = AccessLine(self.access, operation, principal.tenant, request.model)
        tally = self.tallies.begin(principal.tenant, line)
        with about.of_request(request_id):
            try:
                line.said(request)
                await self._run(principal, request, caller, request_id, remaining_s, tally, line)
            except KvmeshError as error:
                tally.failed(error)
                raise
            finally:
                tally.left()
                line.write()

    async def _run(
        self,
        principal: Principal,
        request: pb.GenerateRequest | pb.ChatRequest,
        caller: Caller,
        request_id: str,
        remaining_s: float | None,
        tally: Tally,
        line: AccessLine,
    ) -> None:
        operation = line.operation
        self.preparer.check(request, principal)
        limits = request_limits(request.limits, self.rules, remaining_s)

        async def send(event: pb.GenerateEvent) -> None:
            try:
                await caller.send(event)
            except Exception as exc:
                raise ClientGone from exc
            line.sent(event)

        running = Request(
            self.request_settings,
            placer=self.placer,
            routers=self.routers,
            heals=self.heals,
            send=send,
            send_metadata=caller.waiting,
            set_trailing=caller.trailing,
            flights=self.flights,
            shadows=self.shadows,
        )
        attributes = {
            names.GEN_AI_OPERATION_NAME: operation,
            names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
            names.GEN_AI_REQUEST_MODEL: request.model,
            names.ATTR_REQUEST_ID: request_id,
            names.ATTR_TENANT: principal.tenant,
        }
        with self.registry.hold(principal, request_id, running):
            try:
                with tracing.span(names.gen_ai_span(operation, request.model), attributes=attributes) as span:
                    if self.begun is not None and not self.begun.is_set():
                        await _in_time(limits, self.begun.wait())
                    job = await _in_time(limits, self.preparer.job(request, principal, request_id, limits))
                    span.set_attribute(names.GEN_AI_RESPONSE_MODEL, job.served)
                    line.model, line.inner_id = job.served, job.inner_id
                    observer = Observer(span, operation, job.served, running.started, tally)
                    hold = await _in_time(limits, self.limiter.take(principal, job, running.stop))
                    try:
                        caller.admitted(hold.state)
                        await _in_time(limits, self.preparer.check_grammar(job))
                        await running.run(job, observer, hold)
                    except KvmeshError as error:
                        hold.settle(pb.Usage(), None, grpc_code(error).value[0])
                        raise
                    except asyncio.CancelledError:
                        # Its client left before it began.
                        hold.settle(pb.Usage(), None, grpc.StatusCode.CANCELLED.value[0])
                        raise
                    finally:
                        # The request has done so, unless it never began.
                        hold.settle(pb.Usage(), None, grpc.StatusCode.INTERNAL.value[0])
            except ClientGone as exc:
                raise Cancelled("the client left") from exc
            finally:
                running.close()

    async def abort(self, tenant: str, request_id: str) -> bool:
        """End a request of this tenant, wherever it runs; False when no gateway that answers has one of that id."""
        if not request_id:
            raise validate.bad("request_id", "is required")
        validate.check_request_id(request_id)
        return self.abort_here(tenant, request_id) or (
            self.peers is not None and await self.peers.abort(tenant, request_id)
        )

    def abort_here(self, tenant: str, request_id: str) -> bool:
        """As `abort`, in this process alone."""
        return self.registry.stop(tenant, request_id, aborted())

    async def embed(
        self, principal: Principal, request: pb.EmbedRequest, *, remaining_s: float | None = None
    ) -> pb.EmbedResponse:
        """The vectors of 1 to 256 texts, by the routers' embedder. `remaining_s`: of the call's deadline."""
        embedding.check(request, self.rules.max_prompt_bytes)
        principal.policy.check_model(request.model)
        return await embedding.embed(request, principal, self.routers, self.registry, self.limiter, remaining_s)

    def models(self, principal: Principal) -> list[pb.Model]:
        """Models that the caller may use: what workers serve, then embedders."""
        return [model for model in self._served() if principal.policy.allows(model.name)]

    def _served(self) -> list[pb.Model]:
        return self.fleet.models() + [pb.Model(name=name, embeds=True) for name in self.routers.embedders()]

    def model(self, principal: Principal, name: str) -> pb.Model:
        """One model, by its name or an alias. NotFound when no worker serves it."""
        if not name:
            raise validate.bad("name", "is required")
        validate.check_model(name)
        principal.policy.check_model(name)
        info = self.fleet.example(name)
        for model in self._served():
            if model.name == name if info is None else model.name == info.model:
                return model
        raise NotFound(f"no worker serves model {name!r}", details={"field": "name"})


def aborted() -> KvmeshError:
    """How a request ends that its caller aborted."""
    return Cancelled("the request was aborted by its caller")


async def _in_time(limits: RequestLimits, work: Awaitable[T]) -> T:
    """Preparing counts too: a tokenizer that takes long to load must not outlast the request's limits."""
    try:
        async with asyncio.timeout(limits.current(first_token_seen=False).timeout()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(
            "the limit (time to first token) ran out", details={"limit": "time to first token"}
        ) from None
