"""The head of several ranks: each multiplies with its rows of the vocabulary, and all get all logits."""

from __future__ import annotations

import torch

from kvmesh.engine.cuda.head import CudaHead
from kvmesh.layers.parallel import TensorParallel


class ParallelHead:
    """As `CudaHead`: logits fp32 (rows, vocab) and tokens int32 (rows,), the same on every rank."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, max_rows: int, pdl: bool, tp: TensorParallel) -> None:
        """weight: (vocab_part, hidden) of this rank, filled up so that all ranks' are equally long."""
        self._mine, self._tp = CudaHead(weight, max_rows, pdl), tp
        rows, device = self._mine.max_rows, weight.device
        self.logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._gathered = torch.zeros(tp.size * rows * len(weight), dtype=torch.float32, device=device)

    @property
    def max_rows(self) -> int:
        """Rows of one step."""
        return len(self.logits)

    def __call__(self, hidden: torch.Tensor, count: int) -> None:
        """See `CudaHead`. All ranks must call it with the same count."""
        self._mine(hidden, count)
        mine, size = self._mine.logits[:count], self._tp.size
        width, vocab = mine.shape[1], self.logits.shape[1]
        parts = self._gathered[: size * count * width].view(size * count, width)
        self._tp.all_gather_into(parts, mine)
        for rank, part in enumerate(parts.view(size, count, width).unbind(0)):
            first, end = rank * width, min((rank + 1) * width, vocab)
            if first < end:
                self.logits[:count, first:end].copy_(part[:, : end - first])
        value, index = self.logits[:count].max(dim=1)
        self.tokens[:count].copy_(torch.where(value.isfinite(), index, -1))
