"""A decode worker and a router that do what a test says, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from kvmesh.config import ServiceSettings
from kvmesh.errors import FailedPrecondition, KvmeshError, Overloaded
from kvmesh.grammar.vocabulary import version
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc import Access, RpcServer
from kvmesh.rpc.auth import tenant_from
from kvmesh.rpc.status import to_frame

MODEL = "scripted"
EOS = 257
FINGERPRINT = scripted_tokenizer().fingerprint
WAIT_S = 90.0

_incarnations = itertools.count(1)


class Log:
    """An append-only list that a test can wait on."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._changed = asyncio.Event()

    def add(self, item: Any) -> None:
        self.items.append(item)
        self._changed.set()

    async def wait(self, count: int = 1) -> list[Any]:
        """The items, once there are at least `count`."""
        async with asyncio.timeout(WAIT_S):
            while len(self.items) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.items


class FakeWorker(engine_pb2_grpc.DecodeServicer, engine_pb2_grpc.EngineServicer):
    """A decode worker. By default it accepts and then answers `text`; `on_submit` replaces that."""

    def __init__(
        self,
        worker_id: str = "decode-0",
        *,
        text: str | None = "hello",
        heartbeat_s: float = 0.05,
        max_batch: int = 8,
        role: int = engine_pb2.WORKER_ROLE_DECODE,
        model: str = MODEL,
        max_model_len: int = 1024,
        revision: str = "rev-1",
    ) -> None:
        self.text = text
        self.heartbeat_s = heartbeat_s
        self.beating = True
        self.load = engine_pb2.WorkerLoad(free_pages=1000, total_pages=1000)
        self.submits, self.aborts, self.opened, self.tenants = Log(), Log(), Log(), Log()
        self.refuse: KvmeshError | None = None
        self.on_submit: Callable[[engine_pb2.SubmitRequest], Awaitable[None]] | None = None
        self.skip_sequence = False
        self._streams: dict[str, asyncio.Queue[engine_pb2.FramesResponse | None]] = {}
        self._owners: dict[tuple[str, int], str] = {}
        self.info = engine_pb2.WorkerInfo(
            worker_id=worker_id,
            incarnation=next(_incarnations),
            role=role,  # type: ignore[arg-type]
            model=model,
            revision=revision,
            tokenizer_fingerprint=FINGERPRINT,
            page_size=16,
            max_model_len=max_model_len,
            architecture="scripted",
            dtype="fp32",
            state=engine_pb2.WORKER_STATE_SERVING,
            max_batch=max_batch,
            total_pages=1000,
            eos_token_ids=[EOS],
            grammars=version(),
        )
        self._server: RpcServer | None = None

    async def start(self) -> FakeWorker:
        self._server = RpcServer(ServiceSettings(drain_timeout_s=0.1))
        self._server.add(engine_pb2_grpc.add_DecodeServicer_to_server, self, access=Access.INNER)
        self._server.add(engine_pb2_grpc.add_EngineServicer_to_server, self, access=Access.INNER)
        self.info.address = await self._server.start()
        return self

    async def stop(self) -> None:
        """The process is gone."""
        if self._server is not None:
            await self._server.close()

    def status(self) -> router_pb2.WorkerStatus:
        return router_pb2.WorkerStatus(info=self.info, load=self.load)

    # --- what a test does
    def fill(self) -> None:
        """Be full, and say so: nothing is accepted and no seat looks free."""
        self.load.running = self.info.max_batch
        self.refuse = Overloaded("full")

    def empty(self) -> None:
        """Have room again."""
        self.load.running = 0
        self.refuse = None

    def frame(self, request: engine_pb2.SubmitRequest, **parts: Any) -> None:
        """Send one frame to the gateway of a request."""
        self._put(request.gateway_id, engine_pb2.FramesResponse(**parts))

    def tokens(
        self, request: engine_pb2.SubmitRequest, ids: Sequence[int], first: int = 0, choice: int = 0, **fields: Any
    ) -> None:
        """Send tokens of one choice."""
        delta = engine_pb2.SequenceDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=choice,
            first_position=first,
            token_ids=ids,
            **fields,
        )
        self.frame(request, deltas=[delta])

    def end(self, request: engine_pb2.SubmitRequest, error: KvmeshError | None = None, **fields: Any) -> None:
        """Send a request's terminal."""
        end = engine_pb2.RequestEnd(request_id=request.request_id, attempt=request.attempt)
        if error is None:
            end.finished.CopyFrom(engine_pb2.WorkerFinished(prompt_tokens=request.prompt_len, **fields))
        else:
            frame = to_frame(error)
            end.error.code, end.error.reason = frame.code, frame.reason
            end.error.message, end.error.retryable = frame.message, frame.retryable
        self.frame(request, ends=[end])

    def answer(self, request: engine_pb2.SubmitRequest, text: str, *, reason: int = pb.FINISH_REASON_STOP) -> None:
        """Send a whole answer, a token a frame, the same for every choice, and the end."""
        ids = list(text.encode())
        for choice in range(request.sampling.best_of):
            for position, token in enumerate(ids):
                self.tokens(request, [token], position, choice)
            if reason == pb.FINISH_REASON_STOP:
                self.tokens(request, [EOS], len(ids), choice, finish_reason=reason, stop_token_id=EOS)
            else:
                self.tokens(request, [], len(ids), choice, finish_reason=reason)
        self.end(request, completion_tokens=len(ids) + 1)

    def break_stream(self) -> None:
        """End every Frames stream."""
        for queue in self._streams.values():
            queue.put_nowait(None)

    def _put(self, gateway_id: str, frame: engine_pb2.FramesResponse) -> None:
        queue = self._streams.get(gateway_id)
        if queue is not None:
            queue.put_nowait(frame)

    # --- the servicers
    async def Describe(self, request: Any, context: Any) -> engine_pb2.DescribeResponse:
        return engine_pb2.DescribeResponse(info=self.info, load=self.load)

    async def GetLoad(self, request: Any, context: Any) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self.load)

    async def Drain(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.DrainResponse]:
        yield engine_pb2.DrainResponse(drained=True)

    async def Cordon(self, request: Any, context: Any) -> engine_pb2.CordonResponse:
        return engine_pb2.CordonResponse(info=self.info)

    async def Submit(self, request: engine_pb2.SubmitRequest, context: Any) -> engine_pb2.SubmitResponse:
        if request.gateway_id not in self._streams:
            raise FailedPrecondition("no open Frames stream")
        self.tenants.add(tenant_from(context))
        if self.refuse is not None:
            self.submits.add(request)
            raise self.refuse
        self.submits.add(request)
        if self.on_submit is not None:
            await self.on_submit(request)
        elif self.text is not None:
            self.answer(request, self.text)
        return engine_pb2.SubmitResponse(incarnation=self.info.incarnation)

    async def Abort(self, request: engine_pb2.DecodeAbortRequest, context: Any) -> engine_pb2.DecodeAbortResponse:
        self.aborts.add(request)
        return engine_pb2.DecodeAbortResponse(aborted=1)

    async def Frames(self, request: engine_pb2.FramesRequest, context: Any) -> AsyncIterator[engine_pb2.FramesResponse]:
        queue: asyncio.Queue[engine_pb2.FramesResponse | None] = asyncio.Queue()
        self._streams[request.gateway_id] = queue
        self.opened.add(request.gateway_id)
        sequence = 0
        try:
            while True:
                frame: engine_pb2.FramesResponse | None = engine_pb2.FramesResponse()
                if sequence:
                    try:
                        async with asyncio.timeout(self.heartbeat_s if self.beating else None):
                            frame = await queue.get()
                    except TimeoutError:
                        pass
                if frame is None:
                    return
                sequence += 1
                if self.skip_sequence:
                    self.skip_sequence = False
                    sequence += 1
                frame.incarnation = self.info.incarnation
                frame.sequence = sequence
                frame.load.CopyFrom(self.load)
                yield frame
        finally:
            if self._streams.get(request.gateway_id) is queue:
                del self._streams[request.gateway_id]


class FakeRouter(router_pb2_grpc.RouterServicer):
    """A router over a fixed list of fake workers. `decide` replaces its placement."""

    def __init__(self, workers: Sequence[FakeWorker] = ()) -> None:
        self.workers = list(workers)
        self.routes, self.reports, self.watches, self.shadows = Log(), Log(), Log(), Log()
        self.decide: Callable[[router_pb2.RouteRequest], Awaitable[router_pb2.RouteResponse]] | None = None
        self.aliases: dict[str, str] = {}
        self.embedder = ""
        self.embeds = Log()
        self.embed_error: KvmeshError | None = None
        self.address = ""
        self._server: RpcServer | None = None
        self._changed = asyncio.Event()

    async def start(self) -> FakeRouter:
        self._server = RpcServer(ServiceSettings(drain_timeout_s=0.1))
        self._server.add(router_pb2_grpc.add_RouterServicer_to_server, self, access=Access.INNER)
        self.address = await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()

    def placement(self, request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        """All workers that are not excluded, in order."""
        pairs = [
            router_pb2.Pair(decode=w.info) for w in self.workers if w.info.worker_id not in request.exclude_workers
        ]
        return router_pb2.RouteResponse(
            placement=router_pb2.Placement(pair=pairs[0], alternates=pairs[1:], revision="rev-1"),
            model=MODEL,
            decision_id=f"decision-{request.request_id}",
        )

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        self.routes.add(request)
        if self.decide is not None:
            return await self.decide(request)
        return self.placement(request)

    async def Report(self, request: router_pb2.ReportRequest, context: Any) -> router_pb2.ReportResponse:
        self.reports.add(request)
        return router_pb2.ReportResponse()

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[router_pb2.AttachResponse]:
        yield router_pb2.AttachResponse(router_id="fake")

    async def ReportShadow(self, request: Any, context: Any) -> router_pb2.ReportShadowResponse:
        self.shadows.add(request)
        return router_pb2.ReportShadowResponse()

    async def EmbedTexts(self, request: router_pb2.EmbedTextsRequest, context: Any) -> router_pb2.EmbedTextsResponse:
        """The vector of a text is its length, its first byte, and whose it is."""
        self.embeds.add((tenant_from(context), request))
        if self.embed_error is not None:
            raise self.embed_error
        made = [pb.Embedding(values=[len(text), ord(text[0])]) for text in request.texts]
        return router_pb2.EmbedTextsResponse(model=request.model, embeddings=made, prompt_tokens=len(made))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[router_pb2.WatchResponse]:
        self.watches.add(request.watcher_id)
        yield self.snapshot()
        while True:
            try:
                async with asyncio.timeout(0.1):
                    await self._changed.wait()
                self._changed.clear()
                yield self.snapshot()
            except TimeoutError:
                yield router_pb2.WatchResponse(embedder=self.embedder)

    def snapshot(self) -> router_pb2.WatchResponse:
        """The whole list."""
        workers = [worker.status() for worker in self.workers]
        return router_pb2.WatchResponse(snapshot=True, workers=workers, aliases=self.aliases, embedder=self.embedder)

    def tell(self) -> None:
        """Send the list again."""
        self._changed.set()
