"""Random weights made where they are needed: 16 GB of them take a second on a GPU, minutes through a host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.loading.checkpoint import Checkpoint
from kvmesh.loading.random_model import STD, RandomCheckpoint, is_norm, tensor_seed
from kvmesh.loading.weights import ALL, Progress, WeightReader


class RandomReader(WeightReader):
    """`WeightReader` whose tensors are drawn on `device` and never read: normal with deviation 0.02, norms are ones.

    The same seed gives the same weights on the same kind of device, whatever is read first and however ranks divide it.
    """

    def __init__(
        self, checkpoint: RandomCheckpoint, dtype: torch.dtype, device: torch.device | str = "cpu",
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        super().__init__(checkpoint, dtype, progress)
        self.device = torch.device(device)
        self._seed = checkpoint.seed
        self._generator = torch.Generator(self.device)

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
        """See `WeightReader.fused`; the result is on `device`."""
        chosen = [ALL] * len(names) if parts is None else list(parts)
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, *rest))
        counts = [len(range(*wanted.indices(count))) for wanted, count in zip(chosen, rows, strict=True)]
        width = (len(range(*cols.indices(rest[0]))), *rest[1:]) if rest else ()
        total = sum(counts)
        out = torch.empty((max(total, pad_rows), *width), dtype=dtype or self.dtype, device=self.device)
        out[total:] = 0
        at = 0
        for name, count, wanted, stored in zip(names, counts, chosen, rows, strict=True):
            self._draw(out[at : at + count], name, (stored, *rest), wanted, cols)
            at += count
        return out

    def _draw(self, out: torch.Tensor, name: str, shape: tuple[int, ...], rows: slice, cols: slice) -> None:
        if is_norm(name):
            out.fill_(1.0)
        else:
            self._generator.manual_seed(tensor_seed(name, self._seed))
            if out.shape == shape:
                out.normal_(0.0, STD, generator=self._generator)
            else:
                # A rank's part is cut from the whole, so that ranks agree.
                whole = torch.empty(shape, dtype=out.dtype, device=out.device)
                whole.normal_(0.0, STD, generator=self._generator)
                out.copy_(whole[rows] if len(shape) == 1 else whole[rows, cols])
        self._done += 2 * out.numel()
        if self._progress:
            self._progress(self._done, self._total)


def open_reader(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None, device: torch.device | str = "cpu"
) -> WeightReader:
    """The reader for a checkpoint. Of real weights it gives tensors on the host, of random ones tensors on `device`."""
    if isinstance(checkpoint, RandomCheckpoint):
        return RandomReader(checkpoint, dtype, device, progress)
    return WeightReader(checkpoint, dtype, progress)
