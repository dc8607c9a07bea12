"""`kvmesh cache`: what the answer caches hold and serve; forgetting answers; a threshold from labelled pairs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvmesh.cli.options import (
    Mesh,
    RouterOption,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    Troubles,
    fail,
    mesh_of,
    nobody,
    run,
    secure_of,
    told,
    wide_console,
)
from kvmesh.proto.v1 import router_admin_pb2, router_admin_pb2_grpc

TIMEOUT_S = 10.0

app = typer.Typer(name="cache", help="Answer caches: stats, purge, tune.", no_args_is_help=True)


def stats_view(stats: router_admin_pb2.CacheStatsResponse) -> Group:
    """One router's caches."""
    status = stats.status
    lines = Table("what", "value", title=f"caches of router {stats.router_id}")
    rows = {
        "redis": "up" if status.redis_ok else "down",
        "embedder": status.embedder or "none",
        "semantic entries": f"{status.entries:,} in {status.partitions:,} partitions, {status.bytes:,} bytes",
        "epoch": str(status.epoch),
        "rebuilt": f"{status.progress:.0%}",
    }
    rows |= {f"requests: {outcome}": f"{count:,}" for outcome, count in sorted(stats.lookups.items())}
    rows |= {f"refused by {guard}": f"{count:,}" for guard, count in sorted(stats.refusals.items())}
    if stats.shadows:
        rows["estimated false hits"] = (
            f"{stats.false_hit_rate:.2%} ({stats.false_hit_low:.2%} to {stats.false_hit_high:.2%}), "
            f"{stats.shadows_wrong} of {stats.shadows} shadowed hits called wrong, {stats.shadows_untold} not judged"
        )
    else:
        rows["estimated false hits"] = "no hit has been shadowed yet"
    for name, value in rows.items():
        lines.add_row(name, value)
    tenants = Table("tenant", "entries", "bytes", "hits", "misses", title="tenants")
    for tenant in stats.tenants:
        tenants.add_row(
            tenant.tenant, f"{tenant.entries:,}", f"{tenant.bytes:,}", f"{tenant.hits:,}", f"{tenant.misses:,}"
        )
    return Group(lines, *([tenants] if stats.tenants else []))


async def print_stats(mesh: Mesh) -> int:
    """Every replica's; 1 when one does not answer."""

    async def ask(channel: grpc.aio.Channel) -> router_admin_pb2.CacheStatsResponse:
        stub, request = router_admin_pb2_grpc.RouterAdminStub(channel), router_admin_pb2.CacheStatsRequest()
        reply: router_admin_pb2.CacheStatsResponse = await stub.CacheStats(
            request, timeout=TIMEOUT_S, metadata=mesh.metadata
        )
        return reply

    console = wide_console()
    replies, troubles = await mesh.ask_all(ask)
    for reply in replies:
        console.print(stats_view(reply))
    return _complain(troubles, console)


async def purge_all(mesh: Mesh, request: router_admin_pb2.CachePurgeRequest) -> int:
    """Purge on every replica: through Redis one would tell the others, but without it each has a memory of its own.

    1 when one does not answer: what it remembers is not known then.
    """

    async def ask(channel: grpc.aio.Channel) -> router_admin_pb2.CachePurgeResponse:
        stub = router_admin_pb2_grpc.RouterAdminStub(channel)
        reply: router_admin_pb2.CachePurgeResponse = await stub.CachePurge(
            request, timeout=TIMEOUT_S, metadata=mesh.metadata
        )
        return reply

    replies, troubles = await mesh.ask_all(ask)
    if not replies:
        raise nobody(troubles)
    purged, epoch = sum(reply.purged for reply in replies), max(reply.epoch for reply in replies)
    Console().print(f"purged {purged} answer(s); epoch {epoch}", markup=False, highlight=False)
    return _complain(troubles, Console(stderr=True))


def _complain(troubles: Troubles, console: Console) -> int:
    for each in troubles:
        console.print(Text(told(*each), style="red"))
    return 1 if troubles else 0


@app.command()
def stats(
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """What the caches hold, hit and refuse, and how often a semantic hit was wrong."""
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    raise run(print_stats(mesh))


@app.command()
def purge(
    purge_id: Annotated[str, typer.Option("--id", help="One answer, by the purge id that came with it.")] = "",
    tenant: Annotated[str, typer.Option(help="Everything of one tenant.")] = "",
    model: Annotated[str, typer.Option(help="Everything that one model answered.")] = "",
    revision: Annotated[str, typer.Option(help="With --model: this revision alone.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All answers of all tenants, by a new epoch.")] = False,
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Forget answers, on every replica."""
    if sum(map(bool, (purge_id, tenant, model, everything))) != 1:
        raise fail("name exactly one of --id, --tenant, --model and --all")
    if revision and not model:
        raise fail("--revision goes with --model")
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    request = router_admin_pb2.CachePurgeRequest(
        purge_id=purge_id, tenant=tenant, model=model, revision=revision, all=everything
    )
    raise run(purge_all(mesh, request))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def tune(
    context: typer.Context,
    labels: Annotated[Path, typer.Argument(help='JSONL: {"asked": "…", "remembered": "…", "same": true} a line.')],
) -> None:
    """Sweep the threshold over labelled pairs: hits and false hits with intervals, and a plot.

    Further options go to the sweep; `kvmesh cache tune LABELS --help` lists them.
    """
    # The sweep is the router's own code, with its embedder and guards: it runs beside this command, not in it.
    command = [sys.executable, "-m", "services.router.match.tune", str(labels), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
