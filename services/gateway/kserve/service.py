"""inference.GRPCInferenceService: what KServe and Triton clients call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from kvmesh import __version__
from kvmesh.errors import Cancelled, NotFound, Unavailable
from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from kvmesh.proto.inference import grpc_predict_v2_pb2_grpc
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.auth import ServicerContext
from kvmesh.rpc.credentials import Principal
from kvmesh.rpc.status import from_frame, public_error
from kvmesh.rpc.tasks import cancel_and_wait
from services.gateway.front import Front
from services.gateway.kserve import translate
from services.gateway.limits.contract import LimitState

log = logging.getLogger(__name__)

SERVICE_NAME = "inference.GRPCInferenceService"
MAX_CONCURRENT = 64
"""Requests of one stream that run at a time; more are not read before one has ended."""


class _Collector:
    """The caller of one request: keeps the answer, and sends its parts where `send` is given."""

    def __init__(self, answer: translate.Answer, write: _Writer | None = None) -> None:
        self._answer = answer
        self._write = write

    def admitted(self, state: LimitState) -> None:
        """See Caller."""

    async def waiting(self) -> None:
        """See Caller."""
        if self._write is not None:
            await self._write.waiting()

    async def send(self, event: pb.GenerateEvent) -> None:
        """See Caller."""
        response = self._answer.take(event)
        if response is not None and self._write is not None:
            await self._write.send(kserve.ModelStreamInferResponse(infer_response=response))

    def trailing(self, pairs: Sequence[tuple[str, str]]) -> None:
        """See Caller."""


class _Writer:
    """The one response stream of many requests: one write at a time."""

    def __init__(self, context: ServicerContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._begun = False

    async def waiting(self) -> None:
        async with self._lock:
            if not self._begun:
                self._begun = True
                await self._context.send_initial_metadata(())

    async def send(self, response: kserve.ModelStreamInferResponse) -> None:
        async with self._lock:
            self._begun = True
            await self._context.write(response)


class InferenceServiceServicer(grpc_predict_v2_pb2_grpc.GRPCInferenceServiceServicer):
    """Liveness, metadata and text generation. `ready` tells whether requests are served now."""

    def __init__(self, front: Front, ready: Callable[[], bool]) -> None:
        self._front = front
        self._ready = ready
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Streams take no further request and end when theirs have ended."""
        self._stopping.set()

    # --- server and models
    async def ServerLive(
        self, request: kserve.ServerLiveRequest, context: ServicerContext
    ) -> kserve.ServerLiveResponse:
        """Whoever answers lives. No credential is asked for, as with health."""
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: kserve.ServerReadyRequest, context: ServicerContext
    ) -> kserve.ServerReadyResponse:
        """Whether a worker can take a request. No credential is asked for, as with health."""
        return kserve.ServerReadyResponse(ready=self._ready() and not self._stopping.is_set())

    async def ModelReady(
        self, request: kserve.ModelReadyRequest, context: ServicerContext
    ) -> kserve.ModelReadyResponse:
        """Whether a worker of this model can take a request; false for one that nobody serves."""
        principal = await self._front.credentials.authenticate_call(context)
        try:
            model = self._model(principal, request.name, request.version)
        except NotFound:
            return kserve.ModelReadyResponse(ready=False)
        return kserve.ModelReadyResponse(ready=bool(self._front.fleet.links(model.name)))

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: ServicerContext
    ) -> kserve.ServerMetadataResponse:
        """Who serves."""
        return kserve.ServerMetadataResponse(
            name="kvmesh", version=__version__, extensions=["parameters", "model_streaming"]
        )

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: ServicerContext
    ) -> kserve.ModelMetadataResponse:
        """The tensors of a model."""
        principal = await self._front.credentials.authenticate_call(context)
        model = self._model(principal, request.name, request.version)
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        return kserve.ModelMetadataResponse(
            name=request.name,
            versions=[model.revision] if model.revision else [],
            platform="kvmesh",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in translate.INPUTS.items()],
            outputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in translate.OUTPUTS.items()],
        )

    def _model(self, principal: Principal, name: str, version: str) -> pb.Model:
        model = self._front.model(principal, name)
        if model.embeds:
            raise NotFound(f"{name!r} generates no text", details={"field": "name"})
        if version and version != model.revision:
            raise NotFound("no worker serves this version of the model", details={"field": "model_version"})
        return model

    # --- text
    async def ModelInfer(
        self, request: kserve.ModelInferRequest, context: ServicerContext
    ) -> kserve.ModelInferResponse:
        """One prompt, one whole answer."""
        principal = await self._front.credentials.authenticate_call(context)
        infer = translate.to_infer(request, streams=False)
        return await self._answer(principal, infer, context.time_remaining(), None)

    async def _answer(
        self, principal: Principal, infer: translate.Infer, remaining_s: float | None, writer: _Writer | None
    ) -> kserve.ModelInferResponse:
        """Run to the end; the last response. Raises what the request failed with."""
        if infer.version:
            self._model(principal, infer.request.model, infer.version)
        answer = translate.Answer(infer)
        collector = _Collector(answer, writer)
        await self._front.run(principal, infer.request, collector, request_id=infer.id, remaining_s=remaining_s)
        if answer.error is not None:
            error = answer.error
            raise from_frame(error.code, error.reason, error.message, error.retryable)
        return answer.last()

    async def ModelStreamInfer(  # type: ignore[override]
        self, request_iterator: AsyncIterator[kserve.ModelInferRequest], context: ServicerContext
    ) -> None:
        """Any number of requests at a time, each with responses of its own."""
        await self._front.credentials.authenticate_call(context)
        writer = _Writer(context)
        room = asyncio.Semaphore(MAX_CONCURRENT)
        running: set[asyncio.Task[None]] = set()
        stuck = asyncio.Event()

        async def one(request: kserve.ModelInferRequest) -> None:
            try:
                await self._one(request, context, writer)
            except asyncio.CancelledError:
                # By its own request, since the client does not read: nobody else's responses get through either.
                stuck.set()
                raise
            except Exception as exc:
                log.debug("a client left its stream: %s", exc)
            finally:
                room.release()

        async def read() -> None:
            async for request in request_iterator:
                await room.acquire()
                task = asyncio.create_task(one(request), name="infer")
                running.add(task)
                task.add_done_callback(running.discard)

        reader = asyncio.create_task(read(), name="infer-read")
        stop = asyncio.create_task(self._stopping.wait(), name="infer-stop")
        cut = asyncio.create_task(stuck.wait(), name="infer-stuck")
        try:
            await asyncio.wait({reader, stop, cut}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                # A message that does not parse ends the stream, and its requests.
                reader.result()
            else:
                await cancel_and_wait(reader)
            while running and not cut.done():
                await asyncio.wait({*running, cut}, return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                raise Cancelled("the client does not read its responses")
            if stop.done():
                raise Unavailable("this gateway is stopping")
        finally:
            await cancel_and_wait(reader, stop, cut, *running)

    async def _one(self, request: kserve.ModelInferRequest, context: ServicerContext, writer: _Writer) -> None:
        request_id = request.id
        try:
            if self._stopping.is_set():
                raise Unavailable("this gateway is stopping")
            # Anew for each: a stream may outlive its key, or its tenant's rights.
            principal = await self._front.credentials.authenticate_call(context)
            infer = translate.to_infer(request, streams=True)
            request_id = infer.id
            response = await self._answer(principal, infer, context.time_remaining(), writer)
            await writer.send(kserve.ModelStreamInferResponse(infer_response=response))
        except Exception as exc:
            error = public_error(exc)
            await writer.send(translate.failed(request, request_id, error))
