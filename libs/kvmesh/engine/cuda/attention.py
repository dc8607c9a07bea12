"""Decode attention as the runner uses it: a work plan and a configuration for each number of rows, one workspace."""

from __future__ import annotations

import math

import torch

from kvmesh.engine.cuda.metadata import Columns
from kvmesh.layers.cuda.decode_attention import AttentionConfig, Workspace, config_for, decode_attention
from kvmesh.layers.cuda.worklist import Ints, WorkPlan


class DecodeAttention:
    """`words` and `fill` for the step's columns, `run` for each layer."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_size: int, max_rows: int, device: torch.device, pdl: bool,
        kv_scales: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """kv_scales: of e4m3 pages; None: pages are bf16."""
        self._kv_scales = kv_scales
        self._scale = 1.0 / math.sqrt(head_dim)
        self._kv_heads, self._page_size, self._head_dim, self._pdl = kv_heads, page_size, head_dim, pdl
        self._group = heads // kv_heads
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._chosen: dict[int, tuple[WorkPlan, AttentionConfig]] = {}
        segments = max(self._choose(rows)[0].segments for rows in range(1, max_rows + 1))
        self._workspace = Workspace.allocate(segments, max_rows, kv_heads, self._group, head_dim, device)

    def _choose(self, rows: int) -> tuple[WorkPlan, AttentionConfig]:
        found = self._chosen.get(rows)
        if found is None:
            config = config_for(rows, self._kv_scales is not None)
            found = self._chosen[rows] = config.plan(rows, self._kv_heads, self._sms), config
        return found

    def words(self, rows: int) -> int:
        """int32 words of a work list for so many rows, none for none."""
        return self._choose(rows)[0].words if rows else 0

    def fill(self, lengths: Ints, out: Ints) -> None:
        """Write the work list for these rows' lengths (0: a row without work) into out (words,)."""
        self._choose(len(lengths))[0].fill(lengths, out)

    def run(self, q: torch.Tensor, kv_layer: torch.Tensor, columns: Columns, out: torch.Tensor, rows: int) -> None:
        """q, out (>= rows, heads, head_dim) bf16; kv_layer (pages, kv_heads, 2, page_size, head_dim), bf16 or e4m3."""
        plan, config = self._choose(rows)
        decode_attention(
            q, kv_layer, columns.pages, columns.work, out, self._workspace, self._scale, plan, config, pdl=self._pdl,
            starts=columns.row_start, kv_scales=self._kv_scales,
        )  # fmt: skip
