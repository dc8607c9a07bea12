"""The tools are fetched where `make test-chart` has not done so; where they cannot run there is nothing to test."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

if sys.platform == "linux" and platform.machine() == "x86_64":
    from chart_tools import ensure

    ensure(Path(os.environ.get("KVMESH_CHART_TOOLS") or ROOT / ".venv/chart-tools").resolve())
else:
    collect_ignore_glob = ["test_*.py"]
