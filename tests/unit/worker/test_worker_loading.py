"""What must be so before torch is loaded into an engine process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
