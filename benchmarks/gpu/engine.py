"""The engine core on a runner, driven as a worker drives it, with everything that it says stamped with the time."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu.workload import Stamps, quantile, row_of, trace_of, window
from kvmesh.engine.core import EngineConfig, EngineCore
from kvmesh.engine.events import CoreEvent, Ended, EngineRequest, RequestKey, Tokens
from kvmesh.engine.runner import SamplingParams
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell

PAGE_SIZE = 64
CORE_OPTIONS = {"max_queue": 4096, "prefix_cache": False, "stall_timeout_s": 60.0}


@dataclass
class Told:
    """One batch of events: when, the core thread's CPU time so far, how many steps' (start, end) the runner had."""

    at: float
    cpu: float
    marks: int
    events: list[CoreEvent]


@dataclass
class Trace:
    """Of each request, by its number: when it was submitted, and (when, tokens) of what came."""

    submitted: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, Stamps] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)

    def stamps(self) -> list[Stamps]:
        return [self.tokens[number] for number in sorted(self.tokens)]

    def row(self, engine: Engine, prompt: int) -> dict[str, float]:
        """`row_of`, with what the host and the device did in the window where all decode."""
        stamps = self.stamps()
        steps = [told for told in self.told if any(isinstance(event, Tokens) for event in told.events)]
        row = row_of(self.submitted[0], stamps, [told.at for told in steps], prompt)
        low, high = window(stamps)
        inside = [told for told in steps if low <= told.at <= high]
        if len(inside) > 1:
            row["host_cpu_ms"] = round((inside[-1].cpu - inside[0].cpu) * 1e3 / (len(inside) - 1), 4)
            row |= engine.idle(inside[0].marks, inside[-1].marks)
        return row

    def arrivals(self) -> dict[str, object]:
        """`trace_of`."""
        return trace_of([self.submitted[number] for number in sorted(self.submitted)], self.stamps())


class Engine:
    """A loaded model with pages for what is to be measured."""

    def __init__(self, spec: str, device: str, *, max_batch: int, token_budget: int, max_model_len: int, tokens: int,
                 graphs: bool = True, overlap: bool = True) -> None:  # fmt: skip
        """tokens: that the KV pages hold together."""
        self.device = torch.device(device)
        started = time.perf_counter()
        pages = -(-tokens // PAGE_SIZE) + 2 * max_batch
        if self.device.type == "cuda":
            self._on_gpu(spec, max_batch, token_budget, max_model_len, pages, graphs)
        else:
            self._on_cpu(spec, pages)
        # As a service does once it has started.
        gc.collect()
        gc.freeze()
        self.load_s = time.perf_counter() - started
        self.config = EngineConfig(
            max_model_len=max_model_len, max_batch=max_batch, token_budget=token_budget, chunk_size=token_budget,
            overlap=overlap, **CORE_OPTIONS,
        )  # fmt: skip
        self._ids = itertools.count()

    def _on_gpu(
        self, spec: str, max_batch: int, token_budget: int, max_model_len: int, pages: int, graphs: bool
    ) -> None:  # fmt: skip
        from kvmesh.engine.cuda.doorbell import PAGE_BYTES, HostBell
        from kvmesh.engine.cuda.memory import gpu_memory, kv_regions

        runner = self.load_runner(
            spec,
            {
                "max_batch": max_batch, "token_budget": token_budget, "max_model_len": max_model_len,
                "cuda_graphs": graphs,
            },
        )  # fmt: skip
        self.runner: Any = runner
        index = self.device.index or 0
        self.layout = runner.layout(PAGE_SIZE, pages)
        memory = gpu_memory(index, runner.info.weight_bytes, runner.workspace_bytes())
        self.regions: dict[str, Any] = dict(kv_regions(self.layout, index, memory))
        # As in a worker: the graphs ring a doorbell that a sidecar would watch.
        self._bell_region = Region.create("doorbell", PAGE_BYTES)
        self.bell = HostBell(self._bell_region, index)
        runner.bind_cuda(self.layout, self.regions, self.bell)

    def load_runner(self, spec: str, options: dict[str, Any]) -> Any:
        """The runner of a GPU engine. options: of `CudaRunner.load`."""
        from kvmesh.engine.cuda.runner import CudaRunner

        return CudaRunner.load(spec, "bf16", self.device, **options)

    def _on_cpu(self, spec: str, pages: int) -> None:
        from kvmesh.engine.torch_runner import TorchRunner

        self.runner = TorchRunner.load(spec, "bf16", backend="torch")
        self.layout = self.runner.layout(PAGE_SIZE, pages)
        self.regions = {g.name: Region.create(g.name, self.layout.region_bytes(g)) for g in self.layout.groups}
        self.bell = Doorbell(bytearray(DOORBELL_BYTES))
        self.runner.bind(self.layout, {name: region.buf for name, region in self.regions.items()}, self.bell)

    def serve(self, prompts: Sequence[list[int]], out: int, arrivals: Sequence[float] | None = None) -> Trace:
        """Run them all, from a core of its own: at once, or each at its time in seconds. Greedy, `out` tokens each.

        Raises what ended a request, RuntimeError where one got another number of tokens.
        """
        trace = Trace()
        told, marks = trace.told, getattr(self.runner, "events", [])
        left = len(prompts)
        over = threading.Event()

        def on_events(events: list[CoreEvent]) -> None:
            nonlocal left
            told.append(Told(time.perf_counter(), time.thread_time(), len(marks), events))
            for event in events:
                if isinstance(event, Ended):
                    left -= 1
                    if left == 0 or event.error is not None:
                        over.set()

        sampling = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        marks.clear()
        core = EngineCore(self.runner, self.layout, self.config, on_events, doorbell=self.bell)
        keys = [RequestKey(f"r{next(self._ids)}") for _ in prompts]
        numbers = {key: number for number, key in enumerate(keys)}

        def submit(number: int) -> None:
            trace.submitted[number] = time.perf_counter()
            prompt = prompts[number]
            core.submit(EngineRequest(keys[number], prompt, len(prompt), sampling))

        if arrivals is None:
            # Before the thread runs, so that the first step sees them all.
            for number in range(len(prompts)):
                submit(number)
        begun = time.perf_counter()
        core.start()
        for number, at in enumerate(arrivals or []):
            time.sleep(max(0.0, begun + at - time.perf_counter()))
            submit(number)
        if arrivals is None:
            trace.submitted = dict.fromkeys(trace.submitted, begun)
        if not over.wait(900):
            raise RuntimeError("the requests do not end")
        core.stop(30)
        for batch in told:
            for event in batch.events:
                if isinstance(event, Ended) and event.error is not None:
                    raise event.error
                if isinstance(event, Tokens) and event.token_ids:
                    trace.tokens.setdefault(numbers[event.key], []).append((batch.at, len(event.token_ids)))
        for number in range(len(prompts)):
            got = sum(count for _, count in trace.tokens.get(number, []))
            if got != out:
                raise RuntimeError(f"request {number} got {got} tokens of {out}")
        return trace

    def idle(self, low: int, high: int) -> dict[str, float]:
        """What the device did between the runner's steps number low and high: one step's time from its first kernel to
        its last, and the gap to the next step's first. Empty where the runner has no such marks."""
        marks = getattr(self.runner, "events", [])[low:high]
        if len(marks) < 2:
            return {}
        torch.cuda.synchronize(self.device)
        busy = [begin.elapsed_time(end) for begin, end in marks]
        gaps = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(marks)]
        return {
            "device_step_ms": round(statistics.median(busy), 4),
            "device_gap_us": round(statistics.median(gaps) * 1e3, 2),
            "device_gap_p99_us": round(quantile(gaps, 0.99) * 1e3, 2),
            "device_idle_percent": round(100 * sum(gaps) / (sum(gaps) + sum(busy[:-1])), 3),
        }

    def close(self) -> None:
        self.runner.close()
        self.bell.close()
        for region in self.regions.values():
            region.close()


def vocab_of(config: Path) -> int:
    return int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
