"""A worker process from settings to serving, and back in order.

Up: server bound (NOT_SERVING) → model loaded → KV memory → core → sidecar → routers → ready.
Down: not accepting → running work finished, or ended with one terminal each → frames flushed → streams, sidecar, core,
memory closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvmesh.config import WorkerSettings
from kvmesh.engine.core import EngineConfig, EngineCore
from kvmesh.engine.events import StepDone
from kvmesh.engine.parallel.ranks import ranks_of
from kvmesh.engine.parallel.wire import Kind
from kvmesh.engine.runner import Runner
from kvmesh.engine.worker.attach import RouterLinks
from kvmesh.engine.worker.attach_events import CacheRelay
from kvmesh.engine.worker.channels import PrefillChannels
from kvmesh.engine.worker.context import Identity, WorkerContext
from kvmesh.engine.worker.convert import load_proto
from kvmesh.engine.worker.decode import DecodeService
from kvmesh.engine.worker.engine_service import EngineService, worker_info
from kvmesh.engine.worker.frames import FrameLimits, FramesHub, GatewayStream
from kvmesh.engine.worker.gpudirect import NIC_TRANSPORTS, NicWrites
from kvmesh.engine.worker.loading import in_thread, load_runner
from kvmesh.engine.worker.memory import KvMemory
from kvmesh.engine.worker.meters import Meters
from kvmesh.engine.worker.posting import Movers, Route, check_route, choose_route, make_memory, make_movers
from kvmesh.engine.worker.prefill import PrefillService
from kvmesh.engine.worker.pump import EventPump
from kvmesh.engine.worker.requests import DecodeRequests
from kvmesh.engine.worker.state import DECODE, PREFILL, WorkerStatus, services_of
from kvmesh.engine.worker.steps import StepHook, no_hook
from kvmesh.errors import Cancelled, KvmeshError, Unavailable
from kvmesh.grammar.compiler import GrammarCompiler
from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.kv.hashing import base_seed
from kvmesh.loading.tokenizer import TokenizerBundle, load_tokenizer
from kvmesh.proto.v1 import engine_pb2_grpc
from kvmesh.rpc.channel import MeshChannel, open_inner_channel
from kvmesh.rpc.guard import Access
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.service import ServiceContext
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.link import SidecarLink

if TYPE_CHECKING:
    from kvmesh.proto.v1 import engine_pb2

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 1.0
# After the drain timeout: for terminals of what was aborted, and for pages that drain.
ABORT_S = 2.0
FLUSH_S = 2.0
STOP_S = 5.0


class Worker:
    """One engine with its faces. `build` makes it; `kvmesh.rpc.service` runs it."""

    def __init__(self, service: ServiceContext[Any], *, at_step: StepHook = no_hook) -> None:
        self.service = service
        self.settings: WorkerSettings = service.settings
        self.incarnation = secrets.randbits(64) or 1
        self.status = WorkerStatus(self.settings.role, needs_sidecar=self.settings.sidecar_socket is not None)
        self.requests = DecodeRequests(on_seen=self._on_seen)
        self.decode = DecodeService(self.status, self.requests)
        self.prefill = PrefillService(self.status, on_seen=self._on_seen)
        self.engine = EngineService(self.status, lambda: service.server.address, self.finish_work)
        self.ctx: WorkerContext | None = None
        self.routers: RouterLinks | None = None
        self._at_step = at_step
        self._runner: Runner | None = None
        self._memory: KvMemory | None = None
        self._movers = Movers()
        self._under_way: asyncio.Future[tuple[KvMemory, Movers]] | None = None
        self._closed = False
        self._register()

    def _register(self) -> None:
        server = self.service.server
        served = services_of(self.settings.role, has_sidecar=self.settings.sidecar_socket is not None)
        server.add(
            engine_pb2_grpc.add_EngineServicer_to_server,
            self.engine,
            access=Access.INNER,
            while_draining=("Describe", "GetLoad", "Drain", "Cordon"),
            long_lived=("Drain",),
        )
        if DECODE in served:
            server.add(
                engine_pb2_grpc.add_DecodeServicer_to_server,
                self.decode,
                access=Access.INNER,
                while_draining=("Abort",),
                long_lived=("Frames",),
            )
        if PREFILL in served:
            server.add(engine_pb2_grpc.add_PrefillServicer_to_server, self.prefill, access=Access.INNER)

        def publish() -> None:
            for name in served:
                server.set_ready(self.status.ready(name), name)

        self.status.listen(publish)

    # -- up

    async def started(self) -> None:
        """Load, connect, serve. Raises what makes the worker useless: no model, no memory."""
        settings = self.settings
        check_route(settings)
        self._runner = runner = await load_runner(settings)
        spec = "scripted" if settings.runner == "scripted" else settings.model
        tokenizer = await in_thread(lambda: load_tokenizer(spec), name="tokenizer-load")
        grammars = await self._grammars(tokenizer, runner)
        route = await choose_route(settings, runner.layout(settings.page_size, 1))
        # Shielded: where the start is broken off, `close` waits for it before it takes away what this works on.
        self._under_way = making = asyncio.ensure_future(in_thread(lambda: self._make(runner, route), name="kv-setup"))
        memory, movers = await asyncio.shield(making)
        layout = memory.layout
        identity = self._identity(runner, memory, tokenizer.fingerprint)
        loop = asyncio.get_running_loop()
        pump = EventPump(loop)
        self.routers = RouterLinks(
            settings.routers, incarnation=self.incarnation, info=self._info, load=self._load,
            open_channel=self._channel, interval_s=settings.report_interval_s,
        )  # fmt: skip
        staging = movers.staging
        link = self._link(identity, memory)
        ranks = ranks_of(runner)
        fatal = self._fatal(loop)
        movers.on_failed(fatal)
        core = EngineCore(
            runner,
            layout,
            EngineConfig(
                max_model_len=identity.max_model_len,
                max_batch=settings.max_batch,
                token_budget=settings.token_budget,
                chunk_size=settings.chunk_size,
                max_queue=settings.max_queue,
                look_ahead=settings.look_ahead,
                prefix_cache=settings.prefix_cache,
                stall_timeout_s=settings.stall_timeout_s,
                overlap=settings.overlap,
                # A preempted sequence is recomputed by the same rule as a new one.
                remote_resume=True,
            ),
            pump,
            doorbell=memory.doorbell if staging is None else staging.bell,
            ring=memory.ring,
            notify=link.notify_ring if link is not None else None,
            poster=movers.poster if staging is None else staging,
            on_stall=lambda stalled: self._from_thread(loop, stalled),
            on_failed=lambda error: fatal(error.message),
            on_cache_event=CacheRelay(loop, self.routers.on_cache_event),
        )
        self.ctx = ctx = WorkerContext(
            settings=settings,
            identity=identity,
            core=core,
            pump=pump,
            tasks=self.service.tasks,
            channels=PrefillChannels(self._prefill_channel, self.service.tasks),
            meters=Meters(identity.served_name, lambda: core.counters, core.pool.counts),
            link=link,
            staging=staging,
            nic_writes=NicWrites(settings.gpu, fatal) if route is Route.GPUDIRECT else None,
            grammars=grammars,
            at_step=self._at_step,
        )
        pump.on_load(ctx.meters)
        self.decode.hub = FramesHub(
            incarnation=self.incarnation,
            limits=FrameLimits(
                settings.heartbeat_s, settings.write_timeout_s, min(4 << 20, settings.max_message_bytes // 2)
            ),
            load=self._load,
            on_end=self._on_stream_end,
        )
        self.engine.ctx = self.decode.ctx = self.prefill.ctx = ctx
        core.start()
        self.service.tasks.spawn(self._housekeeping(), name="housekeeping")
        self.service.tasks.spawn(self.routers.run(), name="routers")
        self.status.listen(self.routers.on_change)
        if ranks is not None:
            ranks.on_lost(fatal)
            ranks.on_leaving(self._leaving(loop))
            self.service.ready_info["ranks"] = ranks.pids
        if link is not None:
            link.start()
            if ranks is not None:
                ranks.note(Kind.JOIN, {
                    "path": str(settings.sidecar_socket),
                    "engine_id": identity.worker_id,
                    "incarnation": identity.incarnation,
                })  # fmt: skip
        self.status.update(loaded=True)
        self.service.ready_info.update(
            worker_id=identity.worker_id, incarnation=self.incarnation, role=settings.role, model=identity.served_name
        )
        log.info(
            "%s serves %s: %d pages of %d tokens, context %d",
            identity.worker_id, identity.served_name, layout.num_pages, layout.page_size, identity.max_model_len,
        )  # fmt: skip

    async def _grammars(self, tokenizer: TokenizerBundle, runner: Runner) -> GrammarCompiler | None:
        """None where nothing is decoded, or where the library does not know such a tokenizer."""
        if self.settings.role == "prefill":
            return None
        info = runner.info
        size, eos = max(info.vocab_size, tokenizer.vocab_size), info.eos_token_ids | tokenizer.eos_token_ids
        try:
            text = tokenizer.tokenizer.to_str()
            return GrammarCompiler(await in_thread(lambda: Vocabulary(text, size, eos), name="grammar-load"))
        except (KvmeshError, ImportError) as error:
            log.warning("no grammars are served: %s", error)
            return None

    def _make(self, runner: Runner, route: Route) -> tuple[KvMemory, Movers]:
        """Memory, what moves it, and the runner bound to it. Blocks: a GPU's graphs are captured here."""
        self._memory = memory = make_memory(runner, self.settings, route)
        self._movers = movers = make_movers(self.settings, memory, route, runner)
        memory.bind(runner)
        return memory, movers

    def _identity(self, runner: Runner, memory: KvMemory, tokenizer_fingerprint: str) -> Identity:
        settings, info = self.settings, runner.info
        policies = {"seed": str(settings.seed)}
        if memory.layout.kv_scales is not None:
            policies["kv_scales"] = ",".join(map(float.hex, memory.layout.kv_scales))
        return Identity(
            worker_id=settings.instance or f"{socket.gethostname()}-{settings.role}",
            incarnation=self.incarnation,
            served_name=settings.served_name or info.name,
            info=info,
            layout=memory.layout,
            base_seed=base_seed(info.name, info.revision, memory.layout.dtype, policies),
            max_model_len=min(settings.max_model_len or info.max_model_len, info.max_model_len),
            tokenizer_fingerprint=tokenizer_fingerprint,
        )

    def _link(self, identity: Identity, memory: KvMemory) -> SidecarLink | None:
        if self.settings.sidecar_socket is None:
            return None
        return SidecarLink(
            self.settings.sidecar_socket,
            engine_id=identity.worker_id,
            incarnation=identity.incarnation,
            layout=memory.shared_layout,
            regions=memory.shared_regions,
            doorbell=memory.doorbell_region,
            ring=memory.ring_region,
            poster=self._movers.poster,
            on_connected=self._connected,
            on_lost=lambda: self.status.update(sidecar_up=False),
        )

    def _connected(self, client: SidecarClient) -> None:
        self.status.update(sidecar_up=True)
        if self.ctx is not None and self.ctx.nic_writes is not None and not NIC_TRANSPORTS & set(client.transports):
            # A little of it was taken, all of it is not: often the GPU's BAR, which it must fit into.
            log.error("no NIC takes all of this GPU's KV memory: nothing can be sent or received; set gpudirect=off")

    def _fatal(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], None]:
        """What to call, from any thread, where this process is of no use any more (a rank or the GPU is lost):
        readiness off, one terminal for each request, exit status 1."""
        told: asyncio.Future[str] = loop.create_future()

        def settle(reason: str) -> None:
            if not told.done():
                told.set_result(reason)

        def tell(reason: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, reason)

        async def end() -> None:
            reason = await told
            self.status.update(draining=True)
            if self.ctx is not None:
                self.ctx.core.drain()
                self.ctx.core.abort_all(Unavailable(reason))
                if not await self.requests.wait_idle(ABORT_S):
                    # A step stands still: it waits for a host that is gone without a word.
                    for request in self.requests.all():
                        request.finish(Unavailable(reason), None)
            raise Unavailable(reason)

        self.service.tasks.spawn(end(), name="fatal")
        return tell

    def _leaving(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], None]:
        """What to call, from any thread, where another host of the ranks is told to stop: finish, then end as a lost
        rank would, so that whoever supervises starts a new group."""

        async def end(reason: str) -> None:
            await self.finish_work(Deadline.after(max(0.0, self.settings.drain_timeout_s - ABORT_S)))
            raise Unavailable(reason)

        def begin(reason: str) -> None:
            if not self.status.draining:
                self.service.tasks.spawn(end(reason), name="leaving")

        def tell(reason: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(begin, reason)

        return tell

    def _channel(self, address: str, name: str = "") -> MeshChannel:
        return open_inner_channel(address, self.settings, self.service.auth.token, name=name)

    def _prefill_channel(self, address: str) -> MeshChannel:
        """One that stands still is noticed by its pings: gRPC answers them beside the event loop and the GIL, so that
        a worker that is only busy is never given up."""
        return open_inner_channel(
            address, self.settings, self.service.auth.token, silence_s=self.settings.prefill_silence_s
        )

    def _from_thread(self, loop: asyncio.AbstractEventLoop, stalled: bool) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: self.status.update(stalled=stalled))

    # -- meanwhile

    def _info(self) -> engine_pb2.WorkerInfo:
        assert self.ctx is not None
        return worker_info(self.ctx, self.status, self.service.server.address)

    def _load(self) -> engine_pb2.WorkerLoad:
        assert self.ctx is not None
        return load_proto(self.ctx.core.load())

    def _on_seen(self, request_id: str) -> None:
        if self.routers is not None:
            self.routers.on_seen(request_id)

    def _on_stream_end(self, stream: GatewayStream, why: KvmeshError) -> None:
        ended = self.requests.abort_stream(stream, why)
        if ended:
            log.warning("frames of gateway %s ended (%s): %d request(s) aborted", stream.gateway_id, why.message, ended)

    async def _housekeeping(self) -> None:
        assert self.ctx is not None
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.requests.end_overdue()
            self.ctx.meters.on_step(StepDone(self.ctx.core.load()))

    # -- down

    async def finish_work(self, deadline: Deadline, abort_s: float = ABORT_S) -> None:
        """Accept nothing more; let what runs finish by the deadline, end the rest with one terminal each.

        abort_s: what ending may take after the deadline; a step that hangs then no longer holds a terminal up.
        """
        self.status.update(draining=True)
        ctx = self.ctx
        if ctx is None:
            return
        ctx.core.drain()
        if not await self.requests.wait_idle(deadline.timeout()):
            error = Unavailable("the worker is stopping")
            log.warning("drain timeout: %d request(s) are ended", len(self.requests))
            for request in self.requests.all():
                request.abort(error)
            if not await self.requests.wait_idle(abort_s):
                for request in self.requests.all():
                    request.finish(error, None)
        if not await self.prefill.wait_idle(deadline.timeout()):
            log.warning("drain timeout: %d prefill(s) are ended", len(self.prefill))
            self.prefill.abort_all(Unavailable("the worker is stopping"))
        cleanups = set(ctx.cleanups)
        if cleanups:
            await asyncio.wait(cleanups, timeout=abort_s)

    async def drain(self, deadline: Deadline) -> None:
        """SIGTERM: finish the work, then end the Frames streams with everything written."""
        if self.ctx is not None and self.ctx.link is not None:
            self.ctx.link.leaving()
        margin = min(ABORT_S + FLUSH_S, deadline.remaining() / 2)
        # Two waits of finish_work and the streams share the margin.
        await self.finish_work(Deadline.after(deadline.remaining() - margin), min(ABORT_S, margin / 3))
        if self.decode.hub is not None:
            await self.decode.hub.close(FLUSH_S)

    async def close(self) -> None:
        """Release everything, in the order in which nothing uses what is gone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.routers is not None:
            await self.routers.close()
        if not await self._at_rest():
            # A thread still uses runner and memory: they go with the process. Ranks do not, if they stand still.
            if self._runner is not None and (ranks := ranks_of(self._runner)) is not None:
                await in_thread(ranks.close, name="ranks-close")
            return
        if (runner := self._runner) is not None:
            try:
                # Ranks get some time to leave.
                await in_thread(runner.close, name="runner-close")
            except Exception:
                # Its device may still use the memory, which goes with the process.
                log.exception("the runner does not close")
                return
        await in_thread(self._movers.close, name="movers-close")
        if self._memory is not None:
            self._memory.close()

    async def _at_rest(self) -> bool:
        """End whatever uses runner and memory. False where it does not end in time."""
        if (under_way := self._under_way) is not None:
            await asyncio.wait({under_way}, timeout=STOP_S)
            if not under_way.done():
                log.error("stopped while starting, and what is under way does not end within %g s", STOP_S)
                return False
            if not under_way.cancelled() and (error := under_way.exception()) is not None:
                log.debug("the start had failed: %r", error)
        if (ctx := self.ctx) is None:
            return True
        ctx.core.abort_all(Cancelled("the worker has stopped"))
        if ctx.grammars is not None:
            ctx.grammars.close()
        if ctx.link is not None:
            await ctx.link.close()
        await ctx.channels.close()
        try:
            await in_thread(lambda: ctx.core.stop(STOP_S), name="core-stop")
        except KvmeshError as error:
            log.error("%s", error.message)
            return False
        return True
