"""Whatever Redis loses, repeats or forgets between publisher and mirror: what is mirrored is what was put out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.store.flights import Appended
from kvmesh.store.keys import FlightKeys
from services.gateway.flights import FlightLog, Opened
from services.gateway.flights import publisher as publishing
from services.gateway.flights.mirror import Mirror
from services.gateway.flights.publisher import Publisher

CHOICES = 2
REF: Any = FlightKeys("a" * 32, "b" * 64)


class FaultyStore:
    """A stream whose writes end as the test says: `ok`, `lost answer` (written, and nobody hears), `away`, `evicted`
    (what was written before is gone)."""

    def __init__(self) -> None:
        self.stream: list[tuple[int, bytes]] = []
        self.next = "ok"
        self._number = 0

    async def append(self, ref: Any, token: int, frames: Sequence[bytes], *, begun: bool) -> Appended | None:
        how, self.next = self.next, "ok"
        if how == "away":
            return None
        if how == "evicted":
            self.stream.clear()
        if begun and not self.stream:
            return "gap"
        for frame in frames:
            self._number += 1
            self.stream.append((self._number, frame))
        return None if how == "lost answer" else "ok"


class Follower:
    """Reads the stream from the first frame on, whenever it does."""

    def __init__(self) -> None:
        self.log = FlightLog(CHOICES)
        self.mirror = Mirror(self.log)
        self.place = 0

    def read(self, store: FaultyStore) -> None:
        for number, raw in store.stream:
            if number > self.place:
                self.place = number
                assert self.mirror.apply(router_pb2.FlightFrame.FromString(raw)) == "ok"


def told(log: FlightLog) -> list[Any]:
    reader = log.reader()
    out: list[Any] = [(log.token_ids(choice), log.finish_of(choice), log.stop_reason(choice)) for choice in (0, 1)]
    return [*out, sorted((delta.choice, delta.text) for delta in reader.take())]


PIECE = st.tuples(st.integers(0, CHOICES - 1), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.text("aé–"))
ROUND = st.tuples(
    st.lists(PIECE, max_size=4),
    st.sampled_from(["ok", "ok", "lost answer", "away", "evicted"]),
    st.sets(st.integers(0, 2)),
    st.sampled_from([False, False, False, True]),
)
"""New output, how the write ends, who reads then, and whether the leader dies then."""


@settings(max_examples=1000 if os.environ.get("KVMESH_SOAK") else 100)
@given(st.lists(ROUND, min_size=2, max_size=10), st.integers(1, 5))
def test_what_is_mirrored_is_what_was_put_out(rounds: list[Any], frame_tokens: int) -> None:
    async def run() -> None:
        store, token = FaultyStore(), 1
        leader = FlightLog(CHOICES)
        leader.open(Opened("m", "r", "f", 7, 3))
        publisher = Publisher(store, REF, token, leader, begun=False)  # type: ignore[arg-type]
        followers = [Follower() for _ in range(3)]
        for pieces, how, readers, dies in rounds:
            for choice, ids, text in pieces:
                leader.append(pb.Delta(choice=choice, token_ids=ids, text=text))
            store.next = how
            await publisher.publish()
            for reader in readers:
                followers[reader].read(store)
            if dies and store.stream:
                # What it had not told is put out anew, by one that has read everything.
                heir = Follower()
                heir.read(store)
                leader = heir.log
                token += 1
                publisher = Publisher(store, REF, token, leader, begun=True)  # type: ignore[arg-type]
        for choice in range(CHOICES):
            leader.append(pb.Delta(choice=choice, token_ids=[1], text="!", finish_reason=pb.FINISH_REASON_STOP))
        store.next = "ok"
        assert await publisher.publish() == "ok"
        for follower in followers:
            follower.read(store)
            assert told(follower.log) == told(leader)

    before = publishing.FRAME_TOKENS
    publishing.FRAME_TOKENS = frame_tokens
    try:
        asyncio.run(run())
    finally:
        publishing.FRAME_TOKENS = before


def test_frames_that_cannot_be_joined_break_the_flight() -> None:
    def deltas(first: int, ids: list[int], choice: int = 0) -> router_pb2.FlightFrame:
        delta = router_pb2.FlightDelta(first_position=first, delta=pb.Delta(choice=choice, token_ids=ids, text="x"))
        return router_pb2.FlightFrame(token=1, deltas=router_pb2.FlightDeltas(deltas=[delta]))

    def opened(revision: str) -> router_pb2.FlightFrame:
        return router_pb2.FlightFrame(token=1, opened=router_pb2.FlightOpened(model="m", revision=revision))

    for bad in (
        deltas(5, [1]),
        deltas(0, [1], choice=7),
        opened("another"),
        router_pb2.FlightFrame(token=1),
        router_pb2.FlightFrame(token=0, deltas=router_pb2.FlightDeltas()),
        router_pb2.FlightFrame(token=1, finished=pb.Finished()),
    ):
        mirror = Mirror(FlightLog(1))
        assert mirror.apply(opened("r")) == "ok"
        assert mirror.apply(deltas(0, [1, 2])) == "ok"
        assert mirror.apply(bad) == "broken"
