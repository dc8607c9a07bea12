"""A device that is a thread: `AsyncShard` over the CPU and gloo, and the program of ranks that have it.

`python -m ahead_shard SOCKET STEPS`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.parallel.rank import main
from kvmesh.engine.runner import PENDING, Slice, StepBatch, StepResult
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.layers.parallel import GlooParallel, TensorParallel


class ThreadShard:
    """Steps run in order on a thread, each behind the one before."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner, self.info, self.tp = runner, runner.info, runner.tp
        self.stream = ThreadPoolExecutor(1, thread_name_prefix="device")
        self.last: dict[int, int] = {}

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        return self.runner.layout(page_size, num_pages)

    def workspace_bytes(self) -> int:
        return 0

    def bind_cuda(self, layout: KvLayout, regions: Mapping[str, Any], doorbell: Any) -> None:
        # A collective, as in the capture of graphs: hangs unless all ranks bind at the same time.
        assert float(self.tp.all_reduce(torch.ones(1))) == self.tp.size
        bell = doorbell if doorbell is not None else Doorbell(bytearray(DOORBELL_BYTES))
        self.runner.bind(layout, {name: region.buf for name, region in regions.items()}, bell)

    def prepare(self, batch: StepBatch) -> Any:
        if any(page < 0 or page >= 32 for s in batch.slices for page in s.block_table):
            raise InvalidArgument("no such page")

    def launch_prepared(
        self, batch: StepBatch, plan: Any, on_layer: Callable[[int], None] | None = None
    ) -> Future[StepResult]:
        return self.stream.submit(self._step, batch, on_layer)

    def _step(self, batch: StepBatch, on_layer: Callable[[int], None] | None) -> StepResult:
        slices = [
            Slice(s.seq_id, np.array([self.last[s.seq_id]], np.int32), s.start, s.block_table, s.samples)
            if s.token_ids[0] == PENDING
            else s
            for s in batch.slices
        ]
        resolved = StepBatch(batch.step, slices, batch.copies)
        step = self.runner.compute(resolved, self.runner.prepare(resolved), on_layer, score=self.tp.rank == 0)
        wanted = sum(len(s.samples) for s in slices)
        result, tokens = StepResult([]), torch.zeros(wanted, dtype=torch.int32)
        if self.tp.rank == 0:
            result = self.runner.sample(resolved, step)
            tokens = torch.tensor([t for each in result.slices for t in each.token_ids], dtype=torch.int32)
        self.tp.broadcast(tokens)
        at = 0
        for s in slices:
            if s.samples:
                self.last[s.seq_id] = int(tokens[at])
            at += len(s.samples)
        return result

    def collect(self, flight: Future[StepResult]) -> StepResult:
        try:
            return flight.result()
        except Exception as error:
            raise DeviceFailed(str(error)) from error

    def ring(self, count: int) -> None:
        pass

    def close(self) -> None:
        self.stream.shutdown(wait=True)


class ThreadBackend:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> TensorParallel:
        return GlooParallel(store, rank, size, timeout_s)

    def load(self, spec: str, dtype: str, group: TensorParallel, progress: Any) -> ThreadShard:
        if group.rank in self.options.get("fails", ()):
            raise InvalidArgument("this rank does not load")
        return ThreadShard(TorchRunner.load(spec, dtype, 1, progress, "torch", group))

    def regions(self, layout: KvLayout, rank: int) -> dict[str, Any]:
        return {g.name: Region.create(g.name, layout.region_bytes(g)) for g in layout.groups}


if __name__ == "__main__":
    status = main(sys.argv[1:], lambda note: ThreadBackend(note["cuda"]["options"]))
    sys.stderr.flush()
    os._exit(status)
