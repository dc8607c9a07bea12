"""Prefill and decode apart, on one rank each: KV carried by the real planner from one `Bench` to another."""

from __future__ import annotations

import numpy as np
import torch

from kvmesh.kv.planner import plan
from model_harness import Bench


def move(src: Bench, dst: Bench, src_table: np.ndarray, dst_table: np.ndarray, tokens: int, first_block: int) -> int:
    """Carry the plan out, byte by byte, layer by layer; returns the bytes moved."""
    pages = src.layout.pages_for(tokens)
    columns = plan(
        src.layout,
        dst.layout,
        src_table[first_block:pages].tolist(),
        dst_table[first_block:pages].tolist(),
        group=src.group,
    )
    moved = 0
    layers = src.layout.num_layers
    for layer in range(layers):
        src_base = layer * src.layout.layer_stride(src.group)
        dst_base = layer * dst.layout.layer_stride(dst.group)
        for from_, to, length in zip(columns.src_offset, columns.dst_offset, columns.length, strict=True):
            a, b, n = int(from_) + src_base, int(to) + dst_base, int(length)
            dst.region[b : b + n] = src.region[a : a + n]
            moved += n
    return moved


def disaggregated(pair: tuple[Bench, Bench], prompt: list[int], chunk: int, src_hit: int, dst_hit: int) -> torch.Tensor:
    """src_hit, dst_hit: whole blocks that the side's prefix cache holds (computed there beforehand, in other steps)."""
    prefill, decode = pair
    n, page = len(prompt) - 1, prefill.page_size
    src_table, dst_table = prefill.table(n), decode.table(n + 1)
    for bench, table, hit in ((prefill, src_table, src_hit), (decode, dst_table, dst_hit)):
        if hit:
            bench.run(prompt[: hit * page], hit * page, table)
    for at in range(src_hit * page, n, chunk):
        prefill.logits(prefill.slice(prompt[at : min(n, at + chunk)], at, src_table))
    first_block = min(dst_hit, n // page)
    moved = move(prefill, decode, src_table, dst_table, n, first_block)
    assert moved == (-(-n // page) - first_block) * prefill.layout.page_bytes(prefill.group) * prefill.layout.num_layers
    return decode.logits(decode.slice(prompt[n:], n, dst_table))
