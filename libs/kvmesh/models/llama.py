"""Llama and its look-alikes (Mistral without a window, Qwen2): RMSNorm, GQA with RoPE, SwiGLU.

`LlamaWeights` reads a checkpoint; `TorchLlama` computes with torch operations in any dtype; `models.llama_native` does
the same with compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch.nn import functional

from kvmesh.kv.layout import KvGroup
from kvmesh.layers.attention import append_kv, paged_attention
from kvmesh.layers.linear import Linear, dense
from kvmesh.layers.norm import rms_norm
from kvmesh.layers.paged import PagedKv, StepPlan
from kvmesh.layers.parallel import (
    SINGLE,
    Embedding,
    Head,
    TensorParallel,
    kv_part,
    part,
    row_parallel,
    scaled,
    vocab_part,
)
from kvmesh.layers.rotary import RotaryTable, apply_rotary
from kvmesh.loading.config import ModelConfig
from kvmesh.loading.gguf_model import FREQ_FACTORS
from kvmesh.loading.sharding import check_parallel
from kvmesh.loading.weights import WeightReader


class Model(Protocol):
    """What a runner asks of an architecture. Stateless between calls."""

    config: ModelConfig
    backend: str
    kv_group: KvGroup
    """Where its KV lives: all layers in one group."""

    def bind(self, kv: PagedKv) -> None:
        """Adopt KV pages before the first `forward`."""

    def forward(self, plan: StepPlan, kv: PagedKv, kv_ready: Callable[[int], None]) -> torch.Tensor:
        """Final hidden states (tokens, hidden), normed, the same on every rank. `kv_ready(i)` is called once layer i's
        KV is in its pages on ALL ranks (after the first collective that follows): they may leave while the rest of the
        layer computes."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 (rows, vocab) of normed hidden states (rows, hidden). With several ranks all of them must call it."""


def full_group(config: ModelConfig) -> KvGroup:
    """K and V of every position, in every layer."""
    return KvGroup("full", "full", tuple(range(config.num_layers)), config.num_kv_heads, config.head_dim)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One decoder layer's part on this rank: matrices (out, in). qkv stacks q, k and v rows; gate_up gate and up rows.

    qkv and gate_up are column-parallel, out and down row-parallel: their biases are None but on rank 0.
    """

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def to(self, device: torch.device) -> BlockWeights:
        """The same on a device; what is there already is not copied."""
        there = {part.name: getattr(self, part.name) for part in fields(self)}
        return replace(self, **{name: tensor.to(device) for name, tensor in there.items() if tensor is not None})


class LlamaWeights:
    """Reads in order: embedding, `blocks()` one at a time (so a backend may repack without a second copy), head.

    Of each only what rank `tp.rank` computes; `heads` and `kv_heads` are those of this rank.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader, tp: TensorParallel = SINGLE) -> None:
        c = self.config = config
        check_parallel(config, tp.size)
        self.tp = tp
        self.dtype = reader.dtype
        self._reader = reader
        self._q, self._kv = part(c.num_heads, tp), kv_part(c.num_kv_heads, tp)
        self.heads, self.kv_heads = self._q.stop - self._q.start, self._kv.stop - self._kv.start
        ids, rows = vocab_part(c.vocab_size, tp)
        table = (c.vocab_size, c.hidden_size)
        self.embed = reader.read("model.embed_tokens.weight", table, rows=ids, pad_rows=rows)
        self.norm = reader.read("model.norm.weight", (c.hidden_size,))
        tied = c.tie_embeddings or not reader.has("lm_head.weight")
        self.head = self.embed if tied else reader.read("lm_head.weight", table, rows=ids, pad_rows=rows)
        factors = reader.read(FREQ_FACTORS, (c.head_dim // 2,)) if reader.has(FREQ_FACTORS) else None
        self.rotary = RotaryTable(c.rope, c.head_dim, factors)

    def blocks(self) -> Iterator[BlockWeights]:
        """Layers 0 .. num_layers - 1, read when asked for."""
        for i in range(self.config.num_layers):
            yield self._block(f"model.layers.{i}.")

    def _block(self, prefix: str) -> BlockWeights:
        c, reader, tp = self.config, self._reader, self.tp
        q, kv, hidden, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
        my_q, my_kv, my_wide = scaled(self._q, c.head_dim), scaled(self._kv, c.head_dim), part(wide, tp)

        def columns(parts: list[str], rows: list[int], mine: list[slice], *rest: int) -> torch.Tensor:
            kind = "weight" if rest else "bias"
            return reader.fused([f"{prefix}{p}_proj.{kind}" for p in parts], rows, *rest, parts=mine)

        def rows(name: str, cols: int, mine: slice) -> torch.Tensor:
            return reader.read(f"{prefix}{name}_proj.weight", (hidden, cols), cols=mine)

        def bias(name: str, present: bool) -> torch.Tensor | None:
            # Once in the sum over ranks.
            return reader.read(f"{prefix}{name}_proj.bias", (hidden,)) if present and tp.rank == 0 else None

        attn, mlp = [f"self_attn.{x}" for x in "qkv"], ["mlp.gate", "mlp.up"]
        qkv_rows, qkv_mine = [q, kv, kv], [my_q, my_kv, my_kv]
        return BlockWeights(
            attn_norm=reader.read(prefix + "input_layernorm.weight", (hidden,)),
            qkv=columns(attn, qkv_rows, qkv_mine, hidden),
            qkv_bias=columns(attn, qkv_rows, qkv_mine) if c.qkv_bias else None,
            out=rows("self_attn.o", q, my_q),
            out_bias=bias("self_attn.o", c.o_bias),
            mlp_norm=reader.read(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=columns(mlp, [wide, wide], [my_wide, my_wide], hidden),
            gate_up_bias=columns(mlp, [wide, wide], [my_wide, my_wide]) if c.mlp_bias else None,
            down=rows("mlp.down", wide, my_wide),
            down_bias=bias("mlp.down", c.mlp_bias),
        )


@dataclass(frozen=True, slots=True)
class _Block:
    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TorchLlama:
    """`Model` in torch operations: the reference of the native one, and the backend for fp32 and for several ranks."""

    backend = "torch"

    def __init__(self, weights: LlamaWeights) -> None:
        self.config = weights.config
        self.rotary = weights.rotary
        tp = self.tp = weights.tp
        self.heads, self.kv_heads = weights.heads, weights.kv_heads
        self.embed, self.norm = Embedding(weights.embed, weights.config.vocab_size, tp), weights.norm
        self.head = Head(weights.head, weights.config.vocab_size, tp)
        self.blocks = [
            _Block(
                b.attn_norm,
                dense(b.qkv, b.qkv_bias),
                row_parallel(b.out, b.out_bias, tp),
                b.mlp_norm,
                dense(b.gate_up, b.gate_up_bias),
                row_parallel(b.down, b.down_bias, tp),
            )
            for b in weights.blocks()
        ]
        # After the layers were found: a corrupt count of them would take all memory here.
        self.kv_group = full_group(weights.config)

    def bind(self, kv: PagedKv) -> None:
        """Nothing to prepare."""

    def forward(self, plan: StepPlan, kv: PagedKv, kv_ready: Callable[[int], None]) -> torch.Tensor:
        """See `Model.forward`."""
        c = self.config
        heads, kv_heads, dim, alone = self.heads, self.kv_heads, c.head_dim, self.tp.size == 1
        x = self.embed(plan.token_ids)
        cos_sin = self.rotary.ensure(plan.max_position + 1)[plan.positions]
        for i, block in enumerate(self.blocks):
            qkv = block.qkv(rms_norm(x, block.attn_norm, c.rms_eps)).view(len(x), heads + 2 * kv_heads, dim)
            rotated = apply_rotary(qkv[:, : heads + kv_heads], cos_sin)
            append_kv(kv.layers[i], rotated[:, heads:], qkv[:, heads + kv_heads :], plan)
            if alone:
                kv_ready(i)
            x = x + block.out(paged_attention(kv.layers[i], rotated[:, :heads], plan, kv))
            if not alone:
                # Their sum is here, so every rank has appended.
                kv_ready(i)
            gate, up = block.gate_up(rms_norm(x, block.mlp_norm, c.rms_eps)).chunk(2, dim=-1)
            x = x + block.down(functional.silu(gate) * up)
        return rms_norm(x, self.norm, c.rms_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden)
