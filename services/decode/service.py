"""Decode: takes requests from gateways, receives or computes the prompt's KV, generates tokens into frames.

Everything is in `kvmesh.engine.worker`, which prefill shares; the role in the settings decides what is served.
"""

from __future__ import annotations

from kvmesh.config import DecodeSettings
from kvmesh.engine.worker.bootstrap import Worker
from kvmesh.rpc.service import ServiceContext


async def build(context: ServiceContext[DecodeSettings]) -> Worker:
    """The decode worker (role `decode`, or `unified`)."""
    return Worker(context)
