"""How a generation ended, told to the router that decided on it."""

from __future__ import annotations

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from services.gateway.job import Job, Progress
from services.gateway.routers import Routers


def report(
    routers: Routers,
    job: Job,
    progress: Progress,
    usage: pb.Usage,
    served: pb.Served,
    code: int,
    answer: router_pb2.CachedAnswer | None,
    lead: router_pb2.Flight | None,
) -> None:
    """Once, in the background; nothing where no router decided. `code`: google.rpc.Code. `answer`: to be remembered.
    `lead`: the flight that ends with it."""
    if not progress.decision_id or progress.decided_by is None:
        return
    routers.report(
        router_pb2.ReportRequest(
            decision_id=progress.decision_id,
            request_id=job.inner_id,
            code=code,
            usage=usage,
            decode_worker=served.decode_worker,
            prefill_worker=served.prefill_worker,
            answer=answer,
            ttft_ms=served.ttft_ms,
            total_ms=served.total_ms,
            failures=progress.failures,
            flight=lead,
        ),
        job.tenant,
        progress.decided_by,
    )
