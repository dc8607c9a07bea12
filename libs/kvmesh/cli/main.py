"""Entry point of the `kvmesh` command."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer
from rich.console import Console

from kvmesh import __version__
from kvmesh.cli import cache, keys, router, workers
from kvmesh.cli import chat as chat_command
from kvmesh.cli import usage as usage_command
from kvmesh.cli.options import TlsCa, TlsCert, TlsKey, TlsName, fail, secure_of
from kvmesh.cli.state import read_state

app = typer.Typer(
    name="kvmesh",
    help="Disaggregated LLM serving: start a mesh on this machine, ask it, look at it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cache.app)
app.add_typer(keys.app)
app.add_typer(router.app)
app.add_typer(workers.app)
app.command()(chat_command.chat)
app.command()(usage_command.usage)

DEFAULT_GATEWAY = "127.0.0.1:8080"


@app.command()
def up(
    model: Annotated[
        str, typer.Option(help="Known name, GGUF file or Hugging Face directory.", envvar="KVMESH_MODEL")
    ] = "smollm2",
    scripted: Annotated[bool, typer.Option(help="Run the scripted engine: no model, for tests of the mesh.")] = False,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, max=64, help="Decode workers.")] = 1,
    unified: Annotated[int, typer.Option(min=0, max=64, help="Workers that do both.")] = 0,
    routers: Annotated[int, typer.Option(min=1, max=16, help="Router replicas.")] = 1,
    transports: Annotated[str, typer.Option(help="kvtransfer transports, in order of preference.")] = "shm,tcp",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Gateway's port; another one is taken if in use.")] = 8080,
    http_port: Annotated[
        int,
        typer.Option(min=-1, max=65535, help="Port of the HTTP API; another one is taken if in use; -1 = no HTTP."),
    ] = 8000,
    gateway_processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes of the gateway, which share its ports.")
    ] = 1,
    playground: Annotated[bool, typer.Option(help="A page for trying the mesh, at / of the HTTP API.")] = True,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads per engine; 0 = share the cores.")] = 0,
    cache: Annotated[
        bool, typer.Option(help="Answer caches: exact (an embedded Redis-compatible server) and semantic.")
    ] = True,
    credentials: Annotated[str, typer.Option(help="File of hashed API keys; none = one tenant, no keys.")] = "",
    otlp: Annotated[str, typer.Option(help="OTLP/gRPC endpoint for traces.", envvar="KVMESH_OTLP_ENDPOINT")] = "",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="service.setting=value for every process of a service, for example decode.max_batch=8."
        ),
    ] = None,
    ask: Annotated[str, typer.Option(help="Ask this once everything serves.")] = "",
    once: Annotated[bool, typer.Option(help="Stop after the answer to --ask.")] = False,
    api_key: Annotated[
        str, typer.Option(help="Bearer key of --ask.", envvar="KVMESH_API_KEY", show_default=False)
    ] = "",
    keep_logs: Annotated[bool, typer.Option(help="Leave the folder with logs behind.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Start the mesh on this machine; Ctrl-C stops it and leaves nothing behind."""
    from kvmesh.cli.plan import MeshOptions, unknown_setting
    from kvmesh.cli.up import up as run

    if decode + unified < 1:
        raise fail("a mesh needs at least one decode or unified worker")
    settings: dict[str, str] = {}
    for item in setting or []:
        key, equals, value = item.partition("=")
        if not equals or "." not in key:
            raise fail(f"--set {item}: expected service.setting=value")
        problem = unknown_setting(key)
        if problem:
            raise fail(f"--set {item}: {problem}")
        settings[key] = value
    engines = prefill + decode + unified
    options = MeshOptions(
        model=model,
        runner="scripted" if scripted else "torch",
        prefill=prefill,
        decode=decode,
        unified=unified,
        routers=routers,
        transports=transports,
        gateway_port=port,
        http_port=http_port,
        gateway_processes=gateway_processes,
        playground=playground,
        cache=cache,
        dtype=dtype,
        # Two engines that both use every core slow each other down by far more than half.
        threads=threads or max(1, len(os.sched_getaffinity(0)) // max(1, engines)),
        log_level=log_level,
        otlp_endpoint=otlp,
        credentials_file=credentials,
        settings=settings,
    )
    raise typer.Exit(asyncio.run(run(options, question=ask, once=once, keep_logs=keep_logs, api_key=api_key)))


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    address: Annotated[
        str, typer.Option(help="Gateway; default: the mesh that runs here.", envvar="KVMESH_GATEWAY")
    ] = "",
    model: Annotated[str, typer.Option(help="Model or alias; default: what the mesh serves.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    api_key: Annotated[str, typer.Option(help="Bearer key.", envvar="KVMESH_API_KEY", show_default=False)] = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Stream an answer and print how it was served."""
    from kvmesh.cli.ask import ask as run

    state = read_state()
    target = address or (state.gateway if state else DEFAULT_GATEWAY)
    name = model or (state.model if state and not address else "auto")
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    secure = secure_of(tls_ca, tls_cert, tls_key, tls_server_name)
    work = run(
        target,
        question,
        model=name,
        console=Console(stderr=True),
        system=system,
        api_key=api_key,
        sampling=sampling,
        secure=secure,
    )
    raise typer.Exit(asyncio.run(work))


@app.command()
def status(
    router: Annotated[str, typer.Option(help="Router; default: the mesh that runs here.", envvar="KVMESH_ROUTER")] = "",
    token_file: Annotated[str, typer.Option(help="File of the mesh token.", envvar="KVMESH_MESH_TOKEN_FILE")] = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Show every worker, link and transport, and why each transport was chosen."""
    from kvmesh.cli.status import print_status

    state = read_state()
    if not router and state is None:
        raise fail("no mesh runs here (kvmesh up starts one); name a router with --router")
    target = router or (state.router if state else "")
    token = token_file or (state.token_file if state and not router else "")
    console = Console()
    # Into a file or a pipe there is no edge of a screen to fold at.
    wide = console if console.is_terminal else Console(width=200)
    secure = secure_of(tls_ca, tls_cert, tls_key, tls_server_name)
    raise typer.Exit(asyncio.run(print_status(target, token, wide, secure)))


@app.command()
def key(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key stands for.")],
) -> None:
    """Make an API key: the key goes to the client, the printed record into the gateway's credentials file."""
    from kvmesh.rpc.auth import TENANT_PATTERN
    from kvmesh.rpc.credentials import hash_key, new_key

    if not TENANT_PATTERN.fullmatch(tenant):
        raise fail("a tenant is named by 1 to 128 letters, digits, dots, dashes and underscores")
    secret = new_key()
    # Not through a console, which breaks lines at its width: the record must stay TOML.
    typer.echo(f"key (shown once): {secret}")
    typer.echo(f'\n[[keys]]\nsha256 = "{hash_key(secret)}"\ntenant = "{tenant}"')


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
