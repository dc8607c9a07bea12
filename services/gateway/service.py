"""kvmesh.v1.Inference: the gRPC face of the gateway. The work is behind `Front`."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc.auth import ServicerContext
from services.gateway.front import Front
from services.gateway.limits.contract import LimitState
from services.gateway.registry import new_id


class GrpcCaller:
    """A gRPC call as a `Caller`."""

    def __init__(self, context: ServicerContext) -> None:
        self._context = context

    def admitted(self, state: LimitState) -> None:
        """See Caller."""

    async def waiting(self) -> None:
        """See Caller."""
        await self._context.send_initial_metadata(())

    async def send(self, event: pb.GenerateEvent) -> None:
        """See Caller."""
        # Both responses hold the event alone: to frame its bytes costs less than to copy it into one.
        data = event.SerializeToString()
        await self._context.write(b"\x0a" + _varint(len(data)) + data)

    def trailing(self, pairs: Sequence[tuple[str, str]]) -> None:
        """See Caller."""
        self._context.set_trailing_metadata(tuple(pairs))


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate, Chat, Embed, Tokenize, Abort, ListModels, GetModel."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:  # type: ignore[override]
        """Continue a raw prompt."""
        await self._run(request, context)

    async def Chat(self, request: pb.ChatRequest, context: ServicerContext) -> None:  # type: ignore[override]
        """Continue a conversation."""
        await self._run(request, context)

    async def _run(self, request: pb.GenerateRequest | pb.ChatRequest, context: ServicerContext) -> None:
        principal = await self._front.credentials.authenticate_call(context)
        await self._front.run(
            principal,
            request,
            GrpcCaller(context),
            request_id=request.request_id or new_id(),
            remaining_s=context.time_remaining(),
        )

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        """End a running request of the same tenant."""
        principal = await self._front.credentials.authenticate_call(context)
        return pb.AbortResponse(found=await self._front.abort(principal.tenant, request.request_id))

    async def ListModels(self, request: pb.ListModelsRequest, context: ServicerContext) -> pb.ListModelsResponse:
        """Models that the caller may use and workers serve."""
        principal = await self._front.credentials.authenticate_call(context)
        return pb.ListModelsResponse(models=self._front.models(principal))

    async def GetModel(self, request: pb.GetModelRequest, context: ServicerContext) -> pb.GetModelResponse:
        """One model, by its name or an alias."""
        principal = await self._front.credentials.authenticate_call(context)
        return pb.GetModelResponse(model=self._front.model(principal, request.name))

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext) -> pb.TokenizeResponse:
        """The tokens of a text or a conversation."""
        principal = await self._front.credentials.authenticate_call(context)
        return await self._front.preparer.tokens(request, principal)

    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        """The vectors of texts."""
        principal = await self._front.credentials.authenticate_call(context)
        return await self._front.embed(principal, request, remaining_s=context.time_remaining())


def _varint(value: int) -> bytes:
    """A length as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
