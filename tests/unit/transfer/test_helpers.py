"""The mover's helpers: everything is done once and joined, and what one raises is raised after all have ended."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial

import numpy as np
import pytest

from kvmesh.kv.region import Region
from kvmesh.transfer.native import moves
from kvmesh.transfer.transports.base import Completion, Write
from kvmesh.transfer.transports.shm import ShmOutbound, outbound
from kvmesh.transfer.transports.sockets.helpers import Helpers

PAGE = 4096


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_errors_after_the_join(threads: int) -> None:
    helpers = Helpers(threads)
    assert helpers.run([partial(pow, 2, n) for n in range(7)]) == [1, 2, 4, 8, 16, 32, 64]
    done: list[int] = []
    with pytest.raises(ZeroDivisionError):
        helpers.run([lambda: 1 // 0, partial(done.append, 1)] if threads > 1 else [lambda: 1 // 0])
    assert done == ([1] if threads > 1 else [])
    helpers.close()
    helpers.close()


def test_jobs_run_side_by_side() -> None:
    helpers = Helpers(3)
    barrier = threading.Barrier(3)
    # Would never pass, one after the other.
    assert sorted(helpers.run([lambda: barrier.wait(60)] * 3)) == [0, 1, 2]
    helpers.close()


@pytest.mark.parametrize("native", [True, False])
def test_copies_by_several_threads_are_exact(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "MIN_SHARE_BYTES", PAGE)
    if not native:
        monkeypatch.setattr(moves, "library", lambda: None)
    source, target = Region.create("src", 64 * PAGE), Region.create("dst", 64 * PAGE)
    src, dst = (region.view().reshape(64, PAGE) for region in (source, target))
    src[:] = np.random.default_rng(1).integers(1, 255, src.shape)
    ours, peer = socket.socketpair()
    helpers = Helpers(4)
    out = ShmOutbound(ours, [source], [Region.adopt(os.dup(target.fd), 64 * PAGE)], helpers)
    pages = np.random.default_rng(2).permutation(64)[:23].tolist()
    at = [page * PAGE for page in pages]
    out.post(Write(1, 5, 0, 0, at, at, [PAGE] * 23, 23 * PAGE))
    assert out.poll(10 * PAGE) == []
    assert out.poll(1 << 30) == [Completion(1, 23 * PAGE)]
    expected = np.zeros_like(dst)
    expected[pages] = src[pages]
    np.testing.assert_array_equal(dst, expected)
    out.close()
    helpers.close()
    peer.close()
    del src, dst
    source.close()
    target.close()
