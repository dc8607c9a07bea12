"""`python -m services.decode`: run a decode worker until SIGTERM."""

from __future__ import annotations

import gc
import logging


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
    try:
        status = main()
    except Exception:
        logging.getLogger("services.decode").critical("the decode worker failed", exc_info=True)
        status = 1
    from kvmesh.engine.worker.leaving import leave

    leave(status)
