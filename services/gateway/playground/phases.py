"""Where the time of one request went, from the spans that all services made for it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.telemetry import names

CACHE, QUEUE, PREFILL, TRANSFER, DECODE, OTHER = "cache", "queue", "prefill", "transfer", "decode", "other"
PHASES = (CACHE, QUEUE, PREFILL, TRANSFER, DECODE, OTHER)


@dataclass(frozen=True, slots=True)
class Span:
    """What is kept of a span. Times are nanoseconds since the epoch; `attributes` only those of KEPT."""

    name: str
    span_id: bytes
    parent_id: bytes
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str] = field(default_factory=dict)


KEPT = frozenset(
    {
        names.ATTR_REQUEST_ID,
        names.ATTR_TENANT,
        names.ATTR_DECISION,
        names.ATTR_PREFILL_WORKER,
        names.ATTR_TRANSPORT,
        names.GEN_AI_OPERATION_NAME,
        names.GEN_AI_PROVIDER_NAME,
        names.ERROR_TYPE,
    }
)

# Which phase a span is time of, first match first: an instant that several spans cover belongs to the earliest of this
# list. A prompt is sent while it is computed: only what the sending adds to that is transfer. A decode worker that has
# a prompt fetched waits for all of it, and a request is being placed until a worker has taken it: both come last.
_ORDER: tuple[tuple[str, str], ...] = (
    (names.SPAN_CACHE_EXACT, CACHE),
    (names.SPAN_CACHE_SEMANTIC, CACHE),
    (names.SPAN_GATEWAY_REPLAY, CACHE),
    (names.SPAN_ENGINE_COMPUTE, PREFILL),
    (names.SPAN_ENGINE_QUEUE, QUEUE),
    (names.SPAN_TRANSFER_SEND, TRANSFER),
    (names.SPAN_TRANSFER_RECEIVE, TRANSFER),
    (names.SPAN_ENGINE_DECODE, DECODE),
    (names.SPAN_DECODE_REMOTE_PREFILL, TRANSFER),
    (names.SPAN_GATEWAY_FOLLOW, CACHE),
    (names.SPAN_GATEWAY_ADMIT, QUEUE),
    (names.SPAN_GATEWAY_QUEUE, QUEUE),
    (names.SPAN_GATEWAY_ATTEMPT, QUEUE),
    (names.SPAN_GATEWAY_PLACE, QUEUE),
)
_RANK = {name: rank for rank, (name, _) in enumerate(_ORDER)}


def root_of(spans: Iterable[Span]) -> Span | None:
    """The gateway's own span of the request: the one that names tenant and model operation."""
    for span in spans:
        if {names.ATTR_TENANT, names.GEN_AI_OPERATION_NAME} <= span.attributes.keys():
            return span
    return None


def phases(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds by phase, in the order of PHASES; they add up to the length of the root span. {} without a root."""
    root = root_of(spans)
    if root is None:
        return {}
    pieces: list[tuple[int, int, int]] = []
    for span in spans:
        rank = _RANK.get(span.name)
        if rank is not None and span.name == names.SPAN_GATEWAY_PLACE and _answered(span):
            rank = _RANK[names.SPAN_GATEWAY_REPLAY]
        start, end = max(span.start_ns, root.start_ns), min(span.end_ns, root.end_ns)
        if rank is not None and end > start:
            pieces.append((start, end, rank))
    nanoseconds = dict.fromkeys(PHASES, 0)
    edges = sorted({root.start_ns, root.end_ns, *(piece[0] for piece in pieces), *(piece[1] for piece in pieces)})
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for start, end, rank in pieces:
        opening.setdefault(start, []).append(rank)
        closing.setdefault(end, []).append(rank)
    running = [0] * len(_ORDER)
    for edge, following in itertools.pairwise(edges):
        for rank in opening.get(edge, ()):
            running[rank] += 1
        for rank in closing.get(edge, ()):
            running[rank] -= 1
        first = next((rank for rank, count in enumerate(running) if count), None)
        nanoseconds[OTHER if first is None else _ORDER[first][1]] += following - edge
    return {phase: value / 1e6 for phase, value in nanoseconds.items()}


def _answered(place: Span) -> bool:
    """The search for a place ended with an answer that was there already."""
    return place.attributes.get(names.ATTR_DECISION) in ("answer", "follow")


def complete(spans: Sequence[Span]) -> bool:
    """Whether all that matters to `phases` is there: services send their spans each at a time of its own."""
    root = root_of(spans)
    if root is None:
        return False
    found = {span.name for span in spans}
    if names.ERROR_TYPE in root.attributes or names.SPAN_GATEWAY_REPLAY in found or names.SPAN_GATEWAY_FOLLOW in found:
        return True
    served = [span for span in spans if span.name == names.SPAN_DECODE_REQUEST]
    if not served or names.SPAN_ENGINE_DECODE not in found:
        return False
    fetched = any(names.ATTR_PREFILL_WORKER in span.attributes for span in served)
    wanted = {names.SPAN_ENGINE_COMPUTE, names.SPAN_TRANSFER_RECEIVE, names.SPAN_DECODE_REMOTE_PREFILL}
    return not fetched or wanted <= found
