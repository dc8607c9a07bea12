"""The doorbell of captured decode steps, as a thread of the host sees it: every layer, in order, while they run."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell


def has_gpu() -> bool:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "flashinfer")):
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="needs a GPU, triton and flashinfer")]

# A layer takes about a millisecond: a thread of Python sees each.
CYCLES = 2_000_000
TRIES = 5


class Watcher(threading.Thread):
    """Polls a doorbell until it stands at `last`: (value, when) of each that it sees."""

    def __init__(self, bell: Doorbell, last: int) -> None:
        super().__init__(daemon=True)
        self.bell, self.last = bell, last
        self.seen: list[tuple[int, float]] = []
        self.until = time.monotonic() + 30

    def run(self) -> None:
        bell, seen, before = self.bell, self.seen, self.bell.value
        while before < self.last and time.monotonic() < self.until:
            value = bell.value
            if value != before:
                seen.append((value, time.perf_counter()))
                before = value
            # Whoever launches wants the interpreter too.
            time.sleep(0.00005)


def test_a_decode_graph_rings_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replays at a time are queued, one of them on the token of the other."""
    import torch

    from kvmesh.engine.cuda.attention import DecodeAttention
    from kvmesh.engine.cuda.doorbell import PAGE_BYTES, HostBell
    from kvmesh.engine.cuda.runner import CudaRunner
    from kvmesh.engine.runner import PENDING
    from tests.gpu.cuda_kit import Driver
    from tests.gpu.pages_kit import prompt, random_model

    attend = DecodeAttention.run

    def slow(self: Any, *args: Any, **more: Any) -> None:
        attend(self, *args, **more)
        torch.cuda._sleep(CYCLES)

    # Into the graphs too: they are captured with it.
    monkeypatch.setattr(DecodeAttention, "run", slow)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    region = Region.create("bell", PAGE_BYTES)
    seen = Doorbell(region.buf)  # as the sidecar maps it
    bell = HostBell(region, 0)
    runner = CudaRunner.load(random_model(tmp_path), "bf16", "cuda:0", max_batch=2, token_budget=128)
    driver = Driver(runner, 64, 32, bell)
    layers = runner.info.num_layers
    assert seen.value == 0, "warming up and capturing are no steps"
    ids, table = prompt(70, 1), driver.table(256)
    driver.run(driver.slice(1, ids, 0, table))
    assert seen.value == layers
    whole = ahead = 0
    position, token = len(ids), 5
    for _ in range(TRIES):
        base = seen.value
        watcher = Watcher(seen, base + 2 * layers)
        watcher.start()
        assert runner._graphs.bucket(1) == 1
        first = runner.launch(driver.batch(driver.slice(1, [token], position, table)))
        second = runner.launch(driver.batch(driver.slice(1, [PENDING], position + 1, table)))
        # Two steps of six milliseconds are queued, and the host is here already.
        ahead += not second.done.query()
        runner.collect(first)
        at_first = seen.value
        (result,) = runner.collect(second).slices
        assert base + layers <= at_first <= base + 2 * layers
        assert seen.value == base + 2 * layers
        watcher.join(30)
        values = [value for value, _ in watcher.seen]
        assert values == sorted(set(values)), "the bell never goes back"
        assert values[-1] == base + 2 * layers
        assert values[0] > base
        if values == list(range(base + 1, base + 2 * layers + 1)):
            whole += 1
            # Spread over both steps, not told at their ends.
            spread = watcher.seen[-1][1] - watcher.seen[0][1]
            assert spread > (2 * layers - 1) * 0.25e-3
        position, token = position + 2, result.token_ids[0]
    assert whole, "a value was missed each time"
    assert ahead
    sys.setswitchinterval(interval)
    runner.close()
    seen.close()
    bell.close()
    region.close()
