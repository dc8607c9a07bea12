"""A process whose GPU fails, or has too little memory: see test_faults.py. Prints a line of JSON and ends by itself."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvmesh.engine.core import EngineConfig, EngineCore
from kvmesh.engine.cuda.runner import CudaRunner
from kvmesh.engine.events import CoreEvent, Ended, EngineRequest, RequestKey, Tokens
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.runner import SamplingParams
from kvmesh.errors import KvmeshError, Unavailable
from tests.gpu.cuda_kit import Driver
from tests.gpu.pages_kit import prompt, random_model

WAIT_S = 30.0
# The first steps work.
AT_LAUNCH = 6
SLEEP_CYCLES = 40_000_000
# Runners to be closed once everything is told: on a device that has failed that is the last thing to go well.
LEFT: list[CudaRunner] = []


def assert_on_device(runner: Any) -> None:
    """Queue a kernel that fails, behind what is queued."""
    with torch.cuda.device(runner.device), torch.cuda.stream(runner.stream):
        # Long enough that whoever launches has left before the device stops.
        torch.cuda._sleep(SLEEP_CYCLES)
        table = torch.zeros(4, device=runner.device)
        table[torch.full((1,), 1 << 20, dtype=torch.int64, device=runner.device)]


def break_at(runner: Any, when: str) -> None:
    """behind: the step's own kernels are through, the next ones are not. before: the step comes behind the failure."""
    launch, count = runner.launch, 0

    def launch_broken(*args: Any) -> Any:
        nonlocal count
        count += 1
        if when == "before" and count == AT_LAUNCH:
            assert_on_device(runner)
        flight = launch(*args)
        if when == "behind" and count == AT_LAUNCH:
            assert_on_device(runner)
        return flight

    runner.launch = launch_broken


def load(folder: Path, **options: Any) -> CudaRunner:
    return CudaRunner.load(random_model(folder), "bf16", "cuda:0", **({"max_batch": 4, "token_budget": 128} | options))


class Heard:
    """What the core tells."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ends: Counter[str] = Counter()
        self.errors: dict[str, KvmeshError | None] = {}
        self.tokens: Counter[str] = Counter()
        self.failed: list[str] = []

    def on_failed(self, error: KvmeshError) -> None:
        with self.changed:
            self.failed.append(error.message)
            self.changed.notify_all()

    def on_events(self, events: list[CoreEvent]) -> None:
        with self.changed:
            for event in events:
                if isinstance(event, Ended):
                    self.ends[event.key.request_id] += 1
                    self.errors[event.key.request_id] = event.error
                elif isinstance(event, Tokens):
                    self.tokens[event.key.request_id] += len(event.token_ids)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(condition, WAIT_S)


def device_fails(folder: Path, when: str) -> dict[str, Any]:
    """Requests run, one waits, and the device fails. when: behind, before, sync (no overlap), idle (nothing runs)."""
    runner = load(folder)
    heard = Heard()
    driver = Driver(runner, 64, 64)
    # 2 places for 3 requests.
    config = EngineConfig(
        max_model_len=1024, max_batch=2, token_budget=128, chunk_size=64, overlap=when != "sync", stall_timeout_s=60.0
    )
    core = EngineCore(runner, driver.layout, config, heard.on_events, on_failed=heard.on_failed)
    if when != "idle":
        break_at(runner, "before" if when == "sync" else when)
    core.start()
    names = ["first"] if when == "idle" else ["a", "b", "waits"]
    for number, name in enumerate(names):
        sampling = SamplingParams(temperature=0.0, max_tokens=4 if when == "idle" else 600, ignore_eos=True)
        core.submit(EngineRequest(RequestKey(name), prompt(70, number), 70, sampling=sampling))
    told: dict[str, Any] = {"all_ended": heard.wait(lambda: len(heard.ends) == len(names))}
    if when == "idle":
        told["first_was_served"] = heard.errors["first"] is None
        assert_on_device(runner)
        time.sleep(0.2)
        core.submit(EngineRequest(RequestKey("late"), prompt(30, 5), 30, sampling=SamplingParams(max_tokens=4)))
        told["all_ended"] = heard.wait(lambda: heard.ends["late"] > 0)
    told["heard"] = heard.wait(lambda: core.failure is not None and bool(heard.failed))
    started = time.monotonic()
    core.stop(WAIT_S)
    told["stop_s"] = time.monotonic() - started
    try:
        core.submit(EngineRequest(RequestKey("after"), prompt(10, 9), 10))
        told["after"] = "taken"
    except Unavailable as error:
        told["after"] = error.message
    LEFT.append(runner)
    ended = {name: error for name, error in heard.errors.items() if name != "first"}
    return told | {
        "ends": dict(heard.ends),
        "device_failed": {name: isinstance(error, DeviceFailed) for name, error in ended.items()},
        "messages": sorted({error.message for error in ended.values() if error is not None}),
        "failure": None if core.failure is None else core.failure.message,
        "failure_is_device": isinstance(core.failure, DeviceFailed),
        "told": heard.failed,
        "tokens": dict(heard.tokens),
    }


def no_more_memory(spare: int = 0) -> None:
    """torch gets no more than it has, and `spare` bytes."""
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved(0) + spare) / total), 0)


def enough_memory() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def told_by(work: Callable[[], Any]) -> str:
    """The error's text, with its kind."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error.message if isinstance(error, KvmeshError) else error}"
    finally:
        enough_memory()
    return "nothing"


def memory_is_short(folder: Path, _: str) -> dict[str, Any]:
    """While weights are loaded, while a runner is bound, while graphs are captured, in a step: then all is well."""
    torch.cuda.init()
    told = {}
    no_more_memory(1 << 20)
    told["weights"] = told_by(lambda: load(folder))
    runner = load(folder)
    torch.cuda.empty_cache()
    no_more_memory(32 << 20)
    told["bind"] = told_by(lambda: Driver(runner, 64, 8))
    del runner
    runner = load(folder)
    capture = runner._graphs.capture

    def short(step: Callable[[int], None], stream: Any) -> None:
        def hungry(bucket: int) -> None:
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
            step(bucket)

        torch.cuda.empty_cache()
        no_more_memory(4 << 20)
        capture(hungry, stream)

    runner._graphs.capture = short  # type: ignore[method-assign]
    told["capture"] = told_by(lambda: Driver(runner, 64, 8))
    del runner
    runner = load(folder)
    driver = Driver(runner, 64, 64)
    table = driver.table(300)
    result = driver.run(driver.slice(1, prompt(100, 1), 0, table))
    told["works"] = str(len(result.slices[0].token_ids))
    hidden = runner._eager_rows

    def greedy(*args: Any) -> Any:
        no_more_memory()
        torch.empty(1 << 33, dtype=torch.uint8, device="cuda:0")
        return hidden(*args)

    runner._eager_rows = greedy  # type: ignore[method-assign]
    told["step"] = told_by(lambda: driver.run(driver.slice(2, prompt(100, 2), 0, driver.table(128))))
    told["later"] = told_by(lambda: driver.run(driver.slice(3, prompt(10, 2), 0, driver.table(64))))
    LEFT.append(runner)
    return dict(told)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["behind", "before", "sync", "idle", "memory"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = memory_is_short if arguments.what == "memory" else device_fails
        told = run(Path(folder), arguments.what)
    print(json.dumps(told), flush=True)
    for runner in LEFT:
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
