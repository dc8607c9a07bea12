"""KV pages from a prefill process on one GPU to a decode process on another, two real sidecars between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
from transfer_kit import SidecarProcess  # noqa: E402

FLAGS = ("--transports=nvlink,shm,tcp", "--heartbeat-s=0.2", "--lease-s=5")
SRC, DST = [9, 1, 2, 3, 77, 130, 131, 255], [4, 200, 100, 101, 102, 8, 6, 7]


def gpus() -> int:
    try:
        import torch
        import triton  # noqa: F401

        return int(torch.cuda.device_count())
    except ImportError:
        return 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 2, reason="needs two GPUs, torch with CUDA and triton")]


class Remote:
    """An engine in a process of its own."""

    def __init__(self, name: str, device: int, sidecar: SidecarProcess) -> None:
        self.name = name
        self.device = device
        self.sidecar = sidecar

    async def start(self) -> Remote:
        path = f"{ROOT / 'libs'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "tests/gpu/cuda_child.py"),
            f"--socket={self.sidecar.socket}",
            f"--device={self.device}",
            f"--name={self.name}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        await self._hear()
        return self

    async def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert line, f"{self.name} has ended"
        return json.loads(line)

    async def ask(self, do: str, **what: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        return (await self._hear())["result"]

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Remote, Remote]]:
    processes = [SidecarProcess(name, folder, *FLAGS) for name in ("src", "dst")]
    remotes: list[Remote] = []
    try:
        await asyncio.gather(*(process.start() for process in processes))
        remotes = [Remote("prefill", 0, processes[0]), Remote("decode", 1, processes[1])]
        await asyncio.gather(*(remote.start() for remote in remotes))
        yield remotes[0], remotes[1]
    finally:
        for remote in remotes:
            await remote.stop()
        for process in processes:
            process.stop()


async def begin(prefill: Remote, decode: Remote, ready: int = 0) -> None:
    descriptor = await decode.ask("open", pages=DST)
    assert await prefill.ask("start", descriptor=descriptor, pages=SRC, ready=ready) == "nvlink"


async def test_pages_layer_by_layer(tmp_path: Path) -> None:
    async with scene(tmp_path) as (prefill, decode):
        empty = await decode.ask("digests", pages=DST[2:])
        for round_ in range(3):
            await prefill.ask("fill", seed=round_)
            await begin(prefill, decode, ready=2)
            await prefill.ask("step", first=2, count=6, layers=5)
            await prefill.ask("settle")
            want = await prefill.ask("digests", pages=SRC[2:])
            got = await decode.ask("digests", pages=DST[2:])
            assert got[:5] == want[:5]
            if round_ == 0:
                assert got[5:] == empty[5:]
            assert not set(got[5:]) & set(want[5:])
            await prefill.ask("layers", first=5, count=3)
            nbytes, transport, _ = await decode.ask("completed")
            assert (nbytes, transport) == (8 * 8 * 256 * 1024, "nvlink")
            assert await prefill.ask("sent") == nbytes
            assert await decode.ask("digests", pages=DST) == await prefill.ask("digests", pages=SRC)
        (link,) = (await decode.sidecar.status()).links
        assert link.reason == "same host (boot id), cuda memory at both ends"
        transports = {t.name: t.reason for t in (await decode.sidecar.status()).transports if not t.usable}
        assert transports == {"shm": "does not reach cuda memory", "tcp": "does not reach cuda memory"}


async def test_abort_with_a_launch_in_flight(tmp_path: Path) -> None:
    async with scene(tmp_path) as (prefill, decode):
        await prefill.ask("fill", seed=1)
        await begin(prefill, decode)
        # Two layers wait on the GPU behind a compute stream that is busy.
        started = time.monotonic()
        await prefill.ask("step", first=0, count=8, layers=2, hold_ms=3000)
        # Posting waits for nothing, and nothing is drained while they wait.
        assert time.monotonic() - started < 2
        await decode.ask("close_slot")
        assert not await decode.ask("drained", limit_s=0.5) or time.monotonic() - started > 2.5
        assert await decode.ask("drained", limit_s=30)
        assert "not wanted" in await prefill.ask("sent")
        want, got = await prefill.ask("digests", pages=SRC), await decode.ask("digests", pages=DST)
        assert got[:2] == want[:2]
        await begin(prefill, decode, ready=8)
        await decode.ask("completed")
        assert await decode.ask("digests", pages=DST) == want


async def test_random_ends_leave_no_foreign_byte(tmp_path: Path) -> None:
    """Pages that came back stay as their owner left them, though the stream was behind when they were given up."""
    draw = random.Random(5)
    async with scene(tmp_path) as (prefill, decode):
        await prefill.ask("fill", seed=3)
        owned: dict[tuple[int, ...], int] = {}
        ends = {"whole": 0, "closed": 0, "cancelled": 0}
        for number in range(24):
            pages = draw.sample([page for page in range(256) if not any(page in key for key in owned)], 8)
            sources = draw.sample(range(256), 8)
            descriptor = await decode.ask("open", pages=pages)
            ready = draw.randrange(8)
            await prefill.ask("start", descriptor=descriptor, pages=sources, ready=ready)
            end = draw.choice(sorted(ends))
            layers = 8 if end == "whole" else draw.randrange(9)
            await prefill.ask("step", first=ready, count=8 - ready, layers=layers, hold_ms=draw.choice([0, 0, 20, 100]))
            if end == "closed":
                await decode.ask("close_slot")
            elif end == "cancelled":
                await prefill.ask("cancel")
            if await decode.ask("outcome"):
                assert await decode.ask("digests", pages=pages) == await prefill.ask("digests", pages=sources)
            else:
                assert end != "whole"
            ends[end] += 1
            await decode.ask("own", pages=pages, value=number + 1)
            owned[tuple(pages)] = number + 1
            await prefill.ask("settle")
            for key, value in owned.items():
                assert await decode.ask("owned", pages=list(key), value=value)
        assert min(ends.values()) > 2


async def test_the_source_is_killed(tmp_path: Path) -> None:
    async with scene(tmp_path) as (prefill, decode):
        await begin(prefill, decode)
        await prefill.ask("step", first=0, count=8, layers=4, hold_ms=1000)
        prefill.process.kill()
        await decode.ask("close_slot")
        assert await decode.ask("drained", limit_s=30)
        assert (await decode.sidecar.status()).counters.slots_failed == 1


async def test_the_destination_goes(tmp_path: Path) -> None:
    async with scene(tmp_path) as (prefill, decode):
        await begin(prefill, decode, ready=1)
        assert await prefill.ask("peers") == 1
        decode.process.kill()
        assert isinstance(await prefill.ask("sent"), str)
        async with asyncio.timeout(30):
            while await prefill.ask("peers"):
                await asyncio.sleep(0.05)
