"""The worker list without a router: addresses from the settings, described by the workers themselves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from kvmesh.config import split_host_port
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc, router_pb2
from kvmesh.rpc.channel import MeshChannel
from services.gateway.fleet import Fleet

log = logging.getLogger(__name__)

SOURCE = "settings"
DESCRIBE_TIMEOUT_S = 1.0
INTERVAL_S = 2.0
# A worker that does not answer stays in the list this many rounds: its frames tell sooner whether it lives.
ROUNDS_KEPT = 5


async def resolve(target: str) -> list[str]:
    """Every address behind a target: a dns: name may stand for many workers. The target itself when it is no name."""
    if not target.startswith("dns:"):
        return [target]
    host, port = split_host_port(target.removeprefix("dns:").rpartition("/")[2])
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as exc:
        log.warning("%s does not resolve: %s", target, exc)
        return []
    addresses = [(f"[{a[0]}]" if family == socket.AF_INET6 else str(a[0])) for family, _, _, _, a in found]
    return sorted({f"{address}:{port}" for address in addresses})


async def poll(
    targets: Sequence[str],
    fleet: Fleet,
    *,
    open_channel: Callable[[str], MeshChannel],
    routers_seen: Callable[[], bool],
    interval_s: float = INTERVAL_S,
) -> None:
    """Keep the fleet's list from `Engine.Describe` of the targets, until a router was seen for the first time."""
    channels: dict[str, MeshChannel] = {}
    kept: dict[str, tuple[int, engine_pb2.DescribeResponse]] = {}
    try:
        while not routers_seen():
            addresses = {address for target in targets for address in await resolve(target)}
            for address in [old for old in channels if old not in addresses]:
                await channels.pop(address).close()
            for address in addresses - set(channels):
                channels[address] = open_channel(address)
            found = await asyncio.gather(*(_describe(address, channel) for address, channel in channels.items()))
            for address, response in zip(list(channels), found, strict=True):
                rounds, old = kept.get(address, (ROUNDS_KEPT, None))
                if response is not None:
                    kept[address] = (0, response)
                elif old is not None and rounds < ROUNDS_KEPT:
                    kept[address] = (rounds + 1, old)
                else:
                    kept.pop(address, None)
            workers = [router_pb2.WorkerStatus(info=r.info, load=r.load) for _, r in kept.values()]
            # The first answer is given at once, even an empty one: then it is known that nothing is there.
            fleet.update(SOURCE, router_pb2.WatchResponse(snapshot=True, workers=workers))
            await asyncio.sleep(interval_s)
        fleet.forget(SOURCE)
    finally:
        for channel in channels.values():
            await channel.close()


async def _describe(address: str, channel: MeshChannel) -> engine_pb2.DescribeResponse | None:
    try:
        response: engine_pb2.DescribeResponse = await engine_pb2_grpc.EngineStub(channel).Describe(
            engine_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
        )
    except grpc.aio.AioRpcError as exc:
        log.info("worker %s does not answer: %s", address, exc.code().name)
        return None
    # A worker that binds all interfaces may not know how it is reached.
    if not response.info.address:
        response.info.address = address
    return response
