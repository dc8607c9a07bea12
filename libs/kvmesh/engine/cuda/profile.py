"""How many KV pages a GPU has room for: what weights, workspaces, graphs and others leave of its part."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import Unavailable

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes, once the weights are loaded. free: what nobody has, total: the GPU's; workspaces: what the runner will
    still take (activations of the largest step, sampler, graphs)."""

    free: int
    total: int
    weights: int
    workspaces: int

    def describe(self) -> str:
        """For people."""
        return (
            f"{gib(self.free)} of {gib(self.total)} are free, weights take {gib(self.weights)}, workspaces and graphs "
            f"{gib(self.workspaces)}"
        )


def gib(nbytes: int) -> str:
    """1.25 GiB"""
    return f"{nbytes / GIB:.2f} GiB"


def kv_bytes(memory: GpuMemory, utilization: float) -> int:
    """What pages may take; 0 or less where nothing is left."""
    return memory.free - memory.workspaces - round(memory.total * (1 - utilization))


def pages_that_fit(memory: GpuMemory, utilization: float, page: int) -> int:
    """Pages of `page` bytes (all layers). Raises Unavailable, telling what to change, where there is none."""
    left = kv_bytes(memory, utilization)
    if left < page:
        raise Unavailable(
            f"no GPU memory is left for KV: {memory.describe()}, and gpu_memory_utilization {utilization:g} keeps "
            f"{gib(round(memory.total * (1 - utilization)))} back; lower token_budget or max_batch, raise "
            "gpu_memory_utilization, or free the GPU of other processes",
            details={"field": "gpu_memory_utilization"},
        )
    return left // page


def no_memory(memory: GpuMemory, asked: int, pages: int, why: str) -> Unavailable:
    """The driver did not give `asked` bytes for so many pages."""
    return Unavailable(
        f"no GPU memory for KV: {gib(asked)} were asked for {pages} pages, {memory.describe()} ({why}); lower "
        "num_pages, kv_memory_bytes or gpu_memory_utilization",
        details={"field": "num_pages"},
    )
