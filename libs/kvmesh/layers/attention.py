"""Paged attention in plain torch: the reference, and what runs where no native kernel does.

Scores and softmax are fp32 whatever the KV dtype. A folded matmul is used on purpose: SDPA with `enable_gqa` in bf16
was measured 18 times slower on CPUs without native bf16.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kvmesh.layers.paged import Chunk, DecodeGroup, PagedKv, StepPlan


def append_kv(layer: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: StepPlan) -> None:
    """Write k, v (tokens, kv_heads, head_dim) to their pages in layer (num_pages, kv_heads, 2, page_size, head_dim)."""
    layer[plan.pages, :, :, plan.offsets] = torch.stack([k, v], dim=2)


def paged_attention(layer: torch.Tensor, q: torch.Tensor, plan: StepPlan, kv: PagedKv) -> torch.Tensor:
    """q (tokens, heads, head_dim) against the pages, which already hold this step's KV → (tokens, heads * head_dim)."""
    out = torch.empty_like(q)
    for group in plan.decode:
        begin, end = group.rows
        out[begin:end] = _decode(layer, q[begin:end], group, kv)
    for chunk in plan.chunks:
        begin, end = chunk.rows
        out[begin:end] = prefill_chunk(layer, q[begin:end], chunk, kv)
    return out.view(len(q), -1)


def _decode(layer: torch.Tensor, q: torch.Tensor, group: DecodeGroup, kv: PagedKv) -> torch.Tensor:
    rows, heads, dim = q.shape
    pages = layer[group.table]  # (rows, pages, kv_heads, 2, page_size, dim)
    k, v = pages.permute(3, 0, 2, 1, 4, 5).to(torch.float32, memory_format=torch.contiguous_format).unbind(0)
    k, v = (x.reshape(rows * kv.kv_heads, -1, dim) for x in (k, v))
    folded = q.float().reshape(rows * kv.kv_heads, heads // kv.kv_heads, dim) * dim**-0.5
    scores = torch.bmm(folded, k.transpose(1, 2)).view(rows, kv.kv_heads, heads // kv.kv_heads, -1)
    # Filled, not added: what lies past a sequence's end is another's stale KV, and inf - inf would be NaN. The same in
    # V, where a weight of 0 times its NaN would be NaN.
    v.view(rows, kv.kv_heads, -1, dim).masked_fill_(group.masked.transpose(2, 3), 0.0)
    weights = torch.softmax(scores.masked_fill(group.masked, -torch.inf), dim=-1).view(
        rows * kv.kv_heads, heads // kv.kv_heads, -1
    )
    return torch.bmm(weights, v).view(rows, heads, dim).to(q.dtype)


def prefill_chunk(layer: torch.Tensor, q: torch.Tensor, chunk: Chunk, kv: PagedKv) -> torch.Tensor:
    """A chunk's queries (tokens, heads, head_dim) against its history and itself, causally; same shape and dtype."""
    tokens, heads, dim = q.shape
    group, length = heads // kv.kv_heads, chunk.length
    pages = layer[chunk.pages]  # (pages, kv_heads, 2, page_size, dim)
    k, v = pages.permute(2, 1, 0, 3, 4).to(torch.float32, memory_format=torch.contiguous_format).unbind(0)
    shape = (kv.kv_heads, group, length, dim)
    k, v = (x.reshape(kv.kv_heads, 1, -1, dim)[:, :, :length].expand(shape) for x in (k, v))
    folded = q.float().reshape(tokens, kv.kv_heads, group, dim).permute(1, 2, 0, 3)
    if chunk.start == 0:
        out = functional.scaled_dot_product_attention(folded, k, v, is_causal=True)
    else:
        mask = torch.ones((tokens, length), dtype=torch.bool).tril_(chunk.start)
        out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, dim).to(q.dtype)
