"""Llama and its look-alikes (Mistral without a window, Qwen2): RMSNorm, GQA with RoPE, SwiGLU.

`LlamaWeights` reads a checkpoint; `TorchLlama` computes with torch operations in any dtype; `models.llama_native` does
the same with compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from kvmesh.kv.layout import KvGroup
from kvmesh.layers.attention import append_kv, paged_attention
from kvmesh.layers.linear import Linear, dense
from kvmesh.layers.norm import rms_norm
from kvmesh.layers.paged import PagedKv, StepPlan
from kvmesh.layers.rotary import RotaryTable, apply_rotary
from kvmesh.loading.config import ModelConfig
from kvmesh.loading.gguf_model import FREQ_FACTORS
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
        """Final hidden states (tokens, hidden), normed. `kv_ready(i)` is called once layer i's KV is in its pages:
        they may leave while the rest of the layer computes."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 (rows, vocab) of normed hidden states (rows, hidden)."""


def full_group(config: ModelConfig) -> KvGroup:
    """K and V of every position, in every layer."""
    return KvGroup("full", "full", tuple(range(config.num_layers)), config.num_kv_heads, config.head_dim)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One decoder layer: matrices (out, in). qkv stacks q, k and v rows; gate_up stacks gate and up rows."""

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


class LlamaWeights:
    """Reads in order: embedding, `blocks()` one at a time (so a backend may repack without a second copy), head."""

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        c = self.config = config
        self.dtype = reader.dtype
        self._reader = reader
        self.embed = reader.read("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self.norm = reader.read("model.norm.weight", (c.hidden_size,))
        tied = c.tie_embeddings or not reader.has("lm_head.weight")
        self.head = self.embed if tied else reader.read("lm_head.weight", (c.vocab_size, c.hidden_size))
        factors = reader.read(FREQ_FACTORS, (c.head_dim // 2,)) if reader.has(FREQ_FACTORS) else None
        self.rotary = RotaryTable(c.rope, c.head_dim, factors)

    def blocks(self) -> Iterator[BlockWeights]:
        """Layers 0 .. num_layers - 1, read when asked for."""
        for i in range(self.config.num_layers):
            yield self._block(f"model.layers.{i}.")

    def _block(self, prefix: str) -> BlockWeights:
        c, reader = self.config, self._reader
        q, kv, hidden, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size

        def read(parts: list[str], rows: list[int], *rest: int) -> torch.Tensor:
            kind = "weight" if rest else "bias"
            return reader.fused([f"{prefix}{p}_proj.{kind}" for p in parts], rows, *rest)

        attn, mlp = [f"self_attn.{x}" for x in "qkv"], ["mlp.gate", "mlp.up"]
        return BlockWeights(
            attn_norm=reader.read(prefix + "input_layernorm.weight", (hidden,)),
            qkv=read(attn, [q, kv, kv], hidden),
            qkv_bias=read(attn, [q, kv, kv]) if c.qkv_bias else None,
            out=read(["self_attn.o"], [hidden], q),
            out_bias=read(["self_attn.o"], [hidden]) if c.o_bias else None,
            mlp_norm=reader.read(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=read(mlp, [wide, wide], hidden),
            gate_up_bias=read(mlp, [wide, wide]) if c.mlp_bias else None,
            down=read(["mlp.down"], [hidden], wide),
            down_bias=read(["mlp.down"], [hidden]) if c.mlp_bias else None,
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
    """`Model` in torch operations: the reference of the native one, and the backend for fp32."""

    backend = "torch"

    def __init__(self, weights: LlamaWeights) -> None:
        self.config = weights.config
        self.kv_group = full_group(weights.config)
        self.rotary = weights.rotary
        self.embed, self.norm, self.head = weights.embed, weights.norm, dense(weights.head)
        self.blocks = [
            _Block(
                b.attn_norm,
                dense(b.qkv, b.qkv_bias),
                dense(b.out, b.out_bias),
                b.mlp_norm,
                dense(b.gate_up, b.gate_up_bias),
                dense(b.down, b.down_bias),
            )
            for b in weights.blocks()
        ]

    def bind(self, kv: PagedKv) -> None:
        """Nothing to prepare."""

    def forward(self, plan: StepPlan, kv: PagedKv, kv_ready: Callable[[int], None]) -> torch.Tensor:
        """See `Model.forward`."""
        c = self.config
        heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
        x = self.embed[plan.token_ids]
        cos_sin = self.rotary.ensure(plan.max_position + 1)[plan.positions]
        for i, block in enumerate(self.blocks):
            qkv = block.qkv(rms_norm(x, block.attn_norm, c.rms_eps)).view(len(x), heads + 2 * kv_heads, dim)
            rotated = apply_rotary(qkv[:, : heads + kv_heads], cos_sin)
            append_kv(kv.layers[i], rotated[:, heads:], qkv[:, heads + kv_heads :], plan)
            kv_ready(i)
            x = x + block.out(paged_attention(kv.layers[i], rotated[:, :heads], plan, kv))
            gate, up = block.gate_up(rms_norm(x, block.mlp_norm, c.rms_eps)).chunk(2, dim=-1)
            x = x + block.down(functional.silu(gate) * up)
        return rms_norm(x, self.norm, c.rms_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden).float()
