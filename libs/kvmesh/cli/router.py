"""`kvmesh router`: why a request was decided as it was."""

from __future__ import annotations

import datetime as dt
import math
import secrets
from typing import Annotated, Any

import grpc
import typer
from rich.console import Group, RenderableType
from rich.table import Column, Table
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
    plain,
    run,
    secure_of,
    wide_console,
)
from kvmesh.cli.state import read_state
from kvmesh.client import Client
from kvmesh.errors import FailedPrecondition
from kvmesh.proto.v1 import router_admin_pb2, router_admin_pb2_grpc

TIMEOUT_S = 10.0

app = typer.Typer(name="router", help="Look at the router's decisions; judge them.", no_args_is_help=True)


def explained_view(explained: router_admin_pb2.ExplainResponse) -> Group:
    """Decision, class, cache, workers."""
    when = dt.datetime.fromtimestamp(explained.decided_at).isoformat(sep=" ", timespec="milliseconds")
    parts: list[RenderableType] = [
        Text(
            f"{explained.decision} for {explained.model or '?'} {explained.revision} "
            f"({explained.request_id}, tenant {explained.tenant}, {when}, router {explained.router_id})",
            style="bold",
        ),
        Text(
            f"took {explained.total_ms:.2f} ms"
            + "".join(f", {name} {value:.2f}" for name, value in sorted(explained.parts_ms.items()))
        ),
    ]
    if explained.HasField("class"):
        parts.append(_class(getattr(explained, "class")))
    if explained.HasField("cache"):
        parts += _cache(explained.cache)
    if explained.workers:
        parts.append(_workers(explained))
    return Group(*parts)


def _class(chosen: router_admin_pb2.ExplainedClass) -> Text:
    return Text(
        f"class: {chosen.alias} → {chosen.pool or 'no classes'}, P(small suffices) {_number(chosen.probability)} "
        f"against {_number(chosen.threshold)}: {chosen.reason}"
    )


def _cache(cache: router_admin_pb2.ExplainedCache) -> list[RenderableType]:
    why = f" ({cache.mode_reason})" if cache.mode_reason else ""
    parts: list[RenderableType] = [
        Text(f"cache: {cache.outcome}; mode {cache.mode}{why}, tau {cache.tau:g}, partition {cache.partition or '–'}")
    ]
    if cache.candidates:
        table = Table("cosine", "remembered question", "guard", "verifier", "served", "purge id", title="came near")
        for item in cache.candidates:
            served = "yes" if item.served else "no"
            table.add_row(
                f"{item.similarity:.4f}",
                plain(item.text),
                item.guard or "–",
                _number(item.verifier),
                served,
                item.purge_id,
            )
        parts.append(table)
    return parts


def _workers(explained: router_admin_pb2.ExplainResponse) -> Table:
    headers = ("worker", "role", "state", "breaker", "matched", "load", "credit", "relative", "score", "rank")
    table = Table(*(Column(header, overflow="fold") for header in (*headers, "why not")), title="placement")
    order = sorted(explained.workers, key=lambda row: (row.role, row.rank == 0, row.rank, row.worker_id))
    for row in order:
        table.add_row(
            plain(row.worker_id),
            row.role,
            row.state,
            row.breaker,
            f"{row.matched_tokens:,}",
            f"{row.load_tokens:,}",
            f"{row.credit_tokens:,}",
            f"{row.relative_load:.3f}",
            f"{row.score:.3f}" if row.rank else "–",
            str(row.rank) if row.rank else "–",
            plain(row.excluded),
        )
    return table


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


async def explain_one(mesh: Mesh, request: router_admin_pb2.ExplainRequest) -> int:
    """What each replica decided for it, newest last: a request that waits or heals is decided again, by any of them.

    Raises NotFound when none has decided, Unavailable when one that might have does not answer.
    """

    async def ask(channel: grpc.aio.Channel) -> router_admin_pb2.ExplainResponse:
        stub = router_admin_pb2_grpc.RouterAdminStub(channel)
        reply: router_admin_pb2.ExplainResponse = await stub.Explain(request, timeout=TIMEOUT_S, metadata=mesh.metadata)
        return reply

    replies, troubles = await mesh.ask_all(ask)
    if not replies:
        raise nobody(troubles)
    for reply in sorted(replies, key=lambda reply: reply.decided_at):
        wide_console().print(explained_view(reply))
    return 0


async def send_feedback(mesh: Mesh, request: router_admin_pb2.FeedbackRequest) -> int:
    """Tell the replica that decided."""
    troubles: Troubles = []
    for address in mesh.routers:
        try:
            async with mesh.secure.channel(address) as channel:
                await router_admin_pb2_grpc.RouterAdminStub(channel).Feedback(
                    request, timeout=TIMEOUT_S, metadata=mesh.metadata
                )
            return 0
        except grpc.aio.AioRpcError as error:
            troubles.append((address, error))
    raise nobody(troubles)


async def try_question(
    mesh: Mesh, gateway: str, question: str, *, system: str, model: str, api_key: str, sampling: dict[str, Any]
) -> int:
    """Send the question as a request that only the cache may answer, then explain what was decided for it."""
    request_id = f"explain-{secrets.token_hex(8)}"
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    secure = mesh.secure
    async with Client(
        gateway, api_key=api_key or None, tls=secure.tls, server_name=secure.server_name or None
    ) as client:
        stream = client.chat(
            messages,
            model=model,
            request_id=request_id,
            cache_control={"only_if_cached": True, "no_store": True},
            timeout_s=TIMEOUT_S,
            **sampling,
        )
        try:
            async with stream:
                async for _ in stream:
                    pass
        except FailedPrecondition as error:
            if error.reason != "NOT_CACHED":
                raise
    return await explain_one(mesh, router_admin_pb2.ExplainRequest(request_id=request_id))


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="A request decided lately (the client's id or the mesh's).")] = "",
    question: Annotated[
        str, typer.Option(help="Instead: this user message, sent as a request that only the cache may answer.")
    ] = "",
    system: Annotated[str, typer.Option(help="With --question: system message.")] = "",
    model: Annotated[str, typer.Option(help="With --question: model or alias; default: what the mesh serves.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="With --question: as `kvmesh ask` has it.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="With --question: 0 is greedy.")] = 0.0,
    gateway: Annotated[
        str, typer.Option(help="With --question: gateway; default: the mesh that runs here.", envvar="KVMESH_GATEWAY")
    ] = "",
    api_key: Annotated[
        str, typer.Option(help="With --question: bearer key.", envvar="KVMESH_API_KEY", show_default=False)
    ] = "",
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Show scores of workers, what the cache did, and the guard that refused what came near."""
    if bool(request_id) == bool(question):
        raise fail("name a request id, or a question with --question")
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    if request_id:
        raise run(explain_one(mesh, router_admin_pb2.ExplainRequest(request_id=request_id)))
    state = read_state()
    target = gateway or (state.gateway if state else "")
    if not target:
        raise fail("no mesh runs here; name a gateway with --gateway")
    name = model or (state.model if state and not gateway else "auto")
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    raise run(try_question(mesh, target, question, system=system, model=name, api_key=api_key, sampling=sampling))


@app.command()
def feedback(
    request_id: Annotated[str, typer.Argument(help="The request (the client's id or the mesh's).")],
    good: Annotated[bool, typer.Option("--good/--bad", help="Whether the answer was good enough.")],
    router: RouterOption = "",
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Say whether the class of model that answered an alias was good enough."""
    mesh = mesh_of(router, token_file, secure_of(tls_ca, tls_cert, tls_key, tls_server_name))
    raise run(send_feedback(mesh, router_admin_pb2.FeedbackRequest(request_id=request_id, good=good)))
