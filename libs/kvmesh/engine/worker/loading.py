"""From settings to a runner: the real model in a thread with its progress told, or the scripted one."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.config import WorkerSettings
from kvmesh.engine.parallel.ranks import start_ranks
from kvmesh.engine.runner import Runner
from kvmesh.engine.worker.joining import hosts_of
from kvmesh.errors import FailedPrecondition, InvalidArgument
from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)
T = TypeVar("T")

LOG_EVERY_S = 1.0


def compute_threads(settings: WorkerSettings) -> int:
    """Threads of a step on each rank of this host: an equal part, but at least one, of the setting, else of what the
    environment gives OpenMP, else of the CPUs this process may use."""
    environment = os.environ.get("OMP_NUM_THREADS", "")
    total = settings.threads or (int(environment) if environment.isdigit() else 0) or len(os.sched_getaffinity(0))
    return max(1, total // settings.ranks_per_host)


async def load_runner(settings: WorkerSettings) -> Runner:
    """Load what `settings.runner` says. KvmeshError as the loaders raise it."""
    check_kv_dtype(settings)
    if settings.runner == "scripted":
        if settings.on_gpu:
            raise InvalidArgument("the scripted runner has no GPU: leave device out", details={"field": "device"})
        from kvmesh.engine.worker.scripted import scripted_runner

        return scripted_runner(settings)
    return await in_thread(lambda: (_load_cuda if settings.on_gpu else _load_torch)(settings), name="model-load")


def check_kv_dtype(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for pages of a type that the engine does not have."""
    if not settings.on_gpu and settings.kv_dtype not in ("auto", settings.dtype):
        raise InvalidArgument(
            f"kv_dtype {settings.kv_dtype} is not served on CPU, where pages are of dtype ({settings.dtype}): leave it "
            "out, or set device to cuda",
            details={"field": "kv_dtype"},
        )


def _load_cuda(settings: WorkerSettings) -> Runner:
    check_cuda(settings.gpu + settings.ranks_per_host - 1)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    log.info("loading %s (%s) on %d GPU(s) from %d on", settings.model, settings.dtype, settings.tp, settings.gpu)
    progress = LoadProgress(settings.model)
    started = time.monotonic()
    runner: Runner
    if settings.tp > 1:
        ranks = start_ranks(settings.model, settings.tp, compute_threads(settings), hosts=hosts_of(settings))
        from kvmesh.engine.parallel.ahead import AheadRunner

        runner = AheadRunner.load(
            ranks, settings.model, settings.dtype, first_gpu=settings.gpu, options=cuda_options(settings),
            timeout_s=settings.tp_timeout_s, progress=progress, logs=rank_logs(settings),
        )  # fmt: skip
    else:
        from kvmesh.engine.cuda.runner import CudaRunner

        runner = CudaRunner.load(
            settings.model, settings.dtype, f"cuda:{settings.gpu}", progress, **cuda_options(settings)
        )
    progress.finished()
    log.info("loaded %s in %.1f s", runner.info.name, time.monotonic() - started)
    return runner


def rank_logs(settings: WorkerSettings) -> dict[str, str]:
    """How the other ranks log."""
    return {
        "service": settings.service, "level": settings.log_level, "fmt": settings.log_format,
        "instance": settings.instance_name,
    }  # fmt: skip


def cuda_options(settings: WorkerSettings) -> dict[str, Any]:
    """What a runner on a GPU is told beside the model."""
    return {
        "max_batch": settings.max_batch,
        "token_budget": settings.token_budget,
        "max_model_len": settings.max_model_len,
        "cuda_graphs": settings.cuda_graphs,
        "max_graph_batch": settings.cuda_graph_max_batch or settings.max_batch,
        "kv_dtype": settings.kv_dtype,
    }


def check_cuda(gpu: int) -> None:
    """Raises FailedPrecondition telling what is missing for an engine on that GPU."""
    missing = [name for name in ("torch", "triton", "flashinfer") if importlib.util.find_spec(name) is None]
    if missing:
        packages = ", ".join({"flashinfer": "flashinfer-python"}.get(name, name) for name in missing)
        raise FailedPrecondition(f"device=cuda needs {packages}: install them", details={"field": "device"})
    import torch

    if torch.version.cuda is None:
        raise FailedPrecondition(
            f"device=cuda needs a PyTorch built for CUDA, this is {torch.__version__}: install one from PyTorch's "
            "index of CUDA wheels",
            details={"field": "device"},
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise FailedPrecondition(
            "device=cuda needs a GPU and its driver, none is visible here (CUDA_VISIBLE_DEVICES?)",
            details={"field": "device"},
        )
    if gpu >= count:
        raise FailedPrecondition(f"device=cuda:{gpu}: only {count} GPU(s) are visible", details={"field": "device"})


def _load_torch(settings: WorkerSettings) -> Runner:
    # OpenMP threads that wait between two regions spin by default, for milliseconds: on cores that prefill, decode and
    # the rest of the mesh share, they then burn the time slices of the very thread they wait for, and throughput
    # collapses. Read by the runtime when torch loads it, so it must be set before; whoever has cores to spare may set
    # OMP_WAIT_POLICY=active.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    threads = compute_threads(settings)
    log.info("loading %s (%s, %d rank(s) of %d threads)", settings.model, settings.dtype, settings.tp, threads)
    progress = LoadProgress(settings.model)
    started = time.monotonic()
    # Torch is imported here: a scripted worker has none, and the import alone takes a second.
    runner: Runner
    if settings.tp > 1:
        ranks = start_ranks(settings.model, settings.tp, threads, hosts=hosts_of(settings))
        from kvmesh.engine.parallel.runner import ParallelRunner

        runner = ParallelRunner.load(
            ranks, settings.model, settings.dtype, threads=threads, timeout_s=settings.tp_timeout_s,
            progress=progress, logs=rank_logs(settings),
        )  # fmt: skip
    else:
        from kvmesh.engine.torch_runner import TorchRunner

        runner = TorchRunner.load(settings.model, dtype=settings.dtype, threads=threads, progress=progress)
    progress.finished()
    log.info("loaded %s in %.1f s", runner.info.name, time.monotonic() - started)
    return runner


class LoadProgress:
    """progress(done, total) in stored bytes: a gauge, and a log line now and then."""

    def __init__(self, model: str) -> None:
        # A path would be a poor label.
        self._gauge = metrics.gauge(names.MODEL_LOAD_PROGRESS).labels(Path(model).name)
        self._next = 0.0

    def finished(self) -> None:
        """It is loaded: a checkpoint may hold more than a model reads, and would look stuck short of its end."""
        self._gauge.set(1.0)

    def __call__(self, done: int, total: int) -> None:
        self._gauge.set(done / total if total else 1.0)
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + LOG_EVERY_S
            log.info("loading: %.0f %% (%.0f of %.0f MB)", 100 * done / max(1, total), done / 1e6, total / 1e6)


async def in_thread(work: Callable[[], T], *, name: str) -> T:
    """Run blocking work in a daemon thread: unlike an executor's, it does not hold the process's end up."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as exc:
            error = exc
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            log.debug("%s ended after the loop was closed", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
