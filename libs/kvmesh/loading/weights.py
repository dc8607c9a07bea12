"""Checkpoint tensors → torch, with fusion done at load and progress reported. The only torch user in `loading`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from kvmesh.errors import DataLoss
from kvmesh.loading.checkpoint import Checkpoint

Progress = Callable[[int, int], None]
# The whole of a dimension.
ALL = slice(None)
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

    def _fill(self, out: torch.Tensor, name: str, rows: slice, cols: slice) -> None:
        raw = self.checkpoint.read(name)
        data = raw.data[rows] if raw.data.ndim == 1 else raw.data[rows, cols]
        out.copy_(_as_torch(data, raw.dtype))
        self._done += raw.stored_bytes
        if self._progress:
            self._progress(self._done, self._total)

    def read(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: slice = ALL,
        cols: slice = ALL,
        pad_rows: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """One tensor that is stored as exactly `shape`, or its `rows` and `cols` (a rank's part of it).

        pad_rows: the result has so many rows, the last ones zero, where `rows` are fewer. dtype: another than the
        reader's.
        """
        return self.fused([name], [shape[0]], *shape[1:], parts=[rows], cols=cols, pad_rows=pad_rows, dtype=dtype)

    def fused(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *rest: int,
        parts: Sequence[slice] | None = None,
        cols: slice = ALL,
        pad_rows: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Several tensors (rows[i], *rest) stacked along dim 0, filled in place: no second copy of the weights.

        parts: of each only these rows. cols: of all only these columns. pad_rows, dtype: see `read`.
        """
        chosen = [ALL] * len(names) if parts is None else list(parts)
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, *rest))
        counts = [_length(wanted, count) for wanted, count in zip(chosen, rows, strict=True)]
        width = (_length(cols, rest[0]), *rest[1:]) if rest else ()
        total = sum(counts)
        out = torch.empty((max(total, pad_rows), *width), dtype=dtype or self.dtype)
        out[total:] = 0
        at = 0
        for name, wanted, count in zip(names, chosen, counts, strict=True):
            self._fill(out[at : at + count], name, wanted, cols)
            at += count
        return out


def _length(wanted: slice, total: int) -> int:
    return len(range(*wanted.indices(total)))


def _as_torch(data: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    # The map is read-only and torch would warn about it; the tensor is only ever copied from.
    tensor = torch.from_numpy(data if data.flags.writeable else data.copy())
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor
