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


CLOSED = """
import os, sys, types
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
sys.modules["torch"] = torch
from kvmesh.engine.worker.leaving import leave
for stream in (sys.stdout, sys.stderr):
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, stream.fileno())
sys.stdout.write("to nobody")
sys.stderr.close()
leave(3)
"""


def test_who_has_nobody_to_tell_ends_so_too() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CLOSED],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))}, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 3


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_programs_of_engines_that_fail_end_so_too(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    importlib.import_module(f"services.{name}.service")

    def fails(settings: object, build: object) -> int:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(service, "run_service", fails)
    monkeypatch.setattr(leaving, "leave", seen.append)
    runpy.run_module(f"services.{name}", run_name="__main__")
    assert seen == [1]
    assert "the device is gone" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_programs_of_engines_end_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    importlib.import_module(f"services.{name}.service")
    monkeypatch.setattr(service, "run_service", lambda settings, build: 7)
    monkeypatch.setattr(leaving, "leave", seen.append)
    runpy.run_module(f"services.{name}", run_name="__main__")
    assert seen == [7]
