"""`python -m services.prefill`: run a prefill worker until SIGTERM."""

from __future__ import annotations

import sys

from kvmesh.config import PrefillSettings
from kvmesh.rpc.service import run_service
from services.prefill.service import build

if __name__ == "__main__":
    sys.exit(run_service(PrefillSettings, build))
