"""`kvmesh.v1.Engine`: Describe, GetLoad, Drain, Cordon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from kvmesh.engine.worker.context import WorkerContext
from kvmesh.engine.worker.convert import load_proto
from kvmesh.engine.worker.state import ROLES, WorkerStatus
from kvmesh.errors import Unavailable
from kvmesh.grammar.vocabulary import version
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc
from kvmesh.rpc.auth import ServicerContext
from kvmesh.rpc.limits import Deadline

PROGRESS_S = 0.2
SETTLE_S = 1.0


def worker_info(ctx: WorkerContext, status: WorkerStatus, address: str) -> pb.WorkerInfo:
    """The worker as it is told to gateways and routers."""
    identity, settings = ctx.identity, ctx.settings
    client = ctx.link.client if ctx.link is not None else None
    return pb.WorkerInfo(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        address=address,
        role=ROLES[settings.role],
        model=identity.served_name,
        revision=identity.info.revision,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        base_seed=identity.base_seed,
        page_size=identity.layout.page_size,
        layout_fingerprint=identity.layout.fingerprint(),
        kv_fingerprint=identity.layout.kv_fingerprint(),
        tp=identity.layout.tp,
        max_model_len=identity.max_model_len,
        architecture=identity.info.architecture,
        dtype=identity.info.dtype,
        kvtransfer_address=client.control_address if client is not None else "",
        state=status.state,
        max_batch=settings.max_batch,
        total_pages=identity.layout.num_pages,
        eos_token_ids=sorted(identity.info.eos_token_ids),
        transports=client.transports if client is not None else (),
        grammars=version() if ctx.grammars is not None else "",
    )


class EngineService(engine_pb2_grpc.EngineServicer):
    """What every worker serves. `drain(deadline)` is the worker's own way to finish its work."""

    def __init__(
        self, status: WorkerStatus, address: Callable[[], str], drain: Callable[[Deadline], Awaitable[None]]
    ) -> None:
        self.status = status
        self.ctx: WorkerContext | None = None
        self._address = address
        self._drain = drain

    def _loaded(self) -> WorkerContext:
        if self.ctx is None:
            raise Unavailable("the model is still loading")
        return self.ctx

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext) -> pb.DescribeResponse:
        """What the worker is, with its load."""
        ctx = self._loaded()
        return pb.DescribeResponse(
            info=worker_info(ctx, self.status, self._address()), load=load_proto(ctx.core.load())
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: ServicerContext) -> pb.GetLoadResponse:
        """The load now."""
        return pb.GetLoadResponse(load=load_proto(self._loaded().core.load()))

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> AsyncIterator[pb.DrainResponse]:
        """Stop accepting, report until nothing runs. The drain goes on when this call is cancelled."""
        ctx = self._loaded()
        seconds = request.timeout_ms / 1000 if request.timeout_ms else ctx.settings.drain_timeout_s
        work = ctx.spawn(self._run(Deadline.after(seconds)), name="drain")
        while not work.done():
            load = ctx.core.load()
            yield pb.DrainResponse(running=load.running + load.transferring, waiting=load.waiting)
            await asyncio.wait({work}, timeout=PROGRESS_S)
        load = ctx.core.load()
        give_up = Deadline.after(SETTLE_S)
        while load.running + load.transferring + load.waiting and not give_up.expired:
            # The core has yet to look at the last releases.
            await asyncio.sleep(PROGRESS_S / 10)
            load = ctx.core.load()
        yield pb.DrainResponse(running=load.running + load.transferring, waiting=load.waiting, drained=True)

    async def Cordon(self, request: pb.CordonRequest, context: ServicerContext) -> pb.CordonResponse:
        """Mark the worker, or take the mark away. What comes in spite of it is served."""
        ctx = self._loaded()
        self.status.update(cordoned=request.cordoned)
        return pb.CordonResponse(info=worker_info(ctx, self.status, self._address()))

    async def _run(self, deadline: Deadline) -> None:
        await self._drain(deadline)
