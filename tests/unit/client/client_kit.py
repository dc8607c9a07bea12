"""A gateway that does what a test says: every call takes the next script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc import status

# A bare status is that of the server's library, and none of its services'.
Step = pb.GenerateEvent | KvmeshError | grpc.StatusCode | Callable[[], Awaitable[None]]


def accepted(request_id: str = "r") -> pb.GenerateEvent:
    return pb.GenerateEvent(accepted=pb.Accepted(request_id=request_id, model="m"))


def delta(text: str = "", **fields: Any) -> pb.GenerateEvent:
    return pb.GenerateEvent(delta=pb.Delta(text=text, **{"token_ids": [1], **fields}))


def finished() -> pb.GenerateEvent:
    return pb.GenerateEvent(finished=pb.Finished(usage=pb.Usage(prompt_tokens=3, completion_tokens=2)))


def failed(error: KvmeshError) -> pb.GenerateEvent:
    frame = status.to_frame(error)
    return pb.GenerateEvent(
        error=pb.StreamError(code=frame.code, reason=frame.reason, message=frame.message, retryable=frame.retryable)
    )


ANSWER: list[Step] = [accepted(), delta("Hel"), delta("lo", finish_reason=pb.FINISH_REASON_STOP), finished()]


class Gateway(inference_pb2_grpc.InferenceServicer):
    """`scripts`: one list of steps a call; the last one is for all further calls."""

    def __init__(self) -> None:
        self.scripts: list[list[Step]] = [ANSWER]
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.left: list[float | None] = []
        self.ended = asyncio.Event()
        self.address = ""
        self.server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self.server)
        if credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, credentials)
        await self.server.start()
        self.address = f"127.0.0.1:{port}"

    def _next(self, request: Any, context: Any) -> list[Step]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.left.append(context.time_remaining())
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]

    async def _play(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        try:
            for step in self._next(request, context):
                if isinstance(step, KvmeshError):
                    await status.abort(context, step)
                elif isinstance(step, grpc.StatusCode):
                    await context.abort(step, step.name)
                elif isinstance(step, pb.GenerateEvent):
                    yield step
                else:
                    await step()
        finally:
            self.ended.set()

    async def Chat(self, request, context):  # type: ignore[no-untyped-def]
        async for event in self._play(request, context):
            yield pb.ChatResponse(event=event)

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        async for event in self._play(request, context):
            yield pb.GenerateResponse(event=event)

    async def _unary(self, request: Any, context: Any) -> None:
        for step in self._next(request, context):
            if isinstance(step, KvmeshError):
                await status.abort(context, step)
            elif isinstance(step, grpc.StatusCode):
                await context.abort(step, step.name)
            elif not isinstance(step, pb.GenerateEvent):
                await step()

    async def Abort(self, request, context):  # type: ignore[no-untyped-def]
        await self._unary(request, context)
        return pb.AbortResponse(found=True)

    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        await self._unary(request, context)
        return pb.ListModelsResponse(models=[pb.Model(name="m"), pb.Model(name="vectors", embeds=True)])

    async def GetModel(self, request, context):  # type: ignore[no-untyped-def]
        await self._unary(request, context)
        return pb.GetModelResponse(model=pb.Model(name=request.name))

    async def Embed(self, request, context):  # type: ignore[no-untyped-def]
        await self._unary(request, context)
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=[1.0, 0.0]) for _ in request.input])

    async def Tokenize(self, request, context):  # type: ignore[no-untyped-def]
        await self._unary(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2], tokens=[b"a", b"b"])
