"""`services.decode` or `services.prefill` with a clock: `traced_worker.py decode|prefill FILE FLAGS…`.

Each named step of a request goes into FILE as "step request_id seconds" (CLOCK_MONOTONIC, one for all processes of the
machine). Per request, not per token: the worker is the one of production.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libs"))

from kvmesh.config import DecodeSettings, PrefillSettings
from kvmesh.engine.events import RequestKey
from kvmesh.engine.worker.bootstrap import Worker
from kvmesh.engine.worker.leaving import leave
from kvmesh.engine.worker.steps import RequestStep
from kvmesh.rpc.service import ServiceContext, run_service

if __name__ == "__main__":
    service, path = sys.argv[1:3]
    del sys.argv[1:3]
    file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    async def at_step(step: RequestStep, key: RequestKey) -> None:
        file.write(f"{step.value} {key.request_id} {time.monotonic():.6f}\n")

    async def build(context: ServiceContext[Any]) -> Worker:
        return Worker(context, at_step=at_step)

    if service == "prefill":
        leave(run_service(PrefillSettings, build))
    leave(run_service(DecodeSettings, build))
