"""`python -m services.decode`: run a decode worker until SIGTERM."""

from __future__ import annotations

import gc


def main() -> int:
    """The exit status."""
    # Nothing that imports make goes away again: without the collector they take an eighth less time.
    gc.disable()
    from kvmesh.config import DecodeSettings
    from kvmesh.rpc.service import run_service
    from services.decode.service import build

    gc.enable()
    return run_service(DecodeSettings, build)


if __name__ == "__main__":
    from kvmesh.engine.worker.leaving import end_with

    end_with(main)
