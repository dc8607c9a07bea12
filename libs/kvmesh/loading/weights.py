"""Checkpoint tensors → torch, with fusion done at load and progress reported. The only torch user in `loading`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvmesh.errors import DataLoss
from kvmesh.loading.checkpoint import Checkpoint, RawTensor

Progress = Callable[[int, int], None]
_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """`bf16`, `fp32` or `fp16`."""
    return _TORCH[name]


class WeightReader:
    """Reads tensors by name into `dtype`, counting stored bytes. Shapes are checked against what the model asks."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._names = frozenset(checkpoint.names())
        self._progress = progress
        self._done = 0
        self._total = checkpoint.total_bytes()

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`."""
        return name in self._names

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Before memory is taken: the config may be corrupt and ask for terabytes."""
        stored = self.checkpoint.shape(name)
        if stored != shape:
            raise DataLoss(f"tensor {name} is {stored}, the config asks for {shape}")

    def _fill(self, out: torch.Tensor, name: str) -> None:
        raw = self.checkpoint.read(name)
        out.copy_(_as_torch(raw))
        self._done += raw.stored_bytes
        if self._progress:
            self._progress(self._done, self._total)

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One tensor of exactly `shape`."""
        self._check(name, tuple(shape))
        out = torch.empty(tuple(shape), dtype=self.dtype)
        self._fill(out, name)
        return out

    def fused(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> torch.Tensor:
        """Several tensors (rows[i], *rest) stacked along dim 0, filled in place: no second copy of the weights."""
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, *rest))
        out = torch.empty((sum(rows), *rest), dtype=self.dtype)
        at = 0
        for name, count in zip(names, rows, strict=True):
            self._fill(out[at : at + count], name)
            at += count
        return out


def _as_torch(raw: RawTensor) -> torch.Tensor:
    # The map is read-only and torch would warn about it; the tensor is only ever copied from.
    data = raw.data if raw.data.flags.writeable else raw.data.copy()
    tensor = torch.from_numpy(data)
    return tensor.view(torch.bfloat16) if raw.dtype == "bf16" else tensor
