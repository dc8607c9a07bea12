"""What a rank computes with: its group, its part of the model, its KV memory. The leader says which by SETUP.

Torch is imported where something is made, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvmesh.engine.runner import ModelInfo, StepBatch, StepResult
from kvmesh.kv.layout import KvLayout

if TYPE_CHECKING:
    from kvmesh.layers.parallel import TensorParallel
    from kvmesh.loading.weights import Progress


class AsyncShard(Protocol):
    """One rank's part of an `AsyncRunner`. Every rank is given the same steps in the same order.

    All collectives of a step are queued by its launch, in the same order on every rank; none by `collect`. A launch
    ends with `tp.broadcast` of the sampled tokens: rank 0 alone samples, and the next step's PENDING tokens are those.
    """

    info: ModelInfo
    tp: TensorParallel
    stream: Any

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """See `Runner.layout`."""

    def workspace_bytes(self) -> int:
        """See `CudaRunnerFace`."""

    def bind_cuda(self, layout: KvLayout, regions: Mapping[str, Any], doorbell: Any) -> None:
        """See `CudaRunnerFace`; called on all ranks at the same time, so it may run collectives."""

    def prepare(self, batch: StepBatch) -> Any:
        """Check and plan a step on the host. Raises for one that cannot run; nothing is queued, no rank is needed."""

    def launch_prepared(self, batch: StepBatch, plan: Any, on_layer: Callable[[int], None] | None = None) -> Any:
        """`AsyncRunner.launch` of a step that was prepared. What fails here is not the batch's fault."""

    def collect(self, flight: Any) -> StepResult:
        """See `AsyncRunner.collect`; rank 0's result is the step's."""

    def ring(self, count: int) -> None:
        """Queue rings that belong to no layer; on rank 0."""

    def close(self) -> None:
        """See `Runner.close`."""


class RankBackend(Protocol):
    """Makes the parts of an `AsyncShard`, on the leader and on every rank."""

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> TensorParallel:
        """Meet the others. Raises Unavailable, FailedPrecondition."""

    def load(self, spec: str, dtype: str, group: TensorParallel, progress: Progress | None) -> AsyncShard:
        """This rank's part of the model."""

    def regions(self, layout: KvLayout, rank: int) -> dict[str, Any]:
        """KV memory of a rank that is not the leader, as `AsyncShard.bind_cuda` and `RankLink` want it."""


class CudaBackend:
    """GPUs over NCCL: the ranks of a host have its GPUs from `first` on."""

    def __init__(self, first: int, options: Mapping[str, Any], local: int) -> None:
        """options: of `CudaRunner.load`, what JSON can say. local: ranks on each host."""
        self._first = first
        self._options = dict(options)
        self._local = local

    def _gpu(self, rank: int) -> int:
        return self._first + rank % self._local

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> TensorParallel:
        """See `RankBackend`."""
        import torch

        from kvmesh.layers.parallel_nccl import NcclParallel

        return NcclParallel(store, rank, size, timeout_s, torch.device("cuda", self._gpu(rank)))

    def load(self, spec: str, dtype: str, group: TensorParallel, progress: Progress | None) -> AsyncShard:
        """See `RankBackend`."""
        from kvmesh.engine.cuda.runner import CudaRunner

        device = f"cuda:{self._gpu(group.rank)}"
        return CudaRunner.load(spec, dtype, device, progress, group, **self._options)

    def regions(self, layout: KvLayout, rank: int) -> dict[str, Any]:
        """See `RankBackend`: memory that other processes can map."""
        from kvmesh.engine.cuda.memory import gpu_memory, kv_regions

        device = self._gpu(rank)
        return dict(kv_regions(layout, device, gpu_memory(device, 0, 0)))


def backend_of(note: Mapping[str, Any]) -> RankBackend | None:
    """What SETUP names; None for the CPU over gloo, where steps are not launched ahead (`TorchRunner`)."""
    cuda = note.get("cuda")
    return None if cuda is None else CudaBackend(int(cuda["first"]), cuda["options"], int(note["local"]))
