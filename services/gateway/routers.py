"""The router replicas: asking one of them where a request goes, telling one how it ended, and watching the fleet."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, NotFound, Unavailable
from kvmesh.proto.v1 import router_pb2, router_pb2_grpc
from kvmesh.rpc.auth import tenant_metadata
from kvmesh.rpc.channel import MeshChannel, cancelling
from kvmesh.rpc.status import DETAILS_KEY, from_rpc_error
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.telemetry import metrics, names
from services.gateway.fleet import Fleet

log = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 2.0
MAX_REPORTS_IN_FLIGHT = 1024
# A replica that did not answer is asked last for this long.
SHUN_S = 1.0
BACKOFF_S = (0.1, 2.0)


class NoRouter(Unavailable):
    """No replica answered in time: the gateway places by itself."""

    reason = "NO_ROUTER"


class Replica:
    """One configured router address. Where it resolves to several, the channel stays with one that can be reached."""

    def __init__(self, address: str, channel: MeshChannel) -> None:
        self.address = address
        self.channel = channel
        self.stub = router_pb2_grpc.RouterStub(channel)
        self.shunned_until = 0.0
        self.embedder = ""
        """Id under which it embeds texts; "" when it does not, or cannot be reached."""


class Routers:
    """All configured replicas. `silence_s`: a Watch without any message for this long is dead."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        open_channel: Callable[[str], MeshChannel],
        tasks: BackgroundTasks,
        route_timeout_s: float,
        silence_s: float,
    ) -> None:
        self._replicas = [Replica(address, open_channel(address)) for address in addresses]
        self._turn = itertools.count(random.randrange(max(1, len(self._replicas))))
        self._tasks = tasks
        self._route_timeout_s = route_timeout_s
        self._silence_s = silence_s
        self._reports = 0
        self.seen = False
        """True once any router has told of the fleet."""

    def __len__(self) -> int:
        return len(self._replicas)

    def _order(self) -> list[Replica]:
        """Replicas in turn, those that failed lately last."""
        now = asyncio.get_running_loop().time()
        start = next(self._turn) if self._replicas else 0
        turned = [self._replicas[(start + i) % len(self._replicas)] for i in range(len(self._replicas))]
        return sorted(turned, key=lambda replica: replica.shunned_until > now)

    async def route(self, request: router_pb2.RouteRequest, tenant: str) -> tuple[router_pb2.RouteResponse, Replica]:
        """A decision and who made it: it alone can take the report.

        NoRouter when none answers within the route timeout; else what a router refused it with.

        The timeout covers all replicas together: one that fails at once leaves the rest of it to the next.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._route_timeout_s
        refusal: KvmeshError | None = None
        for replica in self._order():
            left = deadline - loop.time()
            if left <= 0:
                break
            try:
                response: router_pb2.RouteResponse = await replica.stub.Route(
                    request, timeout=left, metadata=tenant_metadata(tenant)
                )
            except grpc.aio.AioRpcError as exc:
                error = from_rpc_error(exc)
                if _spoken(exc) and isinstance(error, NotFound | FailedPrecondition):
                    raise error from exc
                if _spoken(exc) and isinstance(error, Unavailable):
                    # Maybe only this replica: it is stopping, or its workers have not attached yet.
                    refusal = error
                    continue
                replica.shunned_until = loop.time() + SHUN_S
                log.warning("router %s gave no decision: %s", replica.address, exc.code().name)
                continue
            replica.shunned_until = 0.0
            return response, replica
        raise refusal if refusal is not None else NoRouter("no router answered in time")

    def embedders(self) -> list[str]:
        """Ids under which texts are embedded by routers that can be reached."""
        return sorted({replica.embedder for replica in self._replicas if replica.embedder})

    async def embed(
        self, request: router_pb2.EmbedTextsRequest, tenant: str, timeout_s: float
    ) -> router_pb2.EmbedTextsResponse:
        """Vectors from a replica that has this embedder; where one fails, from the next.

        Raises what a router refused it with, Unavailable when none has the embedder or answers, DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        refusal: KvmeshError = Unavailable("no router that embeds texts can be reached", retry_after=1.0)
        asked = [replica for replica in self._order() if replica.embedder == request.model]
        for index, replica in enumerate(asked):
            # One that hangs leaves the others their part.
            left = (deadline - loop.time()) / (len(asked) - index)
            if left <= 0:
                break
            try:
                response: router_pb2.EmbedTextsResponse = await replica.stub.EmbedTexts(
                    request, timeout=left, metadata=tenant_metadata(tenant)
                )
            except grpc.aio.AioRpcError as exc:
                refusal = from_rpc_error(exc)
                if isinstance(refusal, InvalidArgument):
                    raise refusal from exc
                log.warning("router %s did not embed: %s", replica.address, exc.code().name)
                continue
            return response
        raise refusal

    def report(self, request: router_pb2.ReportRequest, tenant: str, decided_by: Replica) -> None:
        """Tell the replica that decided how the request ended; in the background, once, and lost if it fails (by
        contract). The others do not know the decision, and their load comes from the workers."""
        self._tell(decided_by.stub.Report, request, tenant, request.request_id)

    def report_shadow(self, request: router_pb2.ReportShadowRequest, tenant: str, decided_by: Replica) -> None:
        """Bring a shadow's answer to the replica that asked for it, as `report` does."""
        self._tell(decided_by.stub.ReportShadow, request, tenant, request.shadow_id)

    def _tell(self, method: Any, request: Any, tenant: str, what: str) -> None:
        if self._reports >= MAX_REPORTS_IN_FLIGHT:
            return
        try:
            self._tasks.spawn(self._told(method, request, tenant, what), name="report", essential=False)
        except RuntimeError:
            log.debug("closing: a report is dropped")

    async def _told(self, method: Any, request: Any, tenant: str, what: str) -> None:
        self._reports += 1
        try:
            await method(request, timeout=REPORT_TIMEOUT_S, metadata=tenant_metadata(tenant))
        except grpc.aio.AioRpcError as exc:
            log.info("report of %s was lost: %s", what, exc.code().name)
        finally:
            self._reports -= 1

    # --- the fleet
    def watch(self, fleet: Fleet) -> None:
        """Follow every replica's view of the fleet."""
        for replica in self._replicas:
            self._tasks.spawn(self._watch(replica, fleet), name=f"watch:{replica.address}")

    async def _watch(self, replica: Replica, fleet: Fleet) -> None:
        backoff, trouble = BACKOFF_S[0], ""
        while True:
            why, seen = await self._watch_once(replica, fleet)
            replica.embedder = ""
            fleet.source_lost(replica.address)
            if seen:
                backoff = BACKOFF_S[0]
            if seen or why != trouble:
                log.warning("watch of router %s: %s", replica.address, why)
                trouble = why
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, BACKOFF_S[1])

    async def _watch_once(self, replica: Replica, fleet: Fleet) -> tuple[str, bool]:
        """One Watch call until it breaks; returns why, and whether it had delivered anything."""
        seen = False
        try:
            with cancelling(replica.stub.Watch(router_pb2.WatchRequest(watcher_id=fleet.gateway_id))) as call:
                while True:
                    async with asyncio.timeout(self._silence_s):
                        message = await call.read()
                    if not isinstance(message, router_pb2.WatchResponse):
                        return "ended", seen
                    seen = self.seen = True
                    replica.embedder = message.embedder
                    fleet.update(replica.address, message)
        except TimeoutError:
            metrics.counter(names.HEARTBEATS_MISSED).labels("router").inc()
            return f"silent for {self._silence_s:g} s", seen
        except grpc.aio.AioRpcError as exc:
            return exc.code().name, seen

    async def close(self) -> None:
        """Close the channels."""
        for replica in self._replicas:
            await replica.channel.close()


def _spoken(exc: grpc.aio.AioRpcError) -> bool:
    """True when the router itself answered with this status, false for a broken connection or a deadline here."""
    metadata: Any = exc.trailing_metadata() or ()
    return any(key == DETAILS_KEY for key, _ in metadata)
