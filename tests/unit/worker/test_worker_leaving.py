"""An engine's process ends with its own status, whatever a GPU's libraries do at an orderly end."""

from __future__ import annotations

import importlib
import runpy
import signal
import subprocess
import sys

import pytest

from kvmesh.engine.worker import leaving
from kvmesh.rpc import service

PROGRAM = """
import atexit, os, sys, types
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: {in_use})
sys.modules["torch"] = torch
atexit.register(os.abort)
from kvmesh.engine.worker.leaving import leave
print("told")
leave({status})
"""


@pytest.mark.parametrize(
    ("in_use", "status", "seen"), [(True, 1, 1), (True, 0, 0), (False, 1, -signal.SIGABRT)], ids=["1", "0", "no-gpu"]
)
def test_a_process_with_a_gpu_ends_at_once(in_use: bool, status: int, seen: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(in_use=in_use, status=status)],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))}, stdout=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == seen
    if in_use:
        # What was said before is not lost with it.
        assert ended.stdout == b"told\n"


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_programs_of_engines_end_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    importlib.import_module(f"services.{name}.service")
    monkeypatch.setattr(service, "run_service", lambda settings, build: 7)
    monkeypatch.setattr(leaving, "leave", seen.append)
    runpy.run_module(f"services.{name}", run_name="__main__")
    assert seen == [7]
