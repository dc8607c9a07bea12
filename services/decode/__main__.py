"""`python -m services.decode`: run a decode worker until SIGTERM."""

from __future__ import annotations

import sys

from kvmesh.config import DecodeSettings
from kvmesh.rpc.service import run_service
from services.decode.service import build

if __name__ == "__main__":
    sys.exit(run_service(DecodeSettings, build))
