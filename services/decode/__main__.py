"""`python -m services.decode`: run a decode worker until SIGTERM."""

from __future__ import annotations

from kvmesh.config import DecodeSettings
from kvmesh.engine.worker.leaving import leave
from kvmesh.rpc.service import run_service
from services.decode.service import build

if __name__ == "__main__":
    leave(run_service(DecodeSettings, build))
