"""`kvmesh status`: the fleet as the router sees it, and every sidecar's transports with the reason for the choice."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
from rich.console import Console
from rich.text import Text

from kvmesh.cli.render import MeshStatus, render
from kvmesh.cli.tls import PLAINTEXT, Secure
from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import engine_pb2, kvtransfer_pb2, kvtransfer_pb2_grpc, router_pb2, router_pb2_grpc
from kvmesh.rpc.auth import MESH_TOKEN_KEY, MeshToken

__all__ = ["MeshStatus", "print_status", "read_status", "render", "wait_fleet"]

TIMEOUT_S = 5.0


def _token_metadata(token_file: str) -> tuple[tuple[str, str], ...]:
    if not token_file:
        return ()
    return ((MESH_TOKEN_KEY, MeshToken(Path(token_file)).current()),)


async def read_status(router: str, token_file: str = "", secure: Secure = PLAINTEXT) -> MeshStatus:
    """Ask the router for its fleet and each worker's sidecar for its links. Raises grpc.aio.AioRpcError."""
    metadata = _token_metadata(token_file)
    async with secure.channel(router) as channel:
        watch = router_pb2_grpc.RouterStub(channel).Watch(
            router_pb2.WatchRequest(watcher_id="kvmesh-status"), timeout=TIMEOUT_S, metadata=metadata
        )
        try:
            fleet = await watch.read()
        finally:
            watch.cancel()
    if not isinstance(fleet, router_pb2.WatchResponse):
        fleet = router_pb2.WatchResponse()

    async def sidecar(address: str) -> kvtransfer_pb2.GetStatusResponse | None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with secure.channel(address) as channel:
                stub = kvtransfer_pb2_grpc.KvTransferStub(channel)
                reply: kvtransfer_pb2.GetStatusResponse = await stub.GetStatus(
                    kvtransfer_pb2.GetStatusRequest(), timeout=TIMEOUT_S, metadata=metadata
                )
                return reply
        return None

    workers = [w.info for w in fleet.workers if w.info.kvtransfer_address]
    replies = await asyncio.gather(*(sidecar(info.kvtransfer_address) for info in workers))
    return MeshStatus(fleet, {info.worker_id: reply for info, reply in zip(workers, replies, strict=True)})


async def wait_fleet(router: str, token_file: str, workers: set[str], timeout_s: float) -> set[str]:
    """Watch the router's fleet until all of `workers` are SERVING; returns those still missing at the timeout.

    A worker says SERVING by itself before the router has heard of it; a mesh is up when requests can reach everybody.
    """
    missing = set(workers)
    async with grpc.aio.insecure_channel(router) as channel:
        watch = router_pb2_grpc.RouterStub(channel).Watch(
            router_pb2.WatchRequest(watcher_id="kvmesh-up"), timeout=timeout_s, metadata=_token_metadata(token_file)
        )
        try:
            async for change in watch:
                for entry in change.workers:
                    if entry.info.state == engine_pb2.WORKER_STATE_SERVING:
                        missing.discard(entry.info.worker_id)
                if not missing:
                    break
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        finally:
            watch.cancel()
    return missing


async def print_status(router: str, token_file: str, console: Console, secure: Secure = PLAINTEXT) -> int:
    """Print the status; 1 when the router does not answer, 2 when the token file or a certificate is unusable."""
    try:
        console.print(render(await read_status(router, token_file, secure)))
    except grpc.aio.AioRpcError as error:
        console.print(Text(f"router at {router}: {error.code().name}: {error.details()}", style="red"))
        return 1
    except (OSError, ValueError) as error:
        console.print(Text(f"mesh token: {error}", style="red"))
        return 2
    except KvmeshError as error:
        console.print(Text(error.message, style="red"))
        return 2
    return 0
