"""Telemetry of a mesh that runs: what Prometheus scrapes, what its rules say, what dashboards would show."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The kits of the integration tests start the same mesh.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
