"""The life of a service process, the same for all five: settings, logs, traces, metrics, server, ready file, end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from kvmesh import __version__
from kvmesh.config import ServiceSettings, load_settings
from kvmesh.errors import KvmeshError
from kvmesh.rpc.auth import MeshAuth
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.server import RpcServer, ServerOptions
from kvmesh.rpc.tasks import BackgroundTasks, cancel_and_wait
from kvmesh.telemetry import genai, metrics, names, setup_logs, tracing

log = logging.getLogger(__name__)
S = TypeVar("S", bound=ServiceSettings)


class Service(Protocol):
    """What a service builds around its servicers. `build` has registered them when it returns."""

    async def started(self) -> None:
        """The server is bound (`context.server.address`); start loops, register, set readiness when fit."""

    async def drain(self, deadline: Deadline) -> None:
        """Finish or hand over work and end long-lived streams, by the deadline."""

    async def close(self) -> None:
        """Release everything; called once, whatever happened before."""


@dataclass(slots=True)
class ServiceContext(Generic[S]):
    """What a service is given. `ready_info` is merged into the ready file that is written after `started`."""

    settings: S
    server: RpcServer
    auth: MeshAuth
    tasks: BackgroundTasks
    metrics_address: str = ""
    ready_info: dict[str, Any] = field(default_factory=dict)
    ready_written: bool = False
    on_up: Callable[[], None] | None = None
    """Called once everything has started and the ready file, if any, is written."""


Build = Callable[[ServiceContext[S]], Awaitable[Service]]


def write_ready_file(path: Path, info: dict[str, Any]) -> None:
    """Write JSON atomically: a reader sees nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(info) + "\n", encoding="utf-8")
    os.replace(temporary, path)


async def _start(context: ServiceContext[S], build: Build[S], started: list[Service]) -> None:
    settings = context.settings
    service = await build(context)
    started.append(service)
    address = await context.server.start()
    await service.started()
    # What is here now lives as long as the process. The collector need not walk all of it again and again: on a worker
    # that costs a tenth of a second, in which no step is launched.
    gc.collect()
    gc.freeze()
    if settings.ready_file is not None:
        info = {
            "service": settings.service,
            "instance": settings.instance_name,
            "pid": os.getpid(),
            "address": address,
            "metrics": context.metrics_address,
            "version": __version__,
        }
        if context.server.client_address:
            info["client_address"] = context.server.client_address
        write_ready_file(settings.ready_file, info | context.ready_info)
        context.ready_written = True
        log.info("up; addresses are in %s", settings.ready_file)
    if context.on_up is not None:
        context.on_up()


async def serve(settings: S, build: Build[S], options: ServerOptions | None = None) -> int:
    """Run a service until it is told to stop; returns its exit status (0 after an ordinary stop, else 1).

    The ready file holds {"service", "instance", "pid", "address", "metrics", "version", …ready_info}, and
    "client_address" where there is a door of its own for clients with certificates; it is removed at the end.
    """
    exporter = None
    started: list[Service] = []
    failure: BaseException | None = None
    try:
        exporter = metrics.start_http(settings.metrics_listen)
        metrics.gauge(names.BUILD_INFO).labels(settings.service, settings.instance_name, __version__).set(1)
        auth = MeshAuth.from_settings(settings)
        server = RpcServer(settings, auth=auth, options=options)
        async with BackgroundTasks() as tasks:
            context = ServiceContext(settings, server, auth, tasks, exporter.address if exporter else "")
            # From here on: a signal during a long start (a model loads) must end the process in good order too.
            server.handle_signals()
            start = asyncio.create_task(_start(context, build, started), name="start")
            stop = asyncio.create_task(server.wait_stop(), name="stop")
            try:
                await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
                if start.done():
                    await start
                    failure = await server.serve_until_signal(started[0].drain, tasks=tasks)
                else:
                    log.info("told to stop while starting")
            finally:
                await cancel_and_wait(start, stop)
                await server.close()
                for service in started:
                    await service.close()
                # Only its own: a second process started by mistake must not take away the first one's.
                if settings.ready_file is not None and context.ready_written:
                    settings.ready_file.unlink(missing_ok=True)
        if failure is not None:
            log.error("stopped: a background task failed: %s", failure)
        return 0 if failure is None else 1
    except KvmeshError as exc:
        log.error("cannot run: %s", exc.message)
        return 1
    except (OSError, ValueError) as exc:
        log.error("cannot run: %s", exc)
        return 1
    finally:
        if exporter is not None:
            exporter.close()


def run_service(
    settings_class: type[S],
    build: Build[S],
    argv: Sequence[str] | None = None,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    settings: S | None = None,
    options: ServerOptions | None = None,
) -> int:
    """Entry point of `python -m services.<name>`: `sys.exit(run_service(GatewaySettings, build))`.

    loop_factory: another event loop than asyncio's own. settings: already loaded. options: of the server.
    """
    settings = settings if settings is not None else load_settings(settings_class, argv)
    set_up(settings)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(serve(settings, build, options))
    except KeyboardInterrupt:
        return 130
    finally:
        tracing.shutdown()
        genai.shutdown()


def set_up(settings: ServiceSettings) -> None:
    """Logs, traces and pushed metrics of this process."""
    setup_logs(settings.service, instance=settings.instance_name, level=settings.log_level, fmt=settings.log_format)
    tracing.setup(
        settings.service,
        settings.otlp_endpoint,
        settings.trace_sample_ratio,
        failures_per_s=settings.trace_failures_per_s,
        ca_file=settings.otlp_ca_file,
        instance=settings.instance_name,
    )
    if settings.otlp_metrics:
        genai.setup(settings.service, settings.otlp_endpoint, instance=settings.instance_name)
