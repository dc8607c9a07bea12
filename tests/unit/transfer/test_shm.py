"""The shm writer's end, without a sidecar: what is copied, what is told, what completes when."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvmesh.errors import InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.transfer.transports.base import Completion, Write
from kvmesh.transfer.transports.shm import KIND_BYTES, KIND_UNMAPPED, RECORD, ShmOutbound

PAGE = 4096


class Rig:
    def __init__(self) -> None:
        self.source = Region.create("src", 16 * PAGE)
        self.target = Region.create("dst", 16 * PAGE)
        self.mapped = Region.adopt(__import__("os").dup(self.target.fd), 16 * PAGE)
        self.src = self.source.view().reshape(16, PAGE)
        self.dst = self.target.view().reshape(16, PAGE)
        self.src[:] = np.random.default_rng(1).integers(1, 255, self.src.shape)
        ours, self.peer = socket.socketpair()
        self.peer.setblocking(False)
        self.out = ShmOutbound(ours, [self.source], [self.mapped])

    def write(self, context: int, pages: list[tuple[int, int]], immediate: int = 5) -> Write:
        src = [a * PAGE for a, _ in pages]
        dst = [b * PAGE for _, b in pages]
        return Write(context, immediate, 0, 0, src, dst, [PAGE] * len(pages), PAGE * len(pages))

    def told(self) -> list[tuple[int, int, int]]:
        try:
            data = self.peer.recv(1 << 16)
        except BlockingIOError:
            return []
        return list(RECORD.iter_unpack(data))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.out.close()
    rig.peer.close()
    del rig.src, rig.dst
    rig.source.close()
    rig.target.close()


def test_bytes_land_before_they_are_told(rig: Rig) -> None:
    rig.out.post(rig.write(1, [(0, 3), (5, 4)]))
    assert rig.out.busy
    assert rig.out.poll(1 << 20) == [Completion(1, 2 * PAGE)]
    assert rig.told() == [(5, KIND_BYTES, 2 * PAGE)]
    np.testing.assert_array_equal(rig.dst[[3, 4]], rig.src[[0, 5]])
    assert not rig.dst[[0, 1, 2, 5]].any()
    assert not rig.out.busy


def test_a_burst_is_told_at_its_end_and_budgets_are_kept(rig: Rig) -> None:
    for context in range(4):
        rig.out.post(rig.write(context, [(context * 2, 8 + context), (1, 1)]))
    rig.out.post(rig.write(9, [(2, 15)], immediate=6))
    assert rig.out.poll(3 * PAGE) == []
    assert rig.told() == []
    rest = []
    while rig.out.busy:
        rest += rig.out.poll(3 * PAGE)
    assert sorted(rest) == [Completion(c, 2 * PAGE) for c in range(4)] + [Completion(9, PAGE)]
    assert rig.told() == [(5, KIND_BYTES, 8 * PAGE), (6, KIND_BYTES, PAGE)]


def test_flush_lets_the_begun_one_end(rig: Rig) -> None:
    rig.out.post(rig.write(1, [(0, 0), (1, 1), (2, 2)]))
    rig.out.post(rig.write(2, [(3, 3)]))
    rig.out.post(rig.write(3, [(4, 4)], immediate=6))
    rig.out.poll(PAGE)
    rig.out.flush(5)
    done = rig.out.poll(1 << 20)
    assert sorted(done) == [Completion(1, 3 * PAGE), Completion(2, 0, "flushed"), Completion(3, PAGE)]
    assert sorted(rig.told()) == [(5, KIND_BYTES, 3 * PAGE), (6, KIND_BYTES, PAGE)]
    assert not rig.dst[3].any()


def test_fence_completes_everything_and_moves_nothing_more(rig: Rig) -> None:
    rig.out.post(rig.write(1, [(0, 0), (1, 1)]))
    rig.out.post(rig.write(2, [(3, 3)]))
    rig.out.poll(PAGE)
    rig.out.fence("over")
    assert sorted(rig.out.poll(1 << 20)) == [Completion(1, 0, "over"), Completion(2, 0, "over")]
    rig.out.post(rig.write(3, [(4, 4)]))
    assert rig.out.poll(1 << 20) == [Completion(3, 0, "over")]
    assert rig.out.broken == "over"
    assert not rig.dst[[1, 3, 4]].any()
    rig.out.close()
    assert rig.told() == [(0, KIND_UNMAPPED, 0)]
    assert rig.mapped.closed


def test_end_of_file_breaks_the_link(rig: Rig) -> None:
    rig.out.post(rig.write(1, [(0, 0)]))
    rig.peer.close()
    assert [c.error != "" for c in rig.out.poll(1 << 20)] == [True]
    assert rig.out.broken


def test_a_receiver_that_does_not_read_holds_completions_back(rig: Rig) -> None:
    context = posted = 0
    done: list[Completion] = []
    while not rig.out.wait_fds()[0][1] & select.POLLOUT:
        context += 1
        rig.out.post(rig.write(context, [(0, 0)]))
        done += rig.out.poll(1 << 20)
        assert context < 100_000
    posted = context
    assert len(done) == posted - 1
    total = 0
    while len(done) < posted or (records := rig.told()):
        records = rig.told() if len(done) < posted else records
        total += sum(nbytes for _, _, nbytes in records)
        done += rig.out.poll(1 << 20)
    assert total == posted * PAGE


@pytest.mark.parametrize("bad", [(16, 0), (0, 16), (-1, 0), (0, -1)])
def test_nothing_is_written_outside_of_a_region(rig: Rig, bad: tuple[int, int]) -> None:
    rig.out.post(rig.write(1, [(0, 0), bad]))
    with pytest.raises(InvalidArgument, match="outside of its regions"):
        rig.out.poll(1 << 20)
    assert not rig.dst.any()
