"""What a failing GPU, or one that is too small, does to an engine: it tells everybody, once, and its process ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 80.0
WORKERS: dict[str, tuple[str, list[str]]] = {
    "kv_memory_bytes": ("decode", ["--device=cuda:0", f"--kv-memory-bytes={1 << 43}"]),
    "num_pages": ("prefill", ["--device=cuda:0", "--num-pages=50000000"]),
    "no_gpu": ("decode", ["--device=cuda:99"]),
    "dtype": ("decode", ["--device=cuda:0", "--dtype=fp32"]),
}
CHILDREN = ("behind", "before", "sync", "idle", "memory")


def has_smollm2() -> bool:
    """Whether its weights are here: the package may be without."""
    from kvmesh.errors import NotFound
    from kvmesh.loading.source import resolve

    try:
        return resolve("smollm2").path is not None
    except NotFound:
        return False


def has_gpu() -> bool:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "flashinfer")):
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="needs a GPU, triton and flashinfer")]


class Processes:
    """All at once, since each loads torch; with what they write in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        path = os.pathsep.join(filter(None, [str(ROOT / "libs"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            self.running[name] = subprocess.Popen(
                [sys.executable, *command], stdout=out, stderr=err, env=self.env, cwd=ROOT
            )

    def end_of(self, name: str) -> tuple[int, str, str]:
        """Status, stdout, stderr of one that ends by itself."""
        status = self.running[name].wait(WAIT_S)
        return status, (self.folder / f"{name}.out").read_text(), (self.folder / f"{name}.err").read_text()

    def kill(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    from tests.gpu.pages_kit import random_model

    folder = tmp_path_factory.mktemp("faults")
    model = "smollm2" if has_smollm2() else random_model(folder)
    made = Processes(folder)
    try:
        for name in CHILDREN:
            made.start(name, str(ROOT / "tests/gpu/fault_child.py"), name)
        for name, (role, flags) in WORKERS.items():
            made.start(
                name, "-m", f"services.{role}", "--role=unified", f"--model={model}", "--max-batch=4",
                "--token-budget=256", "--max-model-len=1024", *flags,
            )  # fmt: skip
        yield made
    finally:
        made.kill()


def child(processes: Processes, name: str, record_property: Any) -> dict[str, Any]:
    status, out, err = processes.end_of(name)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, err[-4000:]
    record_property("told", lines[-1])
    record_property("status", status)
    # Torch may abort a process that lets go of pinned memory of a device that has failed: it has ended either way.
    assert status in (0, -6), err[-4000:]
    told: dict[str, Any] = json.loads(lines[-1])
    return told


@pytest.mark.parametrize("when", ["behind", "before", "sync", "idle"])
def test_a_cuda_error_ends_every_request_once(processes: Processes, when: str, record_property: Any) -> None:
    told = child(processes, when, record_property)
    names = ["late"] if when == "idle" else ["a", "b", "waits"]
    assert told["all_ended"], told
    assert {name: told["ends"].get(name) for name in names} == dict.fromkeys(names, 1)
    assert set(told["ends"].values()) == {1}
    assert told["device_failed"] == dict.fromkeys(names, True), told
    assert told["failure_is_device"]
    assert len(told["told"]) == 1
    assert told["stop_s"] < 20
    assert "the engine has failed" in told["after"]
    assert all("the device failed" in message for message in told["messages"])
    if when != "idle":
        # It worked before.
        assert told["tokens"].get("a", 0) > 0
        assert told["tokens"].get("waits", 0) == 0
    else:
        assert told["first_was_served"]


def test_where_torch_gets_no_memory_it_says_what_to_lower(processes: Processes, record_property: Any) -> None:
    told = child(processes, "memory", record_property)
    for stage, what in (("weights", "weights"), ("bind", "workspaces"), ("capture", "workspaces and decode graphs")):
        text = told[stage]
        assert text.startswith(f"Unavailable: no device memory for {what}"), text
        assert re.search(r"\d+ MiB of \d+ are free.*lower kv_memory_bytes or gpu_memory_utilization, max_batch", text)
    assert told["works"] == "1"
    assert told["step"].startswith("DeviceFailed: out of device memory in a step: lower token_budget or max_batch")
    assert told["later"] == told["step"]


def refusal(processes: Processes, name: str) -> str:
    """The line that says why a worker cannot run."""
    status, out, err = processes.end_of(name)
    log = out + err
    assert status not in (0, -9), log[-4000:]
    assert "Traceback" not in log, log[-4000:]
    (line,) = [line for line in log.splitlines() if "cannot run" in line]
    return line


@pytest.mark.parametrize("field", ["kv_memory_bytes", "num_pages"])
def test_a_worker_without_memory_says_what_to_lower(processes: Processes, field: str, record_property: Any) -> None:
    line = refusal(processes, field)
    record_property("line", line)
    assert re.search(r"\d+\.\d\d GiB were asked for \d+ pages", line), line
    assert re.search(r"\d+\.\d\d GiB of \d+\.\d\d GiB are free, weights take \d+\.\d\d GiB", line), line
    assert "lower num_pages, kv_memory_bytes or gpu_memory_utilization" in line


def test_a_gpu_that_is_not_there_is_named(processes: Processes) -> None:
    assert re.search(r"device=cuda:99: only \d+ GPU\(s\) are visible", refusal(processes, "no_gpu"))


def test_a_dtype_that_is_not_served_is_named(processes: Processes) -> None:
    line = refusal(processes, "dtype")
    assert re.search(r"dtype \W*fp32\W* is not served on CUDA, only bf16", line), line
