"""Drives a TorchRunner over private KV memory, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell

GREEDY = SamplingParams(temperature=0.0)


def sample_of(params: SamplingParams = GREEDY, position: int = 0, **more: object) -> SampleInput:
    return SampleInput(params, 0, position, more.pop("prompt", []), more.pop("output", []), **more)


@dataclass
class Bench:
    """A bound runner. Pages are handed out in a shuffled order, so that nothing relies on runs."""

    runner: TorchRunner
    page_size: int = 16
    num_pages: int = 64
    free: list[int] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.layout = self.runner.layout(self.page_size, self.num_pages)
        self.group = self.layout.groups[0].name
        self.region = bytearray(b"\x7f" * self.layout.region_bytes(self.group))  # garbage: huge values where unwritten
        self.doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        self.runner.bind(self.layout, {self.group: memoryview(self.region)}, self.doorbell)
        self.free = np.random.default_rng(5).permutation(self.num_pages).tolist()

    def table(self, tokens: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(-(-tokens // self.page_size))], dtype=np.int32)

    def slice(self, ids: Sequence[int], start: int, table: np.ndarray, seq_id: int = 0, **more: object) -> Slice:
        samples = more.pop("samples", (sample_of(position=start + len(ids)),))
        return Slice(seq_id, np.asarray(ids, dtype=np.int32), start, table, samples, **more)

    def logits(self, *slices: Slice, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """fp32 (slices, vocab) of the last position of every slice, in the given order."""
        self.step += 1
        step = self.runner.forward_logits(StepBatch(self.step, slices, copies))
        return step.logits[[row for row in step.rows if row is not None]].clone()

    def run(self, ids: Sequence[int], chunk: int, table: np.ndarray | None = None) -> torch.Tensor:
        """Logits (tokens, vocab) at the last position of every chunk, chunked prefill."""
        table = self.table(len(ids)) if table is None else table
        rows = [self.logits(self.slice(ids[at : at + chunk], at, table)) for at in range(0, len(ids), chunk)]
        return torch.cat(rows)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """max|a-b| / max|b| within tolerance, and the same argmax wherever the reference's margin exceeds 1e-3."""
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"
    top = theirs.topk(2, dim=-1).values
    clear = (top[..., 0] - top[..., 1]) > 1e-3
    assert clear.any()
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
