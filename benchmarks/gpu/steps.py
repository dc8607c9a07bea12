"""Single steps of a runner, without the core around it: their time at a given context, and where it goes by kernel.

KV pages hold random numbers, so that no prompt has to be computed first.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu.engine import PAGE_SIZE, Engine
from gpu.workload import quantile
from kvmesh.engine.runner import PENDING, SampleInput, SamplingParams, Slice, StepBatch

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
WARM_UP = 5
Batches = Callable[[int], StepBatch]


class Steps:
    """Steps on an engine whose core does not run. The pages' contents are lost."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runner: Any = engine.runner
        self.pages = engine.layout.num_pages
        for region in engine.regions.values():
            if engine.device.type == "cuda":
                torch.as_tensor(region, device=engine.device).view(torch.bfloat16).normal_()
            else:
                torch.frombuffer(region.buf, dtype=torch.bfloat16).normal_()
        if engine.device.type == "cuda":
            # The runner's stream does not wait for this one.
            torch.cuda.synchronize(engine.device)
        self._number = 0

    def _tables(self, count: int, tokens: int) -> list[np.ndarray]:
        """Block tables over random pages, none in two of them."""
        each = -(-tokens // PAGE_SIZE)
        if count * each > self.pages:
            raise ValueError(f"{count} sequences of {tokens} tokens need {count * each} pages of {self.pages}")
        ids = np.random.default_rng(count).permutation(self.pages)[: count * each].astype(np.int32)
        return list(ids.reshape(count, each))

    def decode(self, count: int, context: int, steps: int) -> Batches:
        """Steps of `count` sequences whose context grows around `context`."""
        begin = max(1, context - steps // 2)
        tables = self._tables(count, begin + steps + WARM_UP + 1)
        ahead = hasattr(self.runner, "launch")

        def batch(step: int) -> StepBatch:
            # A graph's own feedback: the token is the one that the step before samples.
            pending = ahead and step > 0
            token = np.array([PENDING if pending else 7], dtype=np.int32)
            position = begin + step
            sample = SampleInput(GREEDY, 0, position + 1, (), (), pending=pending)
            slices = [Slice(row + 1, token, position, table, (sample,)) for row, table in enumerate(tables)]
            self._number += 1
            return StepBatch(self._number, slices)

        return batch

    def prefill(self, prompt: int, budget: int, vocab: int) -> Batches:
        """Steps of as many whole prompts as the budget holds."""
        count = max(1, budget // prompt)
        tables = self._tables(count, prompt + 1)
        ids = np.random.default_rng(3).integers(1, vocab, (count, min(prompt, budget))).astype(np.int32)
        sample = SampleInput(GREEDY, 0, prompt, (), ())

        def batch(step: int) -> StepBatch:
            self._number += 1
            slices = [Slice(row + 1, ids[row], 0, table, (sample,)) for row, table in enumerate(tables)]
            return StepBatch(self._number, slices)

        return batch

    def run(self, batches: Batches, steps: int, first: int = 0) -> list[float]:
        """Run them one ahead, as the core does; returns when each was collected."""
        times: list[float] = []
        if not hasattr(self.runner, "launch"):
            for step in range(first, first + steps):
                self.runner.execute(batches(step))
                times.append(time.perf_counter())
            return times
        flight = None
        for step in range(first, first + steps):
            following = self.runner.launch(batches(step))
            if flight is not None:
                self.runner.collect(flight)
                times.append(time.perf_counter())
            flight = following
        self.runner.collect(flight)
        times.append(time.perf_counter())
        return times

    def measure(self, batches: Batches, steps: int) -> dict[str, float]:
        """Median time of a step, and what the device's own clock says of it."""
        marks = getattr(self.runner, "events", [])
        marks.clear()
        times = self.run(batches, WARM_UP + steps)
        gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times)][WARM_UP:]
        return {
            "step_ms": round(statistics.median(gaps), 4),
            "step_p99_ms": round(quantile(gaps, 0.99), 4),
            "steps": len(gaps),
            # The last step has none behind it that would have been queued meanwhile.
            **self.engine.idle(WARM_UP, WARM_UP + steps - 1),
        }

    def profile(self, batches: Batches, steps: int) -> list[dict[str, Any]]:
        """Time on the device by kernel, longest first: µs and launches a step."""
        from torch.profiler import ProfilerActivity, profile

        self.run(batches, WARM_UP)
        torch.cuda.synchronize(self.engine.device)
        with profile(activities=[ProfilerActivity.CUDA]) as told:
            self.run(batches, steps, WARM_UP)
            torch.cuda.synchronize(self.engine.device)
        rows: dict[str, list[float]] = {}
        for event in told.events() or []:
            if event.device_type == torch.autograd.DeviceType.CUDA:
                row = rows.setdefault(event.name, [0.0, 0.0])
                row[0] += event.time_range.elapsed_us()
                row[1] += 1
        ordered = sorted(rows.items(), key=lambda item: -item[1][0])
        return [
            {"kernel": name, "us_a_step": round(us / steps, 2), "launches_a_step": round(count / steps, 2)}
            for name, (us, count) in ordered
        ]
