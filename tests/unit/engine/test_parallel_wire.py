"""What leader and ranks say to one another: nothing lost, nothing believed that does not add up."""

from __future__ import annotations

import socket
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.parallel.wire import (
    MAX_NOTE_BYTES,
    Kind,
    is_layered,
    pack_step,
    recv_frame,
    send_frame,
    send_note,
    unpack_step,
)
from kvmesh.engine.runner import PENDING, SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.errors import DataLoss, TooLarge

PAGE = 4
SAMPLE = SampleInput(SamplingParams(), 0, 0, [], [])


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    tokens = draw(st.just([PENDING]) | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
    start = draw(st.integers(0, 40))
    need = -(-(start + len(tokens)) // PAGE)
    table = draw(st.lists(st.integers(0, 2**31 - 1), min_size=need, max_size=need + 3))
    return Slice(
        draw(st.integers(0, 2**60)),
        np.array(tokens, np.int32),
        start,
        np.array(table, np.int32),
        (SAMPLE,) * draw(st.integers(0, 3)),
        draw(st.none() | st.integers(0, 5)),
        draw(st.none() | st.integers(0, 9)),
    )


def scored(each: Slice) -> int:
    """Rows of logits that the leader takes for the slice's prompt logprobs."""
    return 0 if each.prompt_logprobs is None else len(each.token_ids) - 1 + (each.next_token is not None)


pages = st.integers(0, 2**31 - 1)
batches = st.builds(
    StepBatch,
    st.integers(0, 2**64 - 1),
    st.lists(slices(), max_size=5),
    st.lists(st.tuples(pages, pages), max_size=4),
)


@given(batches)
def test_a_rank_sees_the_same_step(batch: StepBatch) -> None:
    seen = unpack_step(pack_step(batch, PAGE))
    assert (seen.step, list(seen.copies)) == (batch.step, list(batch.copies))
    for ours, theirs in zip(batch.slices, seen.slices, strict=True):
        # Where a sequence's token lies among those of a step hangs on how many the others get.
        assert (ours.seq_id, ours.start, len(ours.samples)) == (theirs.seq_id, theirs.start, len(theirs.samples))
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        need = -(-(ours.start + len(ours.token_ids)) // PAGE)
        assert ours.block_table[:need].tolist() == theirs.block_table.tolist()
        # The number of collectives of a step hangs on it.
        assert scored(ours) == scored(theirs)
        # And the order of its rows on this.
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)


@given(batches, st.booleans())
def test_a_rank_knows_whether_its_leader_goes_layer_by_layer(batch: StepBatch, layered: bool) -> None:
    assert is_layered(pack_step(batch, PAGE, layered)) == layered


@given(batches, st.data())
def test_a_cut_or_padded_step_is_data_loss(batch: StepBatch, data: st.DataObject) -> None:
    body = pack_step(batch, PAGE)
    with pytest.raises(DataLoss):
        unpack_step(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(DataLoss):
        unpack_step(body + bytes(data.draw(st.integers(1, 9))))


@given(st.binary(max_size=200))
def test_garbage_is_a_step_or_data_loss(body: bytes) -> None:
    try:
        batch = unpack_step(body)
    except DataLoss:
        return
    assert all(len(each.token_ids) + len(each.block_table) <= len(body) // 4 for each in batch.slices)


def pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    for side in (a, b):
        side.settimeout(30)
    return a, b


def test_frames_come_whole_and_in_order_then_the_end() -> None:
    a, b = pair()
    with b:
        with a:
            send_frame(a, Kind.DONE)
            send_note(a, Kind.FAILED, {"reason": "é"})
            send_frame(a, Kind.STEP, bytes(100_000))
        assert recv_frame(b) == (Kind.DONE, b"")
        second = recv_frame(b)
        assert second is not None
        assert (second.kind, second.note()) == (Kind.FAILED, {"reason": "é"})
        third = recv_frame(b)
        assert third is not None
        assert len(third.body) == 100_000
        assert recv_frame(b) is None


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (struct.pack("<IB3x", 0, 99), DataLoss),
        (struct.pack("<IB3x", 4, Kind.DONE) + b"ab", DataLoss),
        (b"\1\0", DataLoss),
        (struct.pack("<IB3x", MAX_NOTE_BYTES + 1, Kind.READY), TooLarge),
        (struct.pack("<IB3x", 0xFFFFFFFF, Kind.STEP), TooLarge),
    ],
)
def test_what_is_no_frame_is_refused_before_memory_is_taken(raw: bytes, error: type[Exception]) -> None:
    a, b = pair()
    with b:
        with a:
            a.sendall(raw)
        with pytest.raises(error):
            recv_frame(b)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{"])
def test_a_note_that_is_no_object_is_data_loss(body: bytes) -> None:
    a, b = pair()
    with a, b:
        send_frame(a, Kind.READY, body)
        frame = recv_frame(b)
        assert frame is not None
        with pytest.raises(DataLoss):
            frame.note()
