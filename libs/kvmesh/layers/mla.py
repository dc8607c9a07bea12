"""Multi-head latent attention over KV pages (DeepSeek-V2, arXiv:2405.04434). fp32 inside, returns the input's dtype.

A token's page entry is (kv_lora_rank + rope_dim,): the normed latent c, then the rotated key that all heads share.
Head h has the key [K_h c, rotary key] and the value V_h c. Two equal forms:

    absorbed   q' K_h c = (K_h^T q)' c: queries come down into the latent space and attend to the pages as they are, as
               if to one KV head. Little to read, wide dot products.
    expanded   keys and values of the whole history are made from the latents, then attended as usual.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kvmesh.layers.paged import Chunk, DecodeGroup, StepPlan


class LatentUp:
    """From the latent to keys and values of some heads: k_up (heads, nope, rank), v_up (heads, v_dim, rank).

    Held in fp32: attention is computed in fp32, and widening them for every step would cost more than it saves.
    """

    def __init__(self, weight: torch.Tensor, heads: int, nope_dim: int, v_dim: int, rope_dim: int, scale: float):
        """weight: (heads * (nope_dim + v_dim), rank), the checkpoint's kv_b. scale: of the scores."""
        up = weight.float().view(heads, nope_dim + v_dim, -1)
        self.k_up, self.v_up = up[:, :nope_dim].contiguous(), up[:, nope_dim:].contiguous()
        self.heads, self.nope_dim, self.v_dim, self.rope_dim = heads, nope_dim, v_dim, rope_dim
        self.rank, self.scale = weight.shape[1], scale

    def absorbs(self, tokens: int, length: int) -> bool:
        """Whether the absorbed form is less work for `tokens` queries over `length` tokens (in multiplications)."""
        moved = self.rank * (self.nope_dim + self.v_dim)
        absorbed = tokens * moved + tokens * length * (2 * self.rank + self.rope_dim)
        return absorbed < length * moved + tokens * length * (self.nope_dim + self.rope_dim + self.v_dim)

    def into(self, q: torch.Tensor) -> torch.Tensor:
        """Queries (heads, tokens, nope + rope) → (heads, tokens, rank + rope)."""
        return torch.cat([torch.bmm(q[..., : self.nope_dim], self.k_up), q[..., self.nope_dim :]], dim=-1)

    def out_of(self, latent: torch.Tensor) -> torch.Tensor:
        """Attended latents (heads, tokens, rank) → values (heads, tokens, v_dim)."""
        return torch.bmm(latent, self.v_up.transpose(1, 2))

    def keys(self, latent: torch.Tensor) -> torch.Tensor:
        """Page entries (length, rank + rope) → (heads, length, nope + rope)."""
        nope = torch.matmul(latent[:, : self.rank], self.k_up.transpose(1, 2))
        return torch.cat([nope, latent[:, self.rank :].expand(self.heads, -1, -1)], dim=-1)

    def values(self, latent: torch.Tensor) -> torch.Tensor:
        """Page entries (length, rank + rope) → (heads, length, v_dim)."""
        return torch.matmul(latent[:, : self.rank], self.v_up.transpose(1, 2))


def append_latent(layer: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor, plan: StepPlan) -> None:
    """Write latent (tokens, rank) and rope_key (tokens, rope) to their pages in layer (num_pages, page_size, both)."""
    layer[plan.pages, plan.offsets] = torch.cat([latent, rope_key], dim=-1)


def latent_attention(layer: torch.Tensor, q: torch.Tensor, plan: StepPlan, up: LatentUp) -> torch.Tensor:
    """q (tokens, heads, nope + rope), rotated, against pages that hold this step's KV → (tokens, heads * v_dim)."""
    out = torch.empty((*q.shape[:2], up.v_dim), dtype=q.dtype)
    for group in plan.decode:
        begin, end = group.rows
        out[begin:end] = _decode(layer, q[begin:end], group, up)
    for chunk in plan.chunks:
        begin, end = chunk.rows
        out[begin:end] = prefill_latent(layer, q[begin:end], chunk, up)
    return out.view(len(q), -1)


def _decode(layer: torch.Tensor, q: torch.Tensor, group: DecodeGroup, up: LatentUp) -> torch.Tensor:
    kv = layer[group.table].to(torch.float32).view(len(q), -1, layer.shape[-1])
    # Past a sequence's end is another's stale KV, maybe NaN: not even a weight of 0 may meet it.
    masked = group.masked[:, 0]
    kv.masked_fill_(masked.transpose(1, 2), 0.0)
    queries = up.into(q.float().transpose(0, 1)).transpose(0, 1) * up.scale
    weights = torch.bmm(queries, kv.transpose(1, 2)).masked_fill_(masked, -torch.inf).softmax(dim=-1)
    attended = torch.bmm(weights, kv[..., : up.rank])
    return up.out_of(attended.transpose(0, 1)).transpose(0, 1).to(q.dtype)


def prefill_latent(
    layer: torch.Tensor, q: torch.Tensor, chunk: Chunk, up: LatentUp, absorb: bool | None = None
) -> torch.Tensor:
    """A chunk's queries (tokens, heads, nope + rope) against its history and itself, causally → (tokens, heads, v_dim).

    absorb: which form; None takes the cheaper one.
    """
    tokens, length = len(q), chunk.length
    latent = layer[chunk.pages].to(torch.float32).view(-1, layer.shape[-1])[:length]
    queries = q.float().transpose(0, 1)
    absorb = up.absorbs(tokens, length) if absorb is None else absorb
    # Four dimensions, and values as wide as keys: else torch takes a path that holds all scores at once, and is slower.
    if absorb:
        queries = up.into(queries)
        keys = values = latent.expand(1, up.heads, -1, -1)
    else:
        keys = up.keys(latent)[None]
        spare = keys.shape[-1] - up.v_dim
        values = functional.pad(up.values(latent), (0, spare))[None] if spare > 0 else up.values(latent)[None]
    causal = chunk.start == 0
    mask = None if causal else torch.ones((tokens, length), dtype=torch.bool).tril_(chunk.start)
    out = functional.scaled_dot_product_attention(
        queries[None], keys, values, attn_mask=mask, is_causal=causal, scale=up.scale
    )[0]
    out = up.out_of(out[..., : up.rank]) if absorb else out[..., : up.v_dim]
    return out.transpose(0, 1).to(q.dtype)
