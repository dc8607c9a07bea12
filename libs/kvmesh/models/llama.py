"""Llama and its look-alikes (Mistral without a window, Qwen2): RMSNorm, GQA with RoPE, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvmesh.layers.attention import append_kv, paged_attention
from kvmesh.layers.linear import DenseLinear, Linear
from kvmesh.layers.norm import rms_norm
from kvmesh.layers.paged import PagedKv, StepPlan
from kvmesh.layers.rotary import RotaryTable, apply_rotary
from kvmesh.loading.config import ModelConfig
from kvmesh.loading.gguf_model import FREQ_FACTORS
from kvmesh.loading.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer. qkv stacks q, k and v rows; gate_up stacks gate and up rows: one matrix product each."""

    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights and the forward pass over a flat batch. Stateless between calls, but for the growing rotary table."""

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        c = self.config = config
        self.dtype = reader.dtype
        embed_shape = (c.vocab_size, c.hidden_size)
        self.embed = reader.read("model.embed_tokens.weight", embed_shape)
        self.blocks = [self._block(reader, f"model.layers.{i}.") for i in range(c.num_layers)]
        self.norm = reader.read("model.norm.weight", (c.hidden_size,))
        tied = c.tie_embeddings or not reader.has("lm_head.weight")
        self.head: Linear = DenseLinear(self.embed if tied else reader.read("lm_head.weight", embed_shape))
        factors = reader.read(FREQ_FACTORS, (c.head_dim // 2,)) if reader.has(FREQ_FACTORS) else None
        self.rotary = RotaryTable(c.rope, c.head_dim, factors)

    def _block(self, reader: WeightReader, prefix: str) -> Block:
        c = self.config
        q, kv, hidden, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size

        def linear(parts: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
            weight = reader.fused([f"{prefix}{p}.weight" for p in parts], rows, columns)
            return DenseLinear(weight, reader.fused([f"{prefix}{p}.bias" for p in parts], rows) if bias else None)

        return Block(
            attn_norm=reader.read(prefix + "input_layernorm.weight", (hidden,)),
            qkv=linear([f"self_attn.{x}_proj" for x in "qkv"], [q, kv, kv], hidden, c.qkv_bias),
            out=linear(["self_attn.o_proj"], [hidden], q, c.o_bias),
            mlp_norm=reader.read(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [wide, wide], hidden, c.mlp_bias),
            down=linear(["mlp.down_proj"], [hidden], wide, c.mlp_bias),
        )

    def forward(self, plan: StepPlan, kv: PagedKv, kv_ready: Callable[[int], None]) -> torch.Tensor:
        """Final hidden states (tokens, hidden), normed. `kv_ready(i)` is called once layer i's KV is in its pages:
        they may leave while the rest of the layer computes."""
        c = self.config
        heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
        x = self.embed[plan.token_ids]
        cos_sin = self.rotary.ensure(plan.max_position + 1)[plan.positions]
        for i, block in enumerate(self.blocks):
            qkv = block.qkv(rms_norm(x, block.attn_norm, c.rms_eps)).view(len(x), heads + 2 * kv_heads, dim)
            rotated = apply_rotary(qkv[:, : heads + kv_heads], cos_sin)
            append_kv(kv.layers[i], rotated[:, heads:], qkv[:, heads + kv_heads :], plan)
            kv_ready(i)
            x = x + block.out(paged_attention(kv.layers[i], rotated[:, :heads].contiguous(), plan, kv))
            gate, up = block.gate_up(rms_norm(x, block.mlp_norm, c.rms_eps)).chunk(2, dim=-1)
            x = x + block.down(functional.silu(gate) * up)
        return rms_norm(x, self.norm, c.rms_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 (rows, vocab) of normed hidden states (rows, hidden)."""
        return self.head(hidden).float()
