"""Attention of prompt chunks over paged KV, by FlashInfer: fa3 on Hopper, fa2 elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.errors import FailedPrecondition, Internal

Int32Array = npt.NDArray[np.int32]
# FlashInfer's advice for partial results of split attention.
WORKSPACE_BYTES = 128 << 20
_HOPPER = (9, 0)


@dataclass(slots=True)
class _Plans:
    """A wrapper with the pinned columns that its copies read. A plan's copies run when the stream gets to them, so
    nothing of it may be written again until that step is over: steps take turns."""

    wrapper: Any
    columns: torch.Tensor


class PrefillAttention:
    """`plan` once a step, then `run` for each layer. Two steps may be under way at a time."""

    TURNS = 2

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_size: int, device: torch.device, max_chunks: int,
        max_pages: int,
    ) -> None:  # fmt: skip
        """max_chunks, max_pages: of one step's chunks together. Raises FailedPrecondition without FlashInfer."""
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore[import-not-found]
        except ImportError as error:
            raise FailedPrecondition(
                f"prefill on CUDA needs flashinfer-python ({error}): pip install 'kvmesh[gpu]'"
            ) from error
        self._shape = (heads, kv_heads, head_dim, page_size)
        self.backend = "fa3" if torch.cuda.get_device_capability(device) == _HOPPER else "fa2"
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._max = (max_chunks, max_pages)
        self._turn = 0
        self._plans = [
            _Plans(
                BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=self.backend),
                torch.empty(3 * max_chunks + 2 + max_pages, dtype=torch.int32, pin_memory=True),
            )
            for _ in range(self.TURNS)
        ]
        self._current: Any = None

    def plan(self, counts: Sequence[int], starts: Sequence[int], tables: Sequence[Int32Array]) -> None:
        """Chunk i has counts[i] tokens from position starts[i] on; tables[i] are its page ids, at least as many as
        start + count tokens need. Copies are queued on the current stream."""
        heads, kv_heads, head_dim, size = self._shape
        chunks = len(counts)
        lengths = np.asarray(starts, dtype=np.int64) + np.asarray(counts, dtype=np.int64)
        pages = -(-lengths // size)
        total = int(pages.sum())
        if chunks > self._max[0] or total > self._max[1]:
            raise Internal(f"{chunks} chunks over {total} pages in a step planned for {self._max}")
        self._turn = (self._turn + 1) % self.TURNS
        plans = self._plans[self._turn]
        columns = plans.columns
        queries, indptr, last = columns[: chunks + 1], columns[chunks + 1 : 2 * chunks + 2], columns[2 * chunks + 2 :]
        ids = last[chunks : chunks + total]
        last = last[:chunks]
        queries.numpy()[0] = indptr.numpy()[0] = 0
        np.cumsum(counts, out=queries.numpy()[1:])
        np.cumsum(pages, out=indptr.numpy()[1:])
        last.numpy()[:] = lengths - (pages - 1) * size
        np.concatenate([table[:count] for table, count in zip(tables, pages, strict=True)], out=ids.numpy())
        plans.wrapper.plan(
            queries, indptr, ids, last, heads, kv_heads, head_dim, size, causal=True, q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )  # fmt: skip
        self._current = plans.wrapper

    def run(self, q: torch.Tensor, kv_layer: torch.Tensor, out: torch.Tensor) -> None:
        """q, out: bf16 (tokens, heads, head_dim), the planned chunks one behind the other; their own KV is already in
        kv_layer (pages, kv_heads, 2, page_size, head_dim)."""
        self._current.run(q, (kv_layer[:, :, 0], kv_layer[:, :, 1]), out=out)
