"""Which transport a link takes: every one is judged on both ends, in the destination's order, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvmesh.errors import FailedPrecondition, KvmeshError
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Transport

MAX_CANDIDATES = 32
MAX_REASON_CHARS = 200
MAX_NAME_CHARS = 32

CHOSEN = "chosen"
LATER = "later"
UNUSABLE_HERE = "unusable_here"
UNUSABLE_THERE = "unusable_there"
NOT_OFFERED = "not_offered"
MISMATCH = "mismatch"
FAILED = "failed"
CODES = frozenset({CHOSEN, LATER, UNUSABLE_HERE, UNUSABLE_THERE, NOT_OFFERED, MISMATCH, FAILED})

FIRST = "first"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Choice:
    """candidates: all, in the destination's order; those that only the writer has are last."""

    transport: Transport
    reason: str
    candidates: tuple[pb.TransportCandidate, ...]

    @property
    def code(self) -> str:
        """See `reason_code`."""
        return reason_code(self.candidates)


def choose(transports: Mapping[str, Transport], hello: pb.PeerHello) -> Choice:
    """The first of these that can be used at both ends. Raises FailedPrecondition, which names why none can."""
    offers = {offer.name: offer for offer in hello.offers}
    failed = {offer.name: _short(offer.reason) for offer in hello.failed}
    unusable = {offer.name: _short(offer.reason) for offer in hello.unusable}
    found: Transport | None = None
    candidates: list[pb.TransportCandidate] = []
    for name, transport in transports.items():
        code, why = _judge(transport, offers.get(name), failed.get(name), unusable.get(name))
        if code == CHOSEN and found is not None:
            code = LATER
        elif code == CHOSEN:
            found = transport
        candidates.append(_candidate(name, code, why))
    for name in list(dict.fromkeys([*offers, *unusable]))[: MAX_CANDIDATES - len(candidates)]:
        if name not in transports:
            candidates.append(_candidate(_short(name), UNUSABLE_HERE, "the destination is not told to use it"))
    passed = [f"{c.name}: {c.reason}" for c in candidates if c.name in transports and not c.usable]
    if found is None:
        raise FailedPrecondition("no common transport: " + "; ".join(passed))
    place = next(i for i, c in enumerate(candidates) if c.chosen)
    before = [f"{c.name}: {c.reason}" for c in candidates[:place]]
    return Choice(found, "; ".join([candidates[place].reason, *before]), tuple(candidates))


def reason_code(candidates: Iterable[pb.TransportCandidate]) -> str:
    """`first` where the chosen one is the first of the destination's list, else why that first one was passed over: one
    of CODES. `unknown` for a peer that does not tell."""
    for candidate in candidates:
        if candidate.chosen:
            return FIRST
        return candidate.code if candidate.code in CODES else UNKNOWN
    return UNKNOWN


def bounded(candidates: Iterable[pb.TransportCandidate]) -> list[pb.TransportCandidate]:
    """A peer's candidates, cut to what one may keep."""
    return [
        pb.TransportCandidate(
            name=item.name[:MAX_NAME_CHARS],
            chosen=item.chosen,
            usable=item.usable,
            reason=_short(item.reason),
            code=item.code if item.code in CODES else UNKNOWN,
        )
        for item, _ in zip(candidates, range(MAX_CANDIDATES), strict=False)
    ]


def one_line(candidates: Iterable[pb.TransportCandidate]) -> str:
    """For a log: `verbs no (no RDMA device), shm yes (one host), tcp later`."""
    parts = []
    for item in candidates:
        if item.chosen:
            parts.append(f"{item.name} yes ({item.reason})")
        else:
            parts.append(f"{item.name} later" if item.usable else f"{item.name} no ({item.reason})")
    return ", ".join(parts)


def _judge(
    transport: Transport, offer: pb.TransportOffer | None, failed: str | None, unusable: str | None
) -> tuple[str, str]:
    usable, why = transport.ready
    if failed is not None:
        return FAILED, failed
    if not usable:
        return UNUSABLE_HERE, why
    if offer is None:
        if unusable is not None:
            return UNUSABLE_THERE, f"not usable at the writer: {unusable}"
        return NOT_OFFERED, "not offered by the writer"
    try:
        fits, why = transport.judge(offer)
    except KvmeshError as error:
        fits, why = False, error.message
    return (CHOSEN if fits else MISMATCH), why


def _candidate(name: str, code: str, why: str) -> pb.TransportCandidate:
    return pb.TransportCandidate(
        name=name[:MAX_NAME_CHARS], chosen=code == CHOSEN, usable=code in (CHOSEN, LATER), reason=_short(why), code=code
    )


def _short(text: str) -> str:
    return text[:MAX_REASON_CHARS]
