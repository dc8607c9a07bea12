"""`python -m services.prefill`: run a prefill worker until SIGTERM."""

from __future__ import annotations

from kvmesh.config import PrefillSettings
from kvmesh.engine.worker.leaving import leave
from kvmesh.rpc.service import run_service
from services.prefill.service import build

if __name__ == "__main__":
    leave(run_service(PrefillSettings, build))
