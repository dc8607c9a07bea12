"""What decisions went by, kept for a while: the answer to "why there, why not from the cache".

A trace is filled while a request is decided and costs no more than the references it holds. Texts of remembered
questions are another user's words: they are shown only where the operator has said so.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvmesh.errors import NotFound
from kvmesh.proto.v1 import router_admin_pb2
from services.router.cache.policy import CachePlan, Mode
from services.router.near.nearcache import Candidate

MAX_TRACES = 1024
MAX_TEXT_CHARS = 200

Rows = Callable[[], Sequence[router_admin_pb2.ExplainedWorker]]


@dataclass(slots=True)
class Trace:
    """One decision. `parts` is milliseconds by name; `rows` makes the table of workers when somebody asks."""

    request_id: str
    client_id: str
    tenant: str
    name: str
    decided_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    total_ms: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    decision: str = ""
    model: str = ""
    revision: str = ""
    outcome: str = ""
    plan: CachePlan | None = None
    candidates: tuple[Candidate, ...] = ()
    chosen: router_admin_pb2.ExplainedClass | None = None
    rows: Rows | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the decision."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + (time.perf_counter() - began) * 1e3

    def done(self, decision: str, model: str, revision: str) -> None:
        """The decision is made."""
        self.total_ms = (time.perf_counter() - self.started) * 1e3
        self.decision, self.model, self.revision = decision, model, revision

    def inherit(self, old: Trace) -> None:
        """After a wait, or a worker's loss, workers alone are asked for: what the cache did was decided before."""
        again = self.plan is None or self.plan.mode == Mode.OFF
        if again and old.plan is not None and old.plan.mode > Mode.OFF:
            self.plan, self.outcome, self.candidates = old.plan, old.outcome, old.candidates
        if self.chosen is None:
            self.chosen = old.chosen


class Traces:
    """The last `limit` traces, by the mesh's request id and by the client's own."""

    def __init__(self, limit: int = MAX_TRACES) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Trace] = OrderedDict()
        self._by_client: dict[str, Trace] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, trace: Trace) -> None:
        """Keep a trace; of a request that is decided again, the newest, with what the cache did at first."""
        old = self._by_id.pop(trace.request_id, None)
        if old is not None and old.tenant == trace.tenant:
            trace.inherit(old)
        self._drop(old)
        while len(self._by_id) >= self._limit:
            self._drop(self._by_id.popitem(last=False)[1])
        self._by_id[trace.request_id] = trace
        if trace.client_id:
            self._by_client[trace.client_id] = trace

    def _drop(self, trace: Trace | None) -> None:
        # Two tenants may have used one client id: the entry may be another's by now.
        if trace is not None and self._by_client.get(trace.client_id) is trace:
            del self._by_client[trace.client_id]

    def get(self, request_id: str) -> Trace:
        """The trace of a request. Raises NotFound."""
        trace = self._by_id.get(request_id) or self._by_client.get(request_id)
        if trace is None:
            raise NotFound(f"this router has decided no request {request_id[:128]!r} lately")
        return trace


def to_proto(trace: Trace, router_id: str, *, texts: bool) -> router_admin_pb2.ExplainResponse:
    """For people; with `texts` the remembered questions are shown, cut."""
    response = router_admin_pb2.ExplainResponse(
        router_id=router_id,
        request_id=trace.request_id,
        tenant=trace.tenant,
        decided_at=trace.decided_at,
        decision=trace.decision,
        model=trace.model,
        revision=trace.revision,
        total_ms=trace.total_ms,
        parts_ms=trace.parts,
        workers=trace.rows() if trace.rows is not None else (),
    )
    if trace.chosen is not None:
        getattr(response, "class").CopyFrom(trace.chosen)
    if trace.plan is not None:
        response.cache.CopyFrom(_cache(trace, trace.plan, texts=texts))
    return response


def _cache(trace: Trace, plan: CachePlan, *, texts: bool) -> router_admin_pb2.ExplainedCache:
    return router_admin_pb2.ExplainedCache(
        mode=plan.mode.name.lower(),
        mode_reason=plan.reason,
        outcome=trace.outcome,
        exact_key=plan.key.exact.hex(),
        partition=plan.key.partition.hex(),
        tau=plan.tau,
        candidates=[
            router_admin_pb2.ExplainedCandidate(
                similarity=item.similarity,
                text=item.text[:MAX_TEXT_CHARS] if texts else "",
                guard=item.guard,
                verifier=item.verifier if item.verifier is not None else math.nan,
                served=item.served,
                purge_id=item.purge_id,
            )
            for item in trace.candidates
        ],
    )
