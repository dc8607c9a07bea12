"""What a survey says of each worker of the model, for people."""

from __future__ import annotations

from kvmesh.proto.v1 import engine_pb2, router_admin_pb2
from services.router.fleet import ROLES
from services.router.placement.pairs import can_prefill, decodes
from services.router.placement.pool import state_name
from services.router.placement.survey import Rated, Survey

MOST = (1 << 64) - 1
"""What a field can hold: a worker may report anything."""


def explain(survey: Survey) -> list[router_admin_pb2.ExplainedWorker]:
    """A row for every worker of the model: decode workers first, the best of each role first, then those left out.

    A unified worker is ranked as what it is asked for here: to generate.
    """
    rows = []
    for at in range(len(survey.pool.infos)):
        info = survey.pool.infos[at]
        rated = survey.decoders if decodes(info) else survey.prefillers
        row = router_admin_pb2.ExplainedWorker(
            worker_id=info.worker_id,
            role=ROLES[info.role],
            state=state_name(info),
            breaker=survey.breakers.get(info.worker_id, "closed"),
            matched_tokens=int(survey.matched[at]),
            load_tokens=min(round(survey.load[at]), MOST),
            credit_tokens=round(survey.credit[at]),
        )
        place = _place(rated, at)
        if place is not None:
            row.relative_load, row.score = float(rated.relative[place]), float(rated.scores[place])
        row.excluded = _excluded(survey, at, info, rated=place is not None)
        rows.append((row, place, rated))
    for rated in (survey.decoders, survey.prefillers):
        ranked = 0
        by_place = {place: row for row, place, own in rows if own is rated and place is not None and not row.excluded}
        for place in rated.order.tolist():
            if place in by_place:
                ranked += 1
                by_place[place].rank = ranked
    found = [row for row, _, _ in rows]
    return sorted(found, key=lambda row: (row.role == "prefill", row.rank == 0, row.rank, row.worker_id))


def _place(rated: Rated, at: int) -> int | None:
    """Index of a position in the arrays of its phase."""
    found = (rated.at == at).nonzero()[0]
    return int(found[0]) if len(found) else None


def _excluded(survey: Survey, at: int, info: engine_pb2.WorkerInfo, *, rated: bool) -> str:
    """Why the worker is no candidate; "" for one that is."""
    pool, ask = survey.pool, survey.ask
    family = pool.families[pool.family[at]]
    if not pool.serving[at]:
        return state_name(info)
    if info.worker_id in ask.exclude:
        return "failed this request"
    if ask.revision and family.revision != ask.revision:
        return f"output that is there is of revision {ask.revision}"
    if (ask.tokenizer and family.tokenizer != ask.tokenizer) or (ask.family is not None and family != ask.family):
        return "another revision or tokenizer"
    if at in survey.broken:
        return "breaker"
    if not decodes(info) and not can_prefill(info):
        return "no sidecar"
    if ask.unified_only and not pool.unified[at] and decodes(info):
        return "not of role unified"
    if ask.grammar and not pool.grammars[at] and decodes(info):
        return "serves no grammars"
    best = survey.pairs[0].decode if survey.pairs else None
    if best is not None and family != best.family:
        return "another revision or tokenizer than the best worker's"
    if best is not None and not decodes(info):
        why: str = pool.mismatch[int(pool.kind[at])][int(pool.kind[pool.position[best.worker_id]])]
        if why:
            return why
    if not rated and best is not None:
        return "context too short"
    return ""
