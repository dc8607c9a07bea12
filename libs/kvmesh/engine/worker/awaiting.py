"""A request on decode that awaits its KV, as the flow that fetches it sees it."""

from __future__ import annotations

from typing import Protocol

from opentelemetry.context import Context

from kvmesh.engine.events import EngineRequest, RequestKey
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.rpc.limits import RequestLimits
from kvmesh.transfer.handles import SlotResult


class AwaitingRequest(Protocol):
    """What the flow reads of the request, and what it notes there for the terminal."""

    key: RequestKey
    engine_request: EngineRequest
    limits: RequestLimits
    targets: list[pb.PrefillTarget]
    cache_salt: str
    tenant: str
    prefill_retries: int
    remote_cached: int

    def trace_context(self) -> Context:
        """Parent for spans of this request's own work."""

    def received(self, target: pb.PrefillTarget, result: SlotResult) -> None:
        """The prompt's KV came from `target`."""

    def prefilled_here(self, cause: str) -> None:
        """The prompt is computed on this worker."""
