"""Prefill: computes prompts and writes their KV into the pages that decode names, layer by layer.

Everything is in `kvmesh.engine.worker`, which decode shares; the role in the settings decides what is served.
"""

from __future__ import annotations

from kvmesh.config import PrefillSettings
from kvmesh.engine.worker.host import worker_or_host
from kvmesh.rpc.service import Service, ServiceContext


async def build(context: ServiceContext[PrefillSettings]) -> Service:
    """The prefill worker (role `prefill`, or `unified`), or a host of its ranks."""
    return worker_or_host(context)
