"""A link over several NICs, made of links over one NIC each (rails), of any transport whose bytes are counted.

A write is spread over the rails and completes when all of its parts have; each rail counts what it delivers, and the
sums add up. A rail that breaks ends the link: its generations fail, all rails are fenced. `on_fault` hears which one it
was, so that the next link can go without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Arrival, Completion, GrantedPages, Inbound, Outbound, Write
from kvmesh.transfer.transports.spread import spread


def pairing(writer: int, destination: int) -> list[tuple[int, int]]:
    """Pairs of NICs of a link: the writer's i with the destination's i modulo their number, until every NIC of both
    ends is in a pair. 1..n NICs each."""
    if writer < 1 or destination < 1:
        raise InvalidArgument(f"{writer} NICs here, {destination} there: no pair")
    return [(place % writer, place % destination) for place in range(max(writer, destination))]


@dataclass(slots=True, eq=False)
class _Spread:
    """A write whose parts are under way."""

    write: Write
    left: int
    error: str = ""


@dataclass(slots=True, eq=False)
class _Rail:
    outbound: Outbound
    weight: float
    parts: dict[int, _Spread] = field(default_factory=dict)


class RailsOutbound(Outbound):
    """Takes the outbounds over. weights: share of each, above 0. on_fault(rail, reason): on the mover's thread, once,
    for the rail that broke by itself. left_out: pairs of NICs that this link goes without, for status. near: by source
    region, the rails that serve it (all where there are none, or it is not told)."""

    def __init__(
        self,
        outbounds: Sequence[Outbound],
        weights: Sequence[float] | None = None,
        on_fault: Callable[[int, str], None] | None = None,
        left_out: Sequence[pb.NicStatus] = (),
        near: Sequence[Sequence[int]] = (),
    ) -> None:
        if not outbounds:
            raise InvalidArgument("a link over no NIC")
        shares = [1.0] * len(outbounds) if weights is None else list(weights)
        self._rails = [_Rail(outbound, share) for outbound, share in zip(outbounds, shares, strict=True)]
        self._weights = shares
        self._on_fault = on_fault
        self._left_out = list(left_out)
        every = range(len(self._rails))
        self._near = [sorted({place for place in places if place in every}) for places in near]
        self._every = list(every)
        self._completions: list[Completion] = []
        self._turn = 0
        self._next = 0
        self._broken = ""

    @property
    def outbounds(self) -> list[Outbound]:
        """Of the rails, in order."""
        return [rail.outbound for rail in self._rails]

    def post(self, write: Write) -> None:
        if self._broken:
            self._completions.append(Completion(write.context, 0, self._broken))
            return
        places = self._near[write.src_region] if write.src_region < len(self._near) else []
        places = places or self._every
        parts = spread(write, [self._weights[place] for place in places], first=self._turn % len(places))
        # Where the next one begins: a write of one part for each rail in turn, too.
        self._turn = parts[-1].rail + 1
        whole = _Spread(write, len(parts))
        for part in parts:
            rail = self._rails[places[part.rail]]
            self._next += 1
            rail.parts[self._next] = whole
            rail.outbound.post(
                dataclasses.replace(
                    write, context=self._next, src=part.src, dst=part.dst, length=part.length, nbytes=part.nbytes
                )
            )

    def poll(self, budget: int) -> list[Completion]:
        share = max(1, budget // len(self._rails)) if budget else 0
        for place, rail in enumerate(self._rails):
            self._collect(rail, share)
            if rail.outbound.broken and not self._broken:
                reason = rail.outbound.broken
                if self._on_fault is not None:
                    self._on_fault(place, reason)
                self.fence(reason)
        completions, self._completions = self._completions, []
        return completions

    def flush(self, immediate: int) -> None:
        for rail in self._rails:
            rail.outbound.flush(immediate)

    def fence(self, reason: str) -> None:
        self._broken = self._broken or reason
        for rail in self._rails:
            rail.outbound.fence(reason)
            self._collect(rail, 0)

    def close(self) -> None:
        for rail in self._rails:
            rail.outbound.close()

    @property
    def busy(self) -> bool:
        return bool(self._completions) or any(rail.outbound.busy for rail in self._rails)

    @property
    def broken(self) -> str:
        return self._broken

    def wait_fds(self) -> list[tuple[int, int]]:
        return [item for rail in self._rails for item in rail.outbound.wait_fds()]

    def wake_at(self) -> float | None:
        times = [at for rail in self._rails if (at := rail.outbound.wake_at()) is not None]
        return min(times, default=None)

    def nics(self) -> list[pb.NicStatus]:
        return [*(nic for rail in self._rails for nic in rail.outbound.nics()), *self._left_out]

    def _collect(self, rail: _Rail, budget: int) -> None:
        for completion in rail.outbound.poll(budget):
            whole = rail.parts.pop(completion.context, None)
            if whole is None:
                # Told twice: the table counts it as a stray one.
                self._completions.append(Completion(0, completion.nbytes, completion.error))
                continue
            whole.left -= 1
            whole.error = whole.error or completion.error
            if not whole.left:
                nbytes = 0 if whole.error else whole.write.nbytes
                self._completions.append(Completion(whole.write.context, nbytes, whole.error))


class RailsInbound(Inbound):
    """The destination's end: what each rail's inbound says, together."""

    def __init__(self, inbounds: Sequence[Inbound]) -> None:
        if not inbounds:
            raise InvalidArgument("a link over no NIC")
        self.inbounds = list(inbounds)

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        for inbound in self.inbounds:
            inbound.grant(immediate, pages)

    def revoke(self, immediate: int) -> None:
        for inbound in self.inbounds:
            inbound.revoke(immediate)

    def poll(self) -> list[Arrival]:
        return [arrival for inbound in self.inbounds for arrival in inbound.poll()]

    async def fence(self) -> None:
        # All of them, also where one fails: a fence that is not done is worse than an error that comes late.
        results = await asyncio.gather(*(inbound.fence() for inbound in self.inbounds), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def unmapped(self) -> None:
        for inbound in self.inbounds:
            inbound.unmapped()

    def nics(self) -> list[pb.NicStatus]:
        return [nic for inbound in self.inbounds for nic in inbound.nics()]
