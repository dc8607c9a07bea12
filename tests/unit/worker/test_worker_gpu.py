"""A worker on a GPU as far as that goes without one: settings, sizes, routes, wiring, what it says when it cannot."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fake_cuda import AheadCudaRunner, FakeCudaRunner, fake_gpu
from kvmesh.config import WorkerSettings
from kvmesh.engine.cuda.doorbell import PAGE_BYTES, HostBell
from kvmesh.engine.cuda.profile import GpuMemory, kv_bytes, pages_that_fit
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import ScriptedModel, scripted_output
from kvmesh.engine.worker import bootstrap, loading, posting
from kvmesh.engine.worker.bootstrap import Worker
from kvmesh.engine.worker.gpudirect import SidecarSays
from kvmesh.engine.worker.loading import check_cuda, cuda_options
from kvmesh.engine.worker.memory import cuda_memory, page_bytes
from kvmesh.engine.worker.posting import Route, choose_route
from kvmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.rpc import BackgroundTasks, MeshAuth, RpcServer, ServiceContext
from worker_fakes import Fabric
from worker_harness import Gateway, prompt, running, settings, until

GIB = 1 << 30
WAIT_S = 90.0
LAYOUT = KvLayout(1, "bf16", 16, (KvGroup("kv", "full", (0, 1), 2, 16),), 8)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (16, 256 << 20, 512, 256, 32)),
        ({"page_size": 8, "kv_memory_bytes": 1 << 20}, (8, 1 << 20, 512, 256, 32)),
        ({"device": "cuda"}, (64, 0, 2048, 2048, 256)),
        ({"device": "cuda", "role": "prefill"}, (64, 0, 4096, 4096, 256)),
        ({"device": "cuda:3", "page_size": 16, "max_batch": 4}, (16, 0, 2048, 2048, 4)),
        ({"device": "cuda", "token_budget": 1000}, (64, 0, 1000, 1000, 256)),
        ({"device": "cuda", "chunk_size": 9000}, (64, 0, 9000, 9000, 256)),
        ({"device": "cuda", "chunk_size": 100, "kv_memory_bytes": GIB}, (64, GIB, 2048, 100, 256)),
        ({"device": "cuda", "token_budget": 128}, (64, 0, 128, 128, 128)),
        ({"device": "cuda", "max_batch": 4000}, (64, 0, 4000, 4000, 4000)),
    ],
)
def test_what_nobody_has_set_depends_on_the_device(given: dict[str, Any], expected: tuple[int, ...]) -> None:
    made = WorkerSettings(**given)
    names = ("page_size", "kv_memory_bytes", "token_budget", "chunk_size", "max_batch")
    assert tuple(getattr(made, name) for name in names) == expected
    assert made.local_prefill_tokens == expected[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_that_no_step_holds_is_refused_at_once(device: str) -> None:
    with pytest.raises(ValueError, match="max_batch must not exceed token_budget"):
        WorkerSettings(device=device, token_budget=16, chunk_size=16, max_batch=17)


def test_the_environment_sets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_WORKER_TOKEN_BUDGET", "512")
    made = WorkerSettings(device="cuda:2")
    assert (made.token_budget, made.chunk_size, made.gpu) == (512, 512, 2)


def test_the_runner_is_told() -> None:
    made = WorkerSettings(device="cuda", max_batch=8, cuda_graphs=False, max_model_len=100)
    assert cuda_options(made) == {
        "max_batch": 8, "token_budget": 2048, "max_model_len": 100, "cuda_graphs": False, "max_graph_batch": 8,
        "kv_dtype": "auto",
    }  # fmt: skip
    assert cuda_options(WorkerSettings(device="cuda", kv_dtype="fp8_e4m3"))["kv_dtype"] == "fp8_e4m3"


# -- what is missing


def _torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, count: int) -> None:
    torch = types.SimpleNamespace(
        __version__="2.11.0+cpu",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("absent", "cuda", "count", "gpu", "says"),
    [
        (("triton", "flashinfer"), "13.0", 1, 0, "needs triton, flashinfer-python: install"),
        ((), None, 0, 0, "a PyTorch built for CUDA, this is 2.11.0\\+cpu"),
        ((), "13.0", 0, 0, "none is visible here"),
        ((), "13.0", 2, 2, "cuda:2: only 2 GPU"),
        ((), "13.0", 2, 1, ""),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...], cuda: str | None, count: int, gpu: int, says: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    _torch(monkeypatch, cuda, count)
    if not says:
        check_cuda(gpu)
        return
    with pytest.raises(FailedPrecondition, match=says):
        check_cuda(gpu)


def test_nothing_of_cuda_is_loaded_by_a_worker_on_cpu() -> None:
    script = (
        "import sys, kvmesh.engine.worker.bootstrap, kvmesh.engine.cuda.staging; "
        "print([name for name in ('torch', 'triton', 'flashinfer') if name in sys.modules], "
        "'kvmesh.engine.cuda.runner' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["[]", "False"], done.stderr


@pytest.mark.parametrize(
    ("tp", "module", "name"), [(1, "cuda.runner", "CudaRunner"), (2, "parallel.ahead", "AheadRunner")]
)
async def test_a_runner_is_loaded_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tp: int, module: str, name: str) -> None:
    asked: list[Any] = []

    class Loads:
        @classmethod
        def load(cls, *args: Any, **options: Any) -> FakeCudaRunner:
            asked.append((args, options))
            return FakeCudaRunner()

    monkeypatch.setattr(loading, "check_cuda", asked.append)
    monkeypatch.setattr(loading, "start_ranks", lambda spec, size, threads, hosts=None: f"{size} ranks")
    monkeypatch.setitem(sys.modules, f"kvmesh.engine.{module}", types.SimpleNamespace(**{name: Loads}))
    made = WorkerSettings(device="cuda:3", tp=tp, model="m")
    assert (await loading.load_runner(made)).info.name == "scripted"
    assert asked[0] == 2 + tp
    args, options = asked[1]
    if tp == 1:
        assert (args[:3], options) == (("m", "bf16", "cuda:3"), cuda_options(made))
    else:
        assert args == ("2 ranks", "m", "bf16")
        assert (options["first_gpu"], options["options"]) == (3, cuda_options(made))


# -- sizes


def test_pages_take_what_is_left() -> None:
    memory = GpuMemory(free=100 * GIB, total=140 * GIB, weights=16 * GIB, workspaces=6 * GIB)
    assert kv_bytes(memory, 0.9) == 80 * GIB
    assert pages_that_fit(memory, 0.9, 3 * GIB) == 26
    with pytest.raises(Unavailable, match=r"5.00 GiB of 140.00 GiB are free, weights take 16.00 GiB.*gpu_memory_util"):
        pages_that_fit(GpuMemory(5 * GIB, 140 * GIB, 16 * GIB, 6 * GIB), 0.9, 1 << 20)


def test_memory_on_the_gpu_is_sized_registered_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeCudaRunner()
    driver = fake_gpu(monkeypatch, runner)
    memory = cuda_memory(runner, WorkerSettings(device="cuda", page_size=16), staging=False)
    page = page_bytes(memory.layout)
    assert memory.layout.num_pages == (round((64 << 20) * 0.9) - (1 << 20)) // page
    assert isinstance(memory.doorbell, HostBell)
    assert list(driver.registered.values()) == [PAGE_BYTES]
    assert memory.shared_regions["kv"].memory == "cuda"
    assert memory.shared_layout == memory.layout
    memory.close()
    memory.close()
    assert (driver.used, driver.registered, driver.maps) == (0, {}, {})


def test_too_many_pages_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeCudaRunner()
    driver = fake_gpu(monkeypatch, runner)
    with pytest.raises(Unavailable, match=r"were asked for 100000 pages, .* are free, weights take .*; lower"):
        cuda_memory(runner, WorkerSettings(device="cuda", num_pages=100_000), staging=False)
    assert driver.used == 0


def test_staging_is_bounded_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeCudaRunner(ScriptedModel(max_model_len=640))
    fake_gpu(monkeypatch, runner)
    for given, expected in ((0, 40), (7, 7)):
        made = WorkerSettings(device="cuda", num_pages=50, staging_pages=given)
        memory = cuda_memory(runner, made, staging=True)
        assert memory.staged is not None
        assert memory.shared_layout.num_pages == expected
        assert memory.shared_layout.fingerprint() == memory.layout.fingerprint()
        assert memory.shared_regions["kv"].memory == "host"
        memory.close()


def test_the_host_rings_through_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeCudaRunner()
    fake_gpu(monkeypatch, runner)
    memory = cuda_memory(runner, WorkerSettings(device="cuda", num_pages=4), staging=False)
    bell = memory.doorbell
    assert isinstance(bell, HostBell)
    stored = bell.ring
    assert stored() == 1  # nobody else rings yet
    counted: list[int] = []

    def ringer(count: int) -> None:
        counted.append(count)
        bell._cell[0] += count

    bell.ringer = ringer
    assert bell.ring() == 2
    assert counted == [1]
    memory.close()


# -- routes


@pytest.mark.parametrize(
    ("given", "transports", "expected"),
    [
        ({}, [], Route.SIDECAR),
        ({"nvlink": "host"}, [], Route.NVLINK),
        ({"staging": "on"}, [], Route.STAGING),
        ({"device": "cuda"}, ["nvlink", "shm"], Route.NVLINK),
        ({"device": "cuda"}, ["shm", "tcp"], Route.STAGING),
        ({"device": "cuda"}, [], Route.STAGING),
        ({"device": "cuda", "nvlink": "off"}, ["nvlink"], Route.STAGING),
        ({"device": "cuda", "nvlink": "cuda"}, None, Route.NVLINK),
        ({"device": "cuda", "staging": "on"}, None, Route.STAGING),
        ({"device": "cuda", "staging": "off"}, ["shm"], Route.SIDECAR),
        ({"device": "cuda", "sidecar_socket": None}, None, Route.SIDECAR),
    ],
)
async def test_routes(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], transports: list[str] | None, expected: Route
) -> None:
    async def ask(settings: Any, layout: Any, shown: Any = None) -> SidecarSays:
        assert transports is not None, "the sidecar need not be asked"
        return SidecarSays(transports)

    monkeypatch.setattr(posting, "ask_sidecar", ask)
    made = WorkerSettings(**({"sidecar_socket": Path("/nowhere")} | given))
    assert await choose_route(made, LAYOUT) is expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "cuda", "nvlink": "host"}, "nvlink=host is for memory of the host"),
        ({"nvlink": "cuda"}, "needs device=cuda"),
        ({"nvlink": "host", "staging": "on"}, "does not go with staging=on"),
        ({"nvlink": "host", "tp": 2}, "tp must be 1"),
        ({"staging": "on", "tp": 2}, "several ranks"),
        ({"device": "cuda", "tp": 2}, "several ranks"),
    ],
)
async def test_settings_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    """Nobody waits for a model to load before it is said."""
    socket = Path("/nowhere")
    with pytest.raises(InvalidArgument, match=says):
        await choose_route(WorkerSettings(sidecar_socket=socket, **given), LAYOUT)

    async def load_runner(settings: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(bootstrap, "load_runner", load_runner)
    with pytest.raises(InvalidArgument, match=says):
        async with running(sidecar_socket=socket, runner="torch", **given):
            pass


async def test_the_scripted_runner_has_no_gpu() -> None:
    with pytest.raises(InvalidArgument, match="the scripted runner has no GPU"):
        await loading.load_runner(WorkerSettings(runner="scripted", device="cuda"))


async def test_without_a_sidecar_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(posting, "SIDECAR_S", 0.3)
    made = WorkerSettings(device="cuda", sidecar_socket=tmp_path / "nobody.sock")
    assert await posting.ask_sidecar(made, LAYOUT) == SidecarSays()


# -- whole workers


@pytest.mark.parametrize("kind", [FakeCudaRunner, AheadCudaRunner])
async def test_workers_on_gpus_exchange_kv_through_staging(
    monkeypatch: pytest.MonkeyPatch, kind: type[FakeCudaRunner]
) -> None:
    """Two fake GPUs: pages, copies, bell and sidecar's view are those of a real one. Chunks of several prompts share
    steps; with a step launched ahead, the next one's record is out before the last one has landed."""
    source, target = kind(), FakeCudaRunner()
    common: dict[str, Any] = {"device": "cuda", "page_size": 16, "staging_pages": 60, "max_batch": 8, "staging": "on"}
    fabric = Fabric()
    driver = fake_gpu(monkeypatch, source)
    async with running(fabric=fabric, role="prefill", instance="p", chunk_size=40, **common) as prefill:
        fake_gpu(monkeypatch, target)
        async with running(fabric=fabric, role="decode", instance="d", **common) as decode, Gateway(decode) as gateway:
            assert source.bound is None
            prompts = [prompt(300, 1), prompt(500, 2), prompt(33, 4), prompt(300, 1)[:200] + prompt(50, 3)]
            answers = [await gateway.submit(gateway.request(p, prefill=[prefill.target()])) for p in prompts]
            for tokens, answer in zip(prompts, answers, strict=True):
                await answer.wait()
                want = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
                assert answer.tokens[0] == scripted_output(tokens, want)[0]
                assert answer.finished.transfer_bytes > 0
            assert source.foreign == target.foreign == 0
            if isinstance(source, AheadCudaRunner):
                assert source.most == 2
            for worker in (prefill, decode):
                staging = worker.worker.ctx.staging  # type: ignore[union-attr]
                assert staging is not None
                await until(lambda s=staging: s.pool.free_count == s.pool.total, lambda s=staging: str(s.pool.counts()))
                await worker.pages_are_back()
    assert driver.registered == {}


async def test_without_a_sidecar_the_runner_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeCudaRunner()
    driver = fake_gpu(monkeypatch, runner)
    async with running(role="unified", device="cuda", num_pages=0) as worker, Gateway(worker) as gateway:
        assert isinstance(runner.bound, HostBell)
        assert runner.bound.device_pointer in driver.registered
        assert (await gateway.ask(prompt(100))).finished
        assert runner.bound.value > 0


# -- stopping


@asynccontextmanager
async def loaded(**values: Any) -> AsyncIterator[Worker]:
    """A worker whose start and end are the test's."""
    conf = settings(**values)
    auth = MeshAuth.from_settings(conf)
    server = RpcServer(conf, auth=auth)
    async with BackgroundTasks() as tasks:
        await server.start()
        try:
            yield Worker(ServiceContext(conf, server, auth, tasks))
        finally:
            await server.close()


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_start_broken_off_while_the_runner_is_bound(monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    """Graphs are captured there, for a minute: nobody takes weights and memory away from under that."""
    runner = FakeCudaRunner()
    driver = fake_gpu(monkeypatch, runner)
    begun, go, seen = threading.Event(), threading.Event(), []

    def bind(*_: Any) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        seen.append(("bound", driver.used > 0))

    monkeypatch.setattr(runner, "bind_cuda", bind)
    monkeypatch.setattr(runner, "close", lambda: seen.append(("closed", driver.used > 0)))
    monkeypatch.setattr(bootstrap, "STOP_S", WAIT_S if in_time else 0.05)
    async with loaded(device="cuda") as worker:
        start = asyncio.ensure_future(worker.started())
        await until(begun.is_set, "never bound")
        start.cancel()
        await asyncio.wait({start})
        closing = asyncio.ensure_future(worker.close())
        if not in_time:
            await closing
            assert not seen
            assert driver.used > 0
        go.set()
        await closing
        await until(lambda: bool(seen), "never ended")
    if in_time:
        assert seen == [("bound", True), ("closed", True)]
        assert (driver.used, driver.registered) == (0, {})


async def test_a_runner_that_does_not_close_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeCudaRunner()
    driver = fake_gpu(monkeypatch, runner)

    def close() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner, "close", close)
    async with loaded(device="cuda") as worker:
        await worker.started()
        await worker.close()
    assert driver.used > 0
