"""From hidden states to logits and the most likely tokens, at addresses that never change."""

from __future__ import annotations

import torch

from kvmesh.layers.cuda.skinny import MAX_ROWS, argmax_reduce, head_tiles, row_bucket, skinny_head


class CudaHead:
    """logits fp32 (rows, vocab) and tokens int32 (rows,): the argmax, or -1 where a row is not finite."""

    def __init__(self, weight: torch.Tensor, max_rows: int, pdl: bool) -> None:
        self._weight, self._pdl = weight, pdl
        vocab, device = len(weight), weight.device
        padded = -(-max_rows // MAX_ROWS) * MAX_ROWS if max_rows > MAX_ROWS else row_bucket(max_rows)
        self.logits = torch.zeros(padded, vocab, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(padded, dtype=torch.int32, device=device)
        tiles = max(row_bucket(m) * head_tiles(m, vocab) for m in (1, 16, 17, 32, 33, 64, 65, MAX_ROWS))
        self._padded = torch.zeros(MAX_ROWS, weight.shape[1], dtype=torch.bfloat16, device=device)
        self._best = torch.zeros(tiles, dtype=torch.float32, device=device)
        self._where = torch.zeros(tiles, dtype=torch.int32, device=device)

    @property
    def max_rows(self) -> int:
        """Rows of one step."""
        return len(self.logits)

    def __call__(self, hidden: torch.Tensor, count: int) -> None:
        """hidden: bf16 (>= count, width), contiguous; fills the first `count` logits and tokens."""
        vocab = len(self._weight)
        for at in range(0, count, MAX_ROWS):
            m = min(MAX_ROWS, count - at)
            rows, tiles = row_bucket(m), head_tiles(m, vocab)
            best = self._best[: rows * tiles].view(rows, tiles)
            where = self._where[: rows * tiles].view(rows, tiles)
            part = hidden[at : at + rows]
            if len(part) < rows:
                self._padded[:m].copy_(part[:m])
                part = self._padded[:rows]
            skinny_head(part, self._weight, self.logits[at : at + rows], best, where, m, pdl=self._pdl)
            argmax_reduce(best, where, self.tokens[at : at + rows], m, pdl=self._pdl)
