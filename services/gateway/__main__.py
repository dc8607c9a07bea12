"""`python -m services.gateway`: run the gateway, in one process or in several behind one port."""

import asyncio
import functools
import gc
import importlib.util
import sys
from typing import Any

from kvmesh.config import GatewaySettings, load_settings
from kvmesh.rpc.server import ServerOptions
from kvmesh.rpc.service import run_service
from kvmesh.telemetry import setup_logs
from services.gateway.processes.child import Child
from services.gateway.processes.parent import Parent, child_settings


def loop_factory() -> Any:
    """uvloop where it is installed: a stream is mostly small writes."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def main() -> int:
    """The exit status."""
    settings = load_settings(GatewaySettings)
    child = Child.from_environment()
    if child is None and settings.processes > 1:
        setup_logs(settings.service, instance=settings.instance_name, level=settings.log_level, fmt=settings.log_format)
        return asyncio.run(_parent(settings))
    # The parent has no need of all that. Nothing that imports make goes away again: they take less time without the
    # collector.
    gc.disable()
    from services.gateway.app import build

    gc.enable()
    return run_service(
        GatewaySettings,
        functools.partial(build, child=child),
        loop_factory=loop_factory(),
        settings=settings if child is None else child_settings(settings, child),
        options=ServerOptions(shared_port=child is not None, leaves_first=True),
    )


async def _parent(settings: GatewaySettings) -> int:
    return await Parent(settings, sys.argv[1:]).run()


if __name__ == "__main__":
    sys.exit(main())
