"""The gateway process: builds its parts from the settings and ties them to the life of the server."""

from __future__ import annotations

import asyncio
import logging
import uuid

from kvmesh.config import GatewaySettings
from kvmesh.errors import Unavailable
from kvmesh.proto.inference import grpc_predict_v2_pb2_grpc
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc.channel import MeshChannel, open_inner_channel
from kvmesh.rpc.guard import Access
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.service import ServiceContext
from kvmesh.store.client import RedisStore
from kvmesh.store.fair import FairStore
from kvmesh.store.flights import FlightStore
from services.gateway import static
from services.gateway.access import AccessRules
from services.gateway.fleet import Fleet
from services.gateway.flights import Flights
from services.gateway.flights.view import SharedGenerations
from services.gateway.front import Front
from services.gateway.grammars import Grammars
from services.gateway.heals import Heals
from services.gateway.http.app import App
from services.gateway.http.face import Face
from services.gateway.http.server import HttpServer
from services.gateway.identity import credentials_of
from services.gateway.kserve.service import InferenceServiceServicer
from services.gateway.limits.limiter import Limits
from services.gateway.link import WorkerLink
from services.gateway.peers.peering import Peering
from services.gateway.placement import Placer
from services.gateway.playground.pages import Playground
from services.gateway.prepare import Preparer, Rules
from services.gateway.processes.child import Child, Line
from services.gateway.processes.runtime import TENANTS
from services.gateway.queue import FairQueue
from services.gateway.queue.shared import SharedCharges
from services.gateway.registry import INSTANCE, Registry
from services.gateway.routers import Routers
from services.gateway.service import InferenceServicer
from services.gateway.shadow import Shadows, crowded
from services.gateway.sink import RequestSettings
from services.gateway.tally import Tallies, TenantNames
from services.gateway.tokenizers import TokenizerStore

log = logging.getLogger(__name__)

SERVICE_NAME = "kvmesh.v1.Inference"
# Of the drain: what the last terminal events get to reach their clients.
LAST_WORD_S = 1.0
# A process that has just started knows by then whether there is a worker.
HEAR_OF_WORKERS_S = 10.0
# Nothing that a client waits for waits for Redis here.
REDIS_TIMEOUT_S = 0.5


class Gateway:
    """All parts of one gateway process; `kvmesh.rpc.service.Service` to the outside."""

    def __init__(
        self, context: ServiceContext[GatewaySettings], *, child: Child | None = None, instance: str = INSTANCE
    ) -> None:
        """`child`: what it knows as one of several processes. `instance`: its name among all gateways."""
        settings = context.settings
        self._context = context
        self._settings = settings
        # One of several is ready when all have been: a client may reach any of them.
        self._line: Line | None = None
        self._said_ready = False
        self._among_all = child is None
        if child is not None:
            self._line = Line(child.control, self._all_are_ready, context.server.request_stop)
            context.on_up = lambda: self._say("up")
        self.gateway_id = f"gw-{uuid.uuid4().hex}"
        silence_s = settings.heartbeat_s * settings.heartbeats_missed
        self.queue = FairQueue(
            settings.max_waiting_requests, early_refusal=settings.early_refusal, shared=bool(settings.redis_url)
        )
        self.fleet = Fleet(
            gateway_id=self.gateway_id,
            open_channel=self._open_channel,
            tasks=context.tasks,
            silence_s=silence_s,
            on_load=self._on_load,
            on_change=self._on_change,
            grace_s=settings.empty_fleet_grace_s,
        )
        self.routers = Routers(
            settings.routers,
            open_channel=self._open_router_channel,
            tasks=context.tasks,
            route_timeout_s=settings.route_timeout_ms / 1e3,
            silence_s=silence_s,
        )
        self.tokenizers = TokenizerStore(settings.model)
        self.grammars = Grammars(settings.grammar_timeout_ms / 1e3)
        self.registry = Registry(settings.max_concurrent_requests)
        self.placer = Placer(
            fleet=self.fleet,
            routers=self.routers,
            queue=self.queue,
            submit_timeout_s=settings.submit_timeout_s,
            max_attempts=settings.max_attempts,
        )
        self.heals = Heals(wait_s=settings.heal_wait_s)
        rules = Rules(
            ttft_limit_s=settings.ttft_limit_s,
            total_limit_s=settings.total_limit_s,
            max_prompt_bytes=settings.max_prompt_bytes,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_choices=settings.max_choices,
        )
        request_settings = RequestSettings(
            first_metadata_s=settings.first_metadata_s,
            buffer_tokens=settings.request_buffer_tokens,
            buffer_bytes=settings.request_buffer_bytes,
            max_attempts=settings.max_attempts,
        )
        self.redis = _redis(settings)
        flight_store = FlightStore(self.redis, self.gateway_id) if self.redis is not None else None
        self.flights = Flights(flight_store, context.tasks)
        # Those of this host at least share what there is.
        replicas = max(settings.limits.replicas, settings.processes)
        limits = settings.limits.model_copy(update={"replicas": replicas})
        self.limits = Limits(limits, self.redis, context.tasks, name=self.gateway_id)
        proven = context.auth.token is not None or settings.tls.inner.cert is not None
        self.front = Front(
            credentials=credentials_of(settings, self.redis, proven=proven),
            preparer=Preparer(self.fleet, self.tokenizers, rules, self.grammars),
            rules=rules,
            request_settings=request_settings,
            registry=self.registry,
            placer=self.placer,
            routers=self.routers,
            heals=self.heals,
            fleet=self.fleet,
            limiter=self.limits,
            access=AccessRules(settings.access_log, settings.log_prompts, settings.log_prompts_chars),
            tallies=Tallies(
                settings.slo_ttft_ms / 1e3,
                settings.slo_tpot_ms / 1e3,
                TenantNames(settings.metrics_tenants, child.runtime / TENANTS if child is not None else None),
            ),
            flights=SharedGenerations(self.flights, settings.total_limit_s),
            shadows=Shadows(
                placer=self.placer,
                routers=self.routers,
                heals=self.heals,
                settings=request_settings,
                tasks=context.tasks,
                busy=lambda model: self.queue.waiting(model) or crowded(self.fleet.links(model)),
            ),
        )
        context.server.add(
            inference_pb2_grpc.add_InferenceServicer_to_server,
            InferenceServicer(self.front),
            access=Access.PUBLIC,
            while_draining=["Abort"],
        )
        self.playground: Playground | None = None
        siblings = (child.runtime, child.token_file) if child is not None else None
        self.peering = Peering(settings, context.auth, self.redis, siblings, instance=instance)
        self.front.peers = self.peering.peers
        if child is not None:
            # Behind a shared port nothing keeps callers away from a process that has just started: they wait.
            self.front.begun = asyncio.Event()
        self.http = self._http()
        self.kserve = InferenceServiceServicer(self.front, ready=lambda: self.fleet.ready)
        context.server.add(
            grpc_predict_v2_pb2_grpc.add_GRPCInferenceServiceServicer_to_server,
            self.kserve,
            access=Access.PUBLIC,
            while_draining=["ServerLive", "ServerReady", "ServerMetadata"],
        )

    def _http(self) -> HttpServer | None:
        settings = self._settings
        if not settings.http_listen:
            return None
        face = Face(self.front, settings.http_max_body_bytes)
        if settings.playground:
            # Of several processes, each would get a part of the spans, and another the question for them.
            self.playground = Playground(settings.playground_spans if settings.processes == 1 else "")
        pages = self.playground.routes(face) if self.playground is not None else ()
        app = App(face, lambda: self._context.server.ready, cors_origins=settings.cors_origins, extra_routes=pages)
        return HttpServer(settings, app, face, leaving=lambda: self._context.server.withdrawn)

    def _open_channel(self, address: str) -> MeshChannel:
        return open_inner_channel(address, self._settings, self._context.auth.token)

    def _open_router_channel(self, address: str, name: str) -> MeshChannel:
        """A report must reach the replica that decided, so that a channel is one replica's."""
        return open_inner_channel(address, self._settings, self._context.auth.token, balance=False, name=name)

    def _on_load(self, link: WorkerLink) -> None:
        if len(self.queue):
            self.queue.offer(link)

    def _on_change(self) -> None:
        for model in self.fleet.models():
            self.front.tallies.serves(model.name)
        if self.fleet.ready and self.front.begun is not None:
            self.front.begun.set()
        if self.fleet.ready != self._said_ready:
            self._said_ready = self.fleet.ready
            self._say("ready" if self._said_ready else "unready")
        self._context.server.set_ready(self.fleet.ready and self._among_all)
        self.heals.changed()
        if len(self.queue):
            for link in self.fleet.links():
                self.queue.offer(link)

    def _say(self, word: str) -> None:
        if self._line is not None:
            self._line.say(word)

    def _all_are_ready(self) -> None:
        self._among_all = True
        self._context.server.set_ready(self.fleet.ready)

    async def started(self) -> None:
        """Load the tokenizer, then follow the fleet; readiness follows the workers."""
        await self.tokenizers.preload()
        if self.redis is not None:
            self._context.tasks.spawn(self.redis.watch(), name="redis-watch")
            self._context.tasks.spawn(SharedCharges(self.queue, FairStore(self.redis)).run(), name="shared-charges")
        if peer_address := await self.peering.start(self.front.abort_here, self._context.tasks):
            self._context.ready_info["peer"] = peer_address
        if self.front.begun is not None:
            asyncio.get_running_loop().call_later(HEAR_OF_WORKERS_S, self.front.begun.set)
        self.limits.start()
        self.flights.start()
        self.routers.watch(self.fleet)
        if self._settings.workers:
            self._context.tasks.spawn(
                static.poll(
                    self._settings.workers,
                    self.fleet,
                    open_channel=self._open_channel,
                    routers_seen=lambda: self.routers.seen,
                ),
                name="static-workers",
            )

        if self.playground is not None:
            await self.playground.start()
        if self.http is not None:
            self._context.ready_info["http"] = await self.http.start()
            self._context.tasks.spawn(self.http.run(), name="http")

    async def drain(self, deadline: Deadline) -> None:
        """Running requests finish by themselves; what still runs near the deadline gets its terminal error, and what
        other gateways follow is theirs to go on with."""
        log.info("%d request(s) running, %d waiting", len(self.registry), len(self.queue))
        self.flights.drain()
        self.kserve.stop()
        if self.http is not None:
            self.http.stop_listening()
        left = deadline.remaining()
        work = Deadline.after(left - min(LAST_WORD_S, left / 2))
        if self.http is not None:
            await self.http.last_call(work.remaining())
        if not await self.registry.wait_idle(work.remaining()):
            self.registry.stop_all(lambda: Unavailable("this gateway is stopping"))
        if self.http is not None:
            await self.http.finish(Deadline.after(deadline.remaining() / 2))
        await self.flights.close(deadline.remaining() / 2)

    async def close(self) -> None:
        """Close HTTP, then the links to workers, routers and Redis."""
        if self.http is not None:
            await self.http.close()
        if self.playground is not None:
            await self.playground.close()
        self.fleet.close()
        await self.routers.close()
        await self.peering.close()
        if self._line is not None:
            self._line.close()
        self.grammars.close()
        await self.limits.close()
        if self.redis is not None:
            await self.redis.close()


def _redis(settings: GatewaySettings) -> RedisStore | None:
    if not settings.redis_url:
        return None
    return RedisStore(
        settings.redis_url,
        timeout_s=REDIS_TIMEOUT_S,
        password_file=settings.redis_password_file,
        ca_file=settings.redis_ca_file,
        cluster=settings.redis_cluster,
    )


async def build(context: ServiceContext[GatewaySettings], child: Child | None = None) -> Gateway:
    """Build the gateway and register its services."""
    return Gateway(context, child=child)
