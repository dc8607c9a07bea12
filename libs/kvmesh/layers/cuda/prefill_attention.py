"""Attention of prompt chunks over paged KV, by FlashInfer: fa3 on Hopper, fa2 elsewhere and over e4m3 pages."""

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
    """Wrappers with the pinned columns that their copies read. A plan's copies run when the stream gets to them, so
    nothing of it may be written again until that step is over: steps take turns."""

    fresh: Any
    paged: Any
    columns: torch.Tensor


class PrefillAttention:
    """`plan` once a step, then `run` for each layer. Two steps may be under way at a time.

    Chunks that begin their sequence read K and V as the step left them, in one piece, a fifth faster than from pages;
    the others read pages. Of e4m3 pages only the latter see the rounding.
    """

    TURNS = 2

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_size: int, device: torch.device, max_chunks: int,
        max_pages: int, kv_scales: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """max_chunks, max_pages: of one step's chunks together. kv_scales: of e4m3 pages; None: pages are bf16. Raises
        FailedPrecondition without FlashInfer."""
        try:
            from flashinfer import (  # type: ignore[import-not-found]
                BatchPrefillWithPagedKVCacheWrapper,
                BatchPrefillWithRaggedKVCacheWrapper,
            )
        except ImportError as error:
            raise FailedPrecondition(
                f"prefill on CUDA needs flashinfer-python ({error}): pip install 'kvmesh[gpu]'"
            ) from error
        self._shape = (heads, kv_heads, head_dim)
        self._page_size = page_size
        self.backend = "fa3" if torch.cuda.get_device_capability(device) == _HOPPER else "fa2"
        # Its fa3 wants q in fp8 too where KV is.
        paged = self.backend if kv_scales is None else "fa2"
        self._kv_type = torch.bfloat16 if kv_scales is None else torch.float8_e4m3fn
        # Floats, also 1.0: the scale of the scores and, behind the kernel, a factor of the output.
        self._scales = {} if kv_scales is None else {"k_scale": kv_scales[0], "v_scale": kv_scales[1]}
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._max = (max_chunks, max_pages)
        self._turn = 0
        self._plans = [
            _Plans(
                BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self.backend),
                BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=paged),
                torch.empty(3 * max_chunks + 3 + max_pages, dtype=torch.int32, pin_memory=True),
            )
            for _ in range(self.TURNS)
        ]
        self._current = self._plans[0]
        self._fresh = self._rows = 0

    def plan(self, counts: Sequence[int], starts: Sequence[int], tables: Sequence[Int32Array]) -> None:
        """Chunk i has counts[i] tokens from position starts[i] on; chunks that start at 0 come first. tables[i] are its
        page ids, at least as many as start + count tokens need. Copies are queued on the current stream."""
        fresh = next((i for i, start in enumerate(starts) if start), len(starts))
        if any(start == 0 for start in starts[fresh:]):
            raise Internal("chunks that begin their sequence come first")
        pages = [-(-(start + count) // self._page_size) for start, count in zip(starts, counts, strict=True)]
        total = sum(pages[fresh:])
        if len(counts) > self._max[0] or total > self._max[1]:
            raise Internal(f"{len(counts)} chunks over {total} pages in a step planned for {self._max}")
        self._turn = (self._turn + 1) % self.TURNS
        current = self._current = self._plans[self._turn]
        self._fresh, self._rows = sum(counts[:fresh]), sum(counts)
        columns = current.columns
        kinds = {"causal": True, "q_data_type": torch.bfloat16}
        if fresh:
            indptr = _running(columns[: fresh + 1], counts[:fresh])
            current.fresh.plan(indptr, indptr, *self._shape, kv_data_type=torch.bfloat16, **kinds)
        if fresh < len(counts):
            rest = len(counts) - fresh
            columns = columns[fresh + 1 :]
            queries = _running(columns[: rest + 1], counts[fresh:])
            indptr = _running(columns[rest + 1 : 2 * rest + 2], pages[fresh:])
            last, ids = columns[2 * rest + 2 : 3 * rest + 2], columns[3 * rest + 2 : 3 * rest + 2 + total]
            lengths = np.add(starts[fresh:], counts[fresh:])
            last.numpy()[:] = lengths - (np.array(pages[fresh:]) - 1) * self._page_size
            used = [table[:count] for table, count in zip(tables[fresh:], pages[fresh:], strict=True)]
            np.concatenate(used, out=ids.numpy())
            current.paged.plan(
                queries, indptr, ids, last, *self._shape, self._page_size, kv_data_type=self._kv_type, **kinds
            )

    def run(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, out: torch.Tensor) -> None:
        """q, out: bf16 (tokens, heads, head_dim), the planned chunks one behind the other; kv (tokens, 2, kv_heads,
        head_dim) their own K and V, which are in kv_layer (pages, kv_heads, 2, page_size, head_dim) too."""
        at, end = self._fresh, self._rows
        if at:
            self._current.fresh.run(q[:at], kv[:at, 0], kv[:at, 1], out=out[:at])
        if at < end:
            planes = kv_layer[:, :, 0], kv_layer[:, :, 1]
            self._current.paged.run(q[at:end], planes, out=out[at:end], **self._scales)


def _running(column: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Fill a column (n + 1,) with running sums from 0."""
    host = column.numpy()
    host[0] = 0
    np.cumsum(counts, out=host[1:])
    return column
