"""Pages of a prefill engine on one GPU land in another's memory: byte by byte, layer by layer, while a step runs.

Over nvlink (two GPUs), and over shm through pinned host memory (one will do) behind the doorbell.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
from kvmesh.config import WorkerSettings  # noqa: E402
from kvmesh.engine.worker.posting import Route  # noqa: E402
from kvmesh.kv.ring import Doorbell, StepRecord  # noqa: E402
from tests.gpu.pages_kit import POISON, Pair, pair, prompt, random_model, settle, until  # noqa: E402
from transfer_kit import SidecarProcess  # noqa: E402

LAYERS = 6
# About a millisecond of an SM's clock.
CYCLES = 2_000_000


def gpus() -> int:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "flashinfer")):
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.version.cuda is not None else 0


TWO = pytest.mark.skipif(gpus() < 2, reason="needs two GPUs, torch with CUDA, triton and flashinfer")
ONE = pytest.mark.skipif(gpus() < 1, reason="needs a GPU, torch with CUDA, triton and flashinfer")
pytestmark = pytest.mark.gpu


def settings(device: str, **more: Any) -> WorkerSettings:
    sizes = {
        "page_size": 64, "num_pages": 128, "max_batch": 8, "token_budget": 320, "chunk_size": 128, "staging_pages": 96,
        "max_model_len": 2048, "cuda_graphs": False,
    }  # fmt: skip
    return WorkerSettings(device=device, **(sizes | more))


def load(folder: Path, made: WorkerSettings) -> Any:
    from kvmesh.engine.cuda.runner import CudaRunner
    from kvmesh.engine.worker.loading import cuda_options

    return CudaRunner.load(random_model(folder), "bf16", made.device, **cuda_options(made))


@contextlib.asynccontextmanager
async def scene(
    folder: Path, runner: Any, source: WorkerSettings, target: WorkerSettings, route: Route
) -> AsyncIterator[Pair]:
    transports = "nvlink,shm,tcp" if route is Route.NVLINK else "shm,tcp"
    flags = (f"--transports={transports}", "--heartbeat-s=1", "--lease-s=20")
    processes = [SidecarProcess(name, folder, *flags) for name in ("src", "dst")]
    try:
        await asyncio.gather(*(process.start() for process in processes))
        async with pair(runner, source, target, route, [process.socket for process in processes]) as made:
            yield made
    finally:
        for process in processes:
            process.stop()


async def several_at_once(made: Pair, transport: str) -> None:
    """Prompts of several chunks, of less than a page, that share beginnings: `send` compares every byte."""
    long, other = prompt(700, 1), prompt(333, 2)
    firsts = await asyncio.gather(
        made.send("long", long), made.send("other", other), made.send("short", prompt(40, 3)),
        made.send("page", prompt(64, 4)),
    )  # fmt: skip
    # Their beginnings are in the cache, and leave at once beside what steps compute.
    seconds = await asyncio.gather(
        made.send("fork", long[:512] + prompt(150, 5)), made.send("again", other + prompt(20, 6)),
        made.send("same", long), made.send("new", prompt(257, 7)),
    )  # fmt: skip
    assert not made.watched.errors, made.watched.errors
    assert {sent.transport for sent in (*firsts, *seconds)} == {transport}
    assert [sent.hits for sent in firsts] == [0, 0, 0, 0]
    assert [sent.hits for sent in seconds[:3]] == [8, 5, 10]
    assert seconds[3].hits == 0
    assert firsts[0].chunks >= 6
    assert made.core.counters.ring_records > 6
    assert made.watched.layers == LAYERS * made.core.counters.ring_records


def arrive_one_by_one(made: Pair) -> list[int]:
    """Behind each layer, with the rest of the step not even queued: that layer has landed, the next ones have not.
    Returns where the numbers of the layers that were looked at go."""
    seen: list[int] = []

    def look(record: StepRecord, number: int) -> None:
        settle(made.source.backend)
        for here, there, _ in made.entries(record):
            want, got = made.source.pages(here), made.target.pages(there)
            assert (got[: number + 1] == want[: number + 1]).all(), f"layer {number} of {record}"
            assert (got[number + 1 :] == POISON).all(), f"behind layer {number} of {record}"
        seen.append(number)

    made.watched.behind = look
    return seen


async def nvlink_bytes(made: Pair) -> None:
    await several_at_once(made, "nvlink")


async def nvlink_layers(made: Pair) -> None:
    seen = arrive_one_by_one(made)
    sent = await asyncio.gather(made.send("a", prompt(300, 1)), made.send("b", prompt(130, 2)))
    assert not made.watched.errors, made.watched.errors
    assert {one.transport for one in sent} == {"nvlink"}
    assert seen == list(range(LAYERS)) * made.core.counters.ring_records


async def shm_bytes(made: Pair) -> None:
    await several_at_once(made, "shm")


async def shm_layers(made: Pair) -> None:
    """The doorbell stands at exactly the layer that was queued last, and that layer is in the host's memory; all but
    the last have crossed to the other engine's host memory before the last is queued."""
    bell = Doorbell(made.source.memory.doorbell_region.buf)
    values: list[int] = []

    def rung(record: StepRecord, number: int) -> None:
        value = record.first_value + number
        until(lambda: bell.value >= value, f"the bell stands at {bell.value}, not {value}")
        assert bell.value == value
        values.append(value)
        for entry, (here, _, going) in zip(record.entries, made.entries(record), strict=True):
            between = going.lease.pages[entry.first_page : entry.first_page + entry.num_pages]
            want, got = made.source.pages(here)[number], made.source.staged(between)[number]
            assert (got == want).all(), f"layer {number} of {record}"

    def crossed(record: StepRecord, number: int) -> None:
        if number + 1 < LAYERS:
            return
        for entry, (here, _, going) in zip(record.entries, made.entries(record), strict=True):
            landing = going.landing.pages[entry.first_page : entry.first_page + entry.num_pages]
            want = made.source.pages(here)[:number]
            until(lambda at=landing, want=want: bool((made.target.staged(at)[:number] == want).all()), f"{record}")
            assert (made.target.staged(landing)[number] == POISON).all()

    made.watched.behind, made.watched.before = rung, crossed
    sent = await asyncio.gather(made.send("a", prompt(300, 1)), made.send("b", prompt(130, 2)))
    assert not made.watched.errors, made.watched.errors
    assert {one.transport for one in sent} == {"shm"}
    assert values == sorted(set(values))
    assert len(values) == LAYERS * made.core.counters.ring_records
    bell.close()


@TWO
async def test_pages_arrive_over_nvlink_byte_by_byte(tmp_path: Path) -> None:
    source, target = settings("cuda:0"), settings("cuda:1")
    async with scene(tmp_path, load(tmp_path, source), source, target, Route.NVLINK) as made:
        await nvlink_bytes(made)


@TWO
async def test_layers_arrive_over_nvlink_before_the_next_is_queued(tmp_path: Path) -> None:
    source, target = settings("cuda:0"), settings("cuda:1")
    async with scene(tmp_path, load(tmp_path, source), source, target, Route.NVLINK) as made:
        await nvlink_layers(made)


@TWO
async def test_copies_run_beside_the_step(tmp_path: Path) -> None:
    """By the GPU's own stamps, nothing held up by the host: a layer is across before the next one's KV is there."""
    import torch

    source, target = settings("cuda:0"), settings("cuda:1")
    stamps: list[dict[str, list[Any]]] = []

    def stamp(stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    async with scene(tmp_path, load(tmp_path, source), source, target, Route.NVLINK) as made:

        def ready(_: StepRecord, number: int) -> None:
            if number == 0:
                stamps.append({"ready": [], "across": []})
            stamps[-1]["ready"].append(stamp(torch.cuda.current_stream(0)))

        def across(_: StepRecord, number: int) -> None:
            stamps[-1]["across"].append(stamp(made.source.backend.stream))
            # The next layer takes its time, as a large model's does.
            torch.cuda._sleep(2 * CYCLES)

        made.watched.before, made.watched.behind = ready, across
        await made.send("a", prompt(500, 1))
        assert not made.watched.errors, made.watched.errors
        torch.cuda.synchronize(0)
    assert len(stamps) >= 4
    for step in stamps:
        assert len(step["ready"]) == len(step["across"]) == LAYERS
        for number in range(LAYERS):
            assert step["ready"][number].elapsed_time(step["across"][number]) > 0
        ahead = [step["across"][n].elapsed_time(step["ready"][n + 1]) for n in range(LAYERS - 1)]
        assert min(ahead) > 0, ahead


@ONE
async def test_pages_arrive_over_shm_through_pinned_memory(tmp_path: Path) -> None:
    source, target = settings("cuda:0"), settings(f"cuda:{min(1, gpus() - 1)}")
    async with scene(tmp_path, load(tmp_path, source), source, target, Route.STAGING) as made:
        await shm_bytes(made)


@ONE
async def test_layers_cross_over_shm_behind_the_doorbell(tmp_path: Path) -> None:
    source, target = settings("cuda:0"), settings(f"cuda:{min(1, gpus() - 1)}")
    async with scene(tmp_path, load(tmp_path, source), source, target, Route.STAGING) as made:
        await shm_layers(made)
