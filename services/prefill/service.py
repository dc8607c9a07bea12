"""Prefill: computes prompts and writes their KV into the pages that decode names, layer by layer.

Everything is in `kvmesh.engine.worker`, which decode shares; the role in the settings decides what is served.
"""

from __future__ import annotations

from kvmesh.config import PrefillSettings
from kvmesh.engine.worker.bootstrap import Worker
from kvmesh.rpc.service import ServiceContext


async def build(context: ServiceContext[PrefillSettings]) -> Worker:
    """The prefill worker (role `prefill`, or `unified`)."""
    return Worker(context)
