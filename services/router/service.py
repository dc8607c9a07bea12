"""The router's gRPC face: Route, Report, ReportShadow, Watch, Attach, EmbedTexts; and the life of its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvmesh.config import RouterSettings
from kvmesh.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from kvmesh.proto.v1 import router_admin_pb2_grpc, router_pb2, router_pb2_grpc
from kvmesh.rpc import Access, Deadline, ServiceContext, cancel_and_wait, tenant_from
from kvmesh.rpc.auth import ServicerContext
from kvmesh.telemetry import metrics, names
from services.router.admin import RouterAdminServicer
from services.router.cache.answers import AnswerCache
from services.router.classes.feedback import Feedback
from services.router.classes.pools import Classes
from services.router.fleet import Fleet, Session
from services.router.near.nearcache import NearCache
from services.router.placement.pairs import decodes
from services.router.routing import Routing
from services.router.watch import WatchHub

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# Workers try a router that is away every two seconds.
QUIET_S = 3.0
GATHER_LOOK_S = 0.1
MAX_SEEN = 65536
MAX_TEXTS = 256
MAX_TEXT_CHARS = 64 * 1024
"""Of one text to embed: it is tokenized as a whole, although only its beginning counts."""

EMBED_LIMIT_S = 60.0


def check_texts(texts: Sequence[str]) -> None:
    """Raises InvalidArgument for what EmbedTexts does not take."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidArgument(f"1 to {MAX_TEXTS} texts are embedded at a time", details={"field": "texts"})
    for index, text in enumerate(texts):
        if not text:
            raise InvalidArgument("a text is empty", details={"field": f"texts[{index}]"})
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidArgument(
                f"a text is longer than {MAX_TEXT_CHARS} characters", details={"field": f"texts[{index}]"}
            )


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Thin: every method hands over to the part that knows."""

    def __init__(
        self, router_id: str, fleet: Fleet, routing: Routing, hub: WatchHub, near: NearCache | None = None
    ) -> None:
        """`near` has the embedder."""
        self._router_id = router_id
        self._near = near
        self._fleet = fleet
        self._routing = routing
        self._hub = hub
        self._sessions: set[Session] = set()

    async def Route(self, request: router_pb2.RouteRequest, context: ServicerContext) -> router_pb2.RouteResponse:
        """See router.proto."""
        return await self._routing.route(request, tenant_from(context), context.time_remaining())

    async def Report(self, request: router_pb2.ReportRequest, context: ServicerContext) -> router_pb2.ReportResponse:
        """See router.proto. Returns when the answer is stored, or will not be."""
        await self._routing.report(request, tenant_from(context))
        return router_pb2.ReportResponse()

    async def ReportShadow(
        self, request: router_pb2.ReportShadowRequest, context: ServicerContext
    ) -> router_pb2.ReportShadowResponse:
        """See router.proto."""
        await self._routing.report_shadow(request, tenant_from(context))
        return router_pb2.ReportShadowResponse()

    async def Watch(
        self, request: router_pb2.WatchRequest, context: ServicerContext
    ) -> AsyncIterator[router_pb2.WatchResponse]:
        """See router.proto."""
        async with contextlib.aclosing(self._hub.stream()) as messages:
            async for message in messages:
                yield message

    async def Attach(
        self, request_iterator: AsyncIterator[router_pb2.AttachRequest], context: ServicerContext
    ) -> AsyncIterator[router_pb2.AttachResponse]:
        """See router.proto. The stream ends with the reason why the fleet let go of the worker."""
        session = Session()
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(request_iterator, session), name="attach-read")
        wake = asyncio.create_task(session.wake.wait(), name="attach-wake")
        registered = asyncio.create_task(session.registered.wait(), name="attach-registered")
        try:
            await asyncio.wait(
                {reader, wake, registered}, timeout=self._fleet.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not session.registered.is_set() and not reader.done():
                raise FailedPrecondition("no registration came")
            while not reader.done() and not session.closed.is_set():
                yield router_pb2.AttachResponse(router_id=self._router_id, need_snapshot=session.take_need())
                if wake.done():
                    wake = asyncio.create_task(session.wake.wait(), name="attach-wake")
                await asyncio.wait({reader, wake}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            elif session.closed.is_set():
                raise session.error()
        finally:
            self._sessions.discard(session)
            self._fleet.detach(session)
            await cancel_and_wait(reader, wake, registered)

    async def _read(self, messages: AsyncIterator[router_pb2.AttachRequest], session: Session) -> None:
        async for message in messages:
            event = message.WhichOneof("event")
            if event == "registration":
                self._fleet.register(message.registration, session)
            elif event == "load":
                worker = self._fleet.report(session, message.load.load)
                self._routing.placer.credit.seen(worker.worker_id, message.load.seen_requests[:MAX_SEEN])
            elif event == "kv":
                self._fleet.kv_events(session, message.kv)
            else:
                raise InvalidArgument("an attach message holds a registration, a load report or KV events")

    async def EmbedTexts(
        self, request: router_pb2.EmbedTextsRequest, context: ServicerContext
    ) -> router_pb2.EmbedTextsResponse:
        """See router.proto. Texts beyond the embedder's window are cut at it."""
        check_texts(request.texts)
        if self._near is None:
            raise FailedPrecondition("this router runs no embedder")
        if request.model and self._near.model and request.model != self._near.model:
            raise NotFound(f"this router's embedder is {self._near.model}", details={"field": "model"})
        limit_s = min(context.time_remaining() or EMBED_LIMIT_S, EMBED_LIMIT_S)
        try:
            made = await self._near.embed_whole(request.texts, limit_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the texts were not embedded within {limit_s:.1f} s") from None
        response = router_pb2.EmbedTextsResponse(
            model=self._near.model, prompt_tokens=sum(tokens for _, tokens in made)
        )
        for vector, _ in made:
            response.embeddings.add().values.extend(vector.tolist())
        return response

    def close(self) -> None:
        """End all streams: workers and watchers turn to another router."""
        self._hub.close()
        for session in list(self._sessions):
            session.close("this router is stopping")


class RouterService:
    """Life of the router process."""

    def __init__(self, context: ServiceContext[RouterSettings]) -> None:
        """Raises ValueError or OSError for settings that cannot be used."""
        settings = context.settings
        self._context = context
        self.fleet = Fleet(settings.worker_timeout_s)
        classes = Classes.from_settings(settings)
        # Answers of an alias are void where the rule that picks the model behind it has changed.
        self.cache = AnswerCache.from_settings(settings, route_policy=classes.version)
        self.routing = Routing(
            settings, self.fleet, self.cache, classes=classes, feedback=Feedback.from_settings(settings)
        )
        near = self.cache.near
        self.hub = WatchHub(
            self.fleet,
            self.cache.status,
            aliases=settings.alias_map | classes.aliases,
            embedder=lambda: near.model if near is not None else "",
        )
        self.servicer = RouterServicer(settings.instance_name, self.fleet, self.routing, self.hub, near)
        context.server.add(
            router_pb2_grpc.add_RouterServicer_to_server,
            self.servicer,
            access=Access.INNER,
            while_draining=("Report", "ReportShadow"),
            long_lived=("Watch", "Attach"),
        )
        context.server.add(
            router_admin_pb2_grpc.add_RouterAdminServicer_to_server,
            RouterAdminServicer(settings.instance_name, self.cache, self.routing, texts=settings.explain_texts),
            access=Access.INNER,
        )

    async def started(self) -> None:
        """Start the loops. It decides from the start on, but is not ready before it knows what the others remember."""
        self.cache.start()
        tasks = self._context.tasks
        tasks.spawn(self.cache.run(), name="answer-cache")
        tasks.spawn(self._sweep(), name="fleet-sweep")
        tasks.spawn(self._ready(), name="cache-ready")

    async def _ready(self) -> None:
        await self.cache.rebuilt()
        await self.gathered(self._context.settings.fleet_wait_s)
        self._context.server.set_ready(True)

    async def gathered(self, limit_s: float) -> None:
        """Until workers have attached, one that generates among them, and no further ones come; at most `limit_s`.

        Who is replaced by this router goes when it is ready: the others must not be left without one that knows them.
        """
        until = time.monotonic() + limit_s
        known: set[str] = set()
        quiet_since = time.monotonic()
        while (now := time.monotonic()) < until:
            ids = {worker.worker_id for worker in self.fleet.workers}
            if ids - known:
                known, quiet_since = ids, now
            generating = any(worker.serving and decodes(worker.info) for worker in self.fleet.workers)
            if generating and now - quiet_since >= QUIET_S:
                return
            await asyncio.sleep(min(GATHER_LOOK_S, until - now))

    async def _sweep(self) -> None:
        """Take out silent workers and old credit, and publish the gauges."""
        interval = min(0.25, self.fleet.timeout_s / 4)
        while True:
            self.fleet.expire()
            self.routing.placer.sweep()
            self.routing.gauges.publish()
            if self.cache.near is not None:
                metrics.gauge(names.CACHE_ENTRIES).labels("semantic").set(self.cache.near.entries)
            await asyncio.sleep(interval)

    async def drain(self, deadline: Deadline) -> None:
        """Calls in flight take milliseconds; the streams end now, so that others take over."""
        self.servicer.close()

    async def close(self) -> None:
        """End the embedder's thread and the connections to Redis."""
        self.servicer.close()
        await self.cache.close()


async def build(context: ServiceContext[Any]) -> RouterService:
    """For `kvmesh.rpc.run_service`."""
    return RouterService(context)
