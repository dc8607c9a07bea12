"""What of `NcclParallel` needs no GPU: it refuses to start without, and nobody waits in it once it is aborted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvmesh.errors import FailedPrecondition, Unavailable
from kvmesh.layers.parallel import leader_store
from kvmesh.layers.parallel_nccl import NcclParallel

WAIT_S = 120.0


class Backend:
    """A process group whose collectives may fail or stand still, as one in a full launch queue does."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.inside = threading.Event()
        self.stands_still = False
        self.fails = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.inside.set()
        if self.stands_still:
            assert self.aborted.wait(WAIT_S)
        if self.fails:
            raise RuntimeError("NCCL error\nand where")

    def abort(self) -> None:
        self.aborted.set()


def group() -> tuple[NcclParallel, Backend]:
    made, backend = NcclParallel.__new__(NcclParallel), Backend()
    made.rank, made.size, made._group = 0, 2, backend
    made._lock, made._aborted, made._sum = threading.Lock(), False, None
    return made, backend


def test_without_a_gpu_for_the_rank_it_is_refused_at_once() -> None:
    store, _ = leader_store(WAIT_S)
    with pytest.raises(FailedPrecondition):
        NcclParallel(store, 1, 2, WAIT_S, torch.device("cuda", torch.cuda.device_count()))


def test_a_failed_collective_and_all_after_an_abort_are_unavailable() -> None:
    made, backend = group()
    x = torch.ones(3)
    assert made.all_reduce(x) is x
    backend.fails = True
    with pytest.raises(Unavailable, match=r"a collective failed: NCCL error$"):
        made.all_reduce(x)
    backend.fails = False
    made.abort()
    made.abort()
    assert backend.aborted.wait(WAIT_S)
    backend.inside.clear()
    with pytest.raises(Unavailable, match="the group is lost"):
        made.all_reduce(x)
    # Not one of them reached what was freed.
    assert not backend.inside.is_set()


def test_an_abort_frees_who_stands_still_while_queueing() -> None:
    made, backend = group()
    backend.stands_still = True
    thread = threading.Thread(target=made.all_reduce, args=(torch.ones(1),), daemon=True)
    thread.start()
    assert backend.inside.wait(WAIT_S)
    made.abort()
    thread.join(WAIT_S)
    assert not thread.is_alive()
