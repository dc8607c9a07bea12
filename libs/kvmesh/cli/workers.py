"""`kvmesh workers`: the fleet as the routers see it, and taking a worker out of it for a while.

Cordon and drain are asked of the worker itself, which tells every router by its state: the mark outlives any router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Column, Table

from kvmesh.cli.options import (
    Mesh,
    RouterOption,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    mesh_of,
    nobody,
    plain,
    run,
    secure_of,
    wide_console,
)
from kvmesh.errors import NotFound
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc

TIMEOUT_S = 5.0

app = typer.Typer(name="workers", help="List workers; cordon, drain and uncordon them.", no_args_is_help=True)
Ids = Annotated[list[str], typer.Argument(help="Worker ids, as `kvmesh workers list` prints them.")]


async def read_fleet(mesh: Mesh) -> dict[str, router_pb2.WorkerStatus]:
    """Worker id → status, as any replica knows it: one that has just started does not know all yet.

    Raises Unavailable when none answers.
    """

    async def ask(channel: grpc.aio.Channel) -> router_pb2.WatchResponse:
        request = router_pb2.WatchRequest(watcher_id="kvmesh-workers")
        watch = router_pb2_grpc.RouterStub(channel).Watch(request, timeout=TIMEOUT_S, metadata=mesh.metadata)
        try:
            first = await watch.read()
        finally:
            watch.cancel()
        return first if isinstance(first, router_pb2.WatchResponse) else router_pb2.WatchResponse()

    replies, troubles = await mesh.ask_all(ask)
    if not replies:
        raise nobody(troubles)
    fleet: dict[str, router_pb2.WorkerStatus] = {}
    for reply in replies:
        for entry in reply.workers:
            fleet.setdefault(entry.info.worker_id, entry)
    return fleet


def table_of(fleet: dict[str, router_pb2.WorkerStatus]) -> Table:
    """One row a worker."""
    headers = ("worker", "role", "state", "breaker", "model", "revision", "address", "running", "waiting", "queued")
    table = Table(*(Column(header, overflow="fold") for header in (*headers, "pages free")), title="workers")
    for worker_id, entry in sorted(fleet.items()):
        info, load = entry.info, entry.load
        table.add_row(
            plain(worker_id),
            engine_pb2.WorkerRole.Name(info.role).removeprefix("WORKER_ROLE_").lower(),
            engine_pb2.WorkerState.Name(info.state).removeprefix("WORKER_STATE_").lower(),
            entry.breaker or "closed",
            plain(info.model),
            plain(info.revision[:12]),
            plain(info.address),
            str(load.running),
            str(load.waiting),
            f"{load.queued_tokens:,}",
            f"{load.free_pages}/{load.total_pages or info.total_pages}",
        )
    return table


async def _of(mesh: Mesh, ids: Sequence[str]) -> list[engine_pb2.WorkerInfo]:
    """What the named workers are. Raises NotFound before anything is done to any of them."""
    fleet = await read_fleet(mesh)
    unknown = [worker_id for worker_id in ids if worker_id not in fleet]
    if unknown:
        raise NotFound(f"no worker {', '.join(unknown)}; there are: {', '.join(sorted(fleet)) or 'none'}")
    return [fleet[worker_id].info for worker_id in ids]


def _refused(info: engine_pb2.WorkerInfo, error: grpc.aio.AioRpcError) -> None:
    line = f"{info.worker_id} at {info.address}: {error.code().name}: {error.details()}"
    Console(stderr=True).print(line, style="red", markup=False, highlight=False)


async def set_cordon(mesh: Mesh, ids: Sequence[str], cordoned: bool) -> int:
    """Cordon or uncordon each of them; 1 when one did not answer."""
    console, bad = Console(), 0
    for info in await _of(mesh, ids):
        request = engine_pb2.CordonRequest(cordoned=cordoned)
        try:
            async with mesh.secure.channel(info.address) as channel:
                stub = engine_pb2_grpc.EngineStub(channel)
                reply = await stub.Cordon(request, timeout=TIMEOUT_S, metadata=mesh.metadata)
        except grpc.aio.AioRpcError as error:
            _refused(info, error)
            bad = 1
            continue
        state = engine_pb2.WorkerState.Name(reply.info.state).removeprefix("WORKER_STATE_").lower()
        console.print(f"{info.worker_id}: {state}", markup=False, highlight=False)
    return bad


async def drain_all(mesh: Mesh, ids: Sequence[str], timeout_s: float) -> int:
    """Drain workers beside each other; 1 when one did not come to its end."""
    console = Console()

    async def drain(info: engine_pb2.WorkerInfo) -> bool:
        async with mesh.secure.channel(info.address) as channel:
            request = engine_pb2.DrainRequest(timeout_ms=int(timeout_s * 1000))
            # The worker's own limit ends it; ours is for a worker that does not answer.
            call = engine_pb2_grpc.EngineStub(channel).Drain(
                request, timeout=(timeout_s or 3600.0) + TIMEOUT_S, metadata=mesh.metadata
            )
            try:
                async for step in call:
                    told = "drained" if step.drained else f"{step.running} running, {step.waiting} waiting"
                    console.print(f"{info.worker_id}: {told}", markup=False, highlight=False)
                    if step.drained:
                        return True
            except grpc.aio.AioRpcError as error:
                _refused(info, error)
            finally:
                call.cancel()
        return False

    done = await asyncio.gather(*(drain(info) for info in await _of(mesh, ids)))
    return 0 if all(done) else 1


@app.command("list")
def list_(
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Every worker with its state, breaker and load."""
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))

    async def show() -> int:
        wide_console().print(table_of(await read_fleet(mesh)))
        return 0

    raise run(show())


@app.command()
def cordon(
    ids: Ids,
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Place nothing new on workers; what runs goes on."""
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    raise run(set_cordon(mesh, ids, True))


@app.command()
def uncordon(
    ids: Ids,
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Let workers be chosen again."""
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    raise run(set_cordon(mesh, ids, False))


@app.command()
def drain(
    ids: Ids,
    timeout_s: Annotated[float, typer.Option(min=0, max=86400, help="Seconds; 0 = the worker's own setting.")] = 0.0,
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Stop workers from taking requests, for good, and wait until what runs has ended."""
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    raise run(drain_all(mesh, ids, timeout_s))
