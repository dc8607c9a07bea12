"""Native moves and their stand-in in Python do the same, and refuse the same."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.transfer.native import moves
from kvmesh.transfer.native.moves import Copy, Memory, Sending, receive

SIZE = 1 << 18


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(moves, "library", lambda: None)
    elif moves.library() is None:
        pytest.skip("nothing compiles here")
    return str(request.param)


def memory(array: np.ndarray) -> Memory:
    return Memory(array.ctypes.data, array.nbytes)


runs = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), st.integers(1, 70_000)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(runs, st.integers(0, 63))
def test_copies_are_exact_at_every_alignment(chosen: list[tuple[int, int, int]], skew: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, SIZE + 64, dtype=np.uint8)[skew : skew + SIZE]
    expected = np.zeros(SIZE + 64, dtype=np.uint8)[skew : skew + SIZE]
    target = expected.copy()
    src, dst, length = (list(x) for x in zip(*chosen, strict=True))
    length = [min(n, SIZE - a, SIZE - b) for a, b, n in zip(src, dst, length, strict=True)]
    for a, b, n in zip(src, dst, length, strict=True):
        expected[b : b + n] = source[a : a + n]
    copy = Copy(memory(target), memory(source), dst, src, length)
    half = len(src) // 2
    moved = (copy.move(0, half) if half else 0) + copy.move(half, len(src))
    assert moved == sum(length)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("bad", [(-1, 0, 8), (0, -1, 8), (SIZE - 4, 0, 8), (0, SIZE - 4, 8), (0, 0, 0), (0, 0, -5)])
@pytest.mark.parametrize("huge", [False, True])
def test_a_run_outside_is_refused_before_a_byte_moves(way: str, bad: tuple[int, int, int], huge: bool) -> None:
    source, target = np.ones(SIZE, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)
    src, dst, length = zip((0, 0, 64), bad, strict=True)
    if huge:
        length = (64, (1 << 63) - 1)
    with pytest.raises(InvalidArgument):
        Copy(memory(target), memory(source), dst, src, length).move(0, 2)
    assert not target.any()


def test_runs_through_a_socket_that_takes_little(way: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    source = np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
    target = np.zeros(SIZE, dtype=np.uint8)
    offsets = [int(x) * 64 for x in np.random.default_rng(3).permutation(SIZE // 64)[:700]]
    lengths = [1 + x % 64 for x in range(700)]
    failed: list[BaseException] = []

    def land() -> None:
        try:
            receive(theirs, memory(target), memoryview(target), offsets, lengths)
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=land)
    reader.start()
    sending = Sending(memory(source), memoryview(source), offsets, lengths)
    while not sending.done:
        try:
            assert sending.send(ours, 5000) > 0
        except BlockingIOError:
            ours.setblocking(True)
            ours.setblocking(False)
    reader.join(30)
    ours.close()
    theirs.close()
    assert not failed
    for offset, length in zip(offsets, lengths, strict=True):
        np.testing.assert_array_equal(target[offset : offset + length], source[offset : offset + length])
    assert target.sum(dtype=np.int64) == sum(
        int(source[a : a + n].sum(dtype=np.int64)) for a, n in zip(offsets, lengths, strict=True)
    )


def test_a_stream_that_ends_is_named(way: str) -> None:
    ours, theirs = socket.socketpair()
    target = np.zeros(64, dtype=np.uint8)
    ours.sendall(b"x" * 10)
    ours.close()
    with pytest.raises(DataLoss, match="ended inside a write"):
        receive(theirs, memory(target), memoryview(target), [0], [64])
    theirs.close()


def test_switched_off_means_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_NATIVE", "0")
    moves.library.cache_clear()
    try:
        assert moves.library() is None
    finally:
        monkeypatch.undo()
        moves.library.cache_clear()
    assert os.environ.get("KVMESH_NATIVE") != "0" or moves.library() is None
