"""Pairs of NICs that failed in flight: the next link goes without them, for a while."""

from __future__ import annotations

import time

from kvmesh.proto.v1 import kvtransfer_pb2 as pb

FaultKey = tuple[int, int, str, str]
"""Lives of the destination's sidecar and engine, NIC here, NIC there. A destination that dies looks like a NIC that
fails: its next life is not to suffer for it."""
# How long such a pair is left out of new links.
FAULT_S = 30.0
MAX_FAULTS = 256


class PairFaults:
    """`add` is the mover's thread's, `sound` the loop's."""

    def __init__(self) -> None:
        self._at: dict[FaultKey, float] = {}

    def __len__(self) -> int:
        return len(self._at)

    def add(self, reply: pb.PeerHelloReply, here: str, there: str) -> None:
        """It failed now, on a link that this reply opened."""
        while len(self._at) >= MAX_FAULTS:
            self._at.pop(next(iter(self._at)), None)
        self._at[_key(reply, here, there)] = time.monotonic()

    def sound(self, reply: pb.PeerHelloReply, here: str, there: str) -> bool:
        """Whether a link to that destination may use it."""
        at = self._at.get(_key(reply, here, there))
        return at is None or time.monotonic() - at > FAULT_S


def _key(reply: pb.PeerHelloReply, here: str, there: str) -> FaultKey:
    return reply.sidecar_incarnation, reply.incarnation, here, there
