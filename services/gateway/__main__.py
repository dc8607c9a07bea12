"""`python -m services.gateway`: run the gateway."""

import importlib.util
import sys
from typing import Any

from kvmesh.config import GatewaySettings
from kvmesh.rpc.service import run_service
from services.gateway.app import build


def loop_factory() -> Any:
    """uvloop where it is installed: a stream is mostly small writes."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(run_service(GatewaySettings, build, loop_factory=loop_factory()))
