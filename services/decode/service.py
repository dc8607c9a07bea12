"""Decode: takes requests from gateways, receives or computes the prompt's KV, generates tokens into frames.

Everything is in `kvmesh.engine.worker`, which prefill shares; the role in the settings decides what is served.
"""

from __future__ import annotations

from kvmesh.config import DecodeSettings
from kvmesh.engine.worker.host import worker_or_host
from kvmesh.rpc.service import Service, ServiceContext


async def build(context: ServiceContext[DecodeSettings]) -> Service:
    """The decode worker (role `decode`, or `unified`), or a host of its ranks."""
    return worker_or_host(context)
