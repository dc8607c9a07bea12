"""The router replicas: asking one of them where a request goes, telling one how it ended, and watching the fleet."""

from __future__ import annotations

import asyncio
import contextlib
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
from kvmesh.rpc.resolve import host_of, resolve
from kvmesh.rpc.status import DETAILS_KEY, from_rpc_error
from kvmesh.rpc.tasks import BackgroundTasks, cancel_and_wait
from kvmesh.telemetry import metrics, names
from services.gateway.fleet import Fleet

log = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 2.0
MAX_REPORTS_IN_FLIGHT = 1024
# A replica that did not answer is asked last for this long.
SHUN_S = 1.0
BACKOFF_S = (0.1, 2.0)
# Between look-ups of names: where one was lost or not found, and where all is well.
LOOK_UP_S = (0.5, 5.0)
# A replica that has left may still owe answers to calls that were under way, or had chosen it already.
LINGER_S = 60.0


class NoRouter(Unavailable):
    """No replica answered in time: the gateway places by itself."""

    reason = "NO_ROUTER"


class Replica:
    """One router, by its address."""

    def __init__(self, address: str, channel: MeshChannel) -> None:
        self.address = address
        self.channel = channel
        self.stub = router_pb2_grpc.RouterStub(channel)
        self.shunned_until = 0.0
        self.watched = False
        """True while it tells of the fleet."""
        self.embedder = ""
        """Id under which it embeds texts; "" when it does not, or cannot be reached."""


class Routers:
    """All replicas behind the configured addresses: a name is looked up again from time to time, and at once when a
    replica is lost. `open_channel` gets an address and the name it was found by ("" = none). `silence_s`: a Watch
    without any message for this long is dead."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        open_channel: Callable[[str, str], MeshChannel],
        tasks: BackgroundTasks,
        route_timeout_s: float,
        silence_s: float,
    ) -> None:
        self._targets = list(targets)
        self._open = open_channel
        self._found: dict[str, set[str]] = {target: {target} for target in self._targets if not _is_name(target)}
        self._replicas: list[Replica] = []
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        self._lost = asyncio.Event()
        self._turn = itertools.count(random.randrange(max(1, len(self._targets))))
        self._tasks = tasks
        self._route_timeout_s = route_timeout_s
        self._silence_s = silence_s
        self._reports = 0
        self.seen = False
        """True once any router has told of the fleet."""
        self._add_found()

    def __len__(self) -> int:
        """How many addresses and names are configured."""
        return len(self._targets)

    def _order(self) -> list[Replica]:
        """Replicas in turn; those last that failed lately, or do not tell of the fleet: they are leaving, or away."""
        now = asyncio.get_running_loop().time()
        start = next(self._turn) if self._replicas else 0
        turned = [self._replicas[(start + i) % len(self._replicas)] for i in range(len(self._replicas))]
        return sorted(turned, key=lambda replica: (replica.shunned_until > now, not replica.watched))

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
        except grpc.aio.UsageError:
            log.info("report of %s was lost: its router has left", what)
        finally:
            self._reports -= 1

    # --- who they are
    def _add_found(self) -> None:
        known = {replica.address for replica in self._replicas}
        for target, addresses in self._found.items():
            for address in sorted(addresses - known):
                known.add(address)
                self._replicas.append(Replica(address, self._open(address, host_of(target))))

    async def _look_up(self) -> bool:
        """Look every name up; one that cannot be found now keeps its addresses. False where that is so."""
        complete = True
        for target in self._targets:
            if not _is_name(target):
                continue
            found = await resolve(target)
            if found:
                self._found[target] = found
            else:
                complete = False
        return complete

    async def _drop_left(self) -> None:
        """Forget who has no name any more. One that still tells of the fleet lives, whatever is said of it."""
        known = {address for addresses in self._found.values() for address in addresses}
        for replica in [each for each in self._replicas if each.address not in known and not each.watched]:
            log.info("router %s has left", replica.address)
            self._replicas.remove(replica)
            # What it said of the fleet stays until another says something.
            self._left.add(replica.address)
            await cancel_and_wait(self._watches.pop(replica.address, None))
            self._tasks.spawn(self._close_later(replica), name=f"left:{replica.address}", essential=False)

    async def _close_later(self, replica: Replica) -> None:
        try:
            await asyncio.sleep(LINGER_S)
        finally:
            await replica.channel.close()

    async def _follow(self, fleet: Fleet) -> None:
        """Until cancelled: a Watch of every replica that there is."""
        while True:
            self._lost.clear()
            complete = await self._look_up()
            self._add_found()
            await self._drop_left()
            for replica in self._replicas:
                if replica.address not in self._watches:
                    watch = self._watch(replica, fleet)
                    self._watches[replica.address] = self._tasks.spawn(watch, name=f"watch:{replica.address}")
            await asyncio.sleep(LOOK_UP_S[0])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_UP_S[1] if complete else LOOK_UP_S[0]):
                    await self._lost.wait()

    # --- the fleet
    def watch(self, fleet: Fleet) -> None:
        """Follow every replica's view of the fleet."""
        self._tasks.spawn(self._follow(fleet), name="routers")

    async def _watch(self, replica: Replica, fleet: Fleet) -> None:
        backoff, trouble = BACKOFF_S[0], ""
        while True:
            why, seen = await self._watch_once(replica, fleet)
            replica.embedder, replica.watched = "", False
            fleet.source_lost(replica.address)
            if seen:
                backoff = BACKOFF_S[0]
                self._lost.set()
            if seen or why != trouble:
                log.warning("watch of router %s: %s", replica.address, why)
                trouble = why
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, BACKOFF_S[1])

    def _heard(self, replica: Replica, fleet: Fleet) -> None:
        self.seen = replica.watched = True
        while self._left:
            address = self._left.pop()
            if address != replica.address:
                fleet.forget(address)

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
                    seen = True
                    replica.embedder = message.embedder
                    fleet.update(replica.address, message)
                    self._heard(replica, fleet)
        except TimeoutError:
            metrics.counter(names.HEARTBEATS_MISSED).labels("router").inc()
            return f"silent for {self._silence_s:g} s", seen
        except grpc.aio.AioRpcError as exc:
            return exc.code().name, seen

    async def close(self) -> None:
        """Close the channels."""
        for replica in self._replicas:
            await replica.channel.close()


def _is_name(target: str) -> bool:
    return bool(host_of(target)) or target.startswith(("ipv4:", "ipv6:"))


def _spoken(exc: grpc.aio.AioRpcError) -> bool:
    """True when the router itself answered with this status, false for a broken connection or a deadline here."""
    metadata: Any = exc.trailing_metadata() or ()
    return any(key == DETAILS_KEY for key, _ in metadata)
