"""What must be so before torch is loaded into an engine process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from kvmesh.config import WorkerSettings
from kvmesh.engine.worker.loading import compute_threads
from kvmesh.engine.worker.memory import size_layout
from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.loading.config import ModelConfig
from kvmesh.loading.sharding import check_parallel

# SmolLM2's heads.
CONFIG = ModelConfig("llama", 49152, 576, 9 * 64, 30, 9, 3, 64, 8192, 1e-5)

# Says what the environment holds at the moment of torch's import; nothing may have imported it before.
_SCRIPT = """
import importlib.abc, os, sys
import kvmesh.engine.worker.bootstrap
from kvmesh.config import WorkerSettings
from kvmesh.engine.worker import loading

assert "torch" not in sys.modules

class Spy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy", os.environ.get("OMP_WAIT_POLICY"))
            raise ImportError("seen enough")

sys.meta_path.insert(0, Spy())
try:
    loading._load_torch(WorkerSettings(role="decode", runner="torch", model="smollm2"))
except ImportError:
    pass
"""


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_openmp_threads_do_not_spin_unless_asked_to(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["policy", expected], done.stderr


@pytest.mark.parametrize(
    ("threads", "environment", "tp", "each"),
    [(8, "3", 2, 4), (0, "6", 3, 2), (0, "2", 4, 1), (1, None, 1, 1)],
)
def test_threads_are_divided_among_ranks(
    monkeypatch: pytest.MonkeyPatch, threads: int, environment: str | None, tp: int, each: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert compute_threads(WorkerSettings(runner="torch", threads=threads, tp=tp)) == each


def test_kv_memory_is_that_of_all_ranks_together() -> None:
    class Layouts:
        def __init__(self, tp: int) -> None:
            self.tp = tp

        def layout(self, page_size: int, num_pages: int) -> KvLayout:
            return KvLayout(1, "bf16", page_size, (KvGroup("full", "full", (0, 1), 2, 64),), num_pages, self.tp)

    settings = WorkerSettings(kv_memory_bytes=1 << 20)
    for tp, copies in ((1, 1), (2, 1), (4, 2)):
        layout = size_layout(Layouts(tp), settings)  # type: ignore[arg-type]
        total = tp * layout.region_bytes("full")
        page = total // layout.num_pages
        assert total <= 1 << 20 < total + page
        # Each head is held twice by 4 ranks.
        assert page == copies * 2 * (2 * 2 * 64 * 16) * 2


def test_a_scripted_worker_has_one_rank() -> None:
    with pytest.raises(ValueError, match="scripted runner has one rank"):
        WorkerSettings(runner="scripted", tp=2)


@pytest.mark.parametrize("tp", [1, 3, 9])
def test_what_goes_is_not_refused(tp: int) -> None:
    check_parallel(CONFIG, tp)


@pytest.mark.parametrize(
    ("tp", "config", "why"),
    [
        (2, {}, "neither divides the 3 kv heads nor is a multiple of them; set tp to one of 1, 3, 9$"),
        (6, {}, "does not divide the 9 heads"),
        (9, {"intermediate_size": 1536}, "does not divide the 1536 intermediate columns; set tp to one of 1, 3$"),
    ],
)
def test_what_does_not_go_is_refused_with_what_does(tp: int, config: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        check_parallel(dataclasses.replace(CONFIG, **config), tp)
