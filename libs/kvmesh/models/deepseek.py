"""DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437): latent attention, mixture of experts after dense layers.

The last layers that a V3 checkpoint adds for predicting several tokens are not read.

With several ranks the latent KV and all that leads to it are computed on each of them, to the same bits; query heads,
the output projection and the columns of every MLP and expert are divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvmesh.errors import Internal
from kvmesh.kv.layout import KvGroup
from kvmesh.layers.linear import Linear, dense
from kvmesh.layers.mla import LatentUp, append_latent, latent_attention
from kvmesh.layers.moe import GatedMlp, Moe, Router
from kvmesh.layers.norm import rms_norm
from kvmesh.layers.paged import PagedKv, StepPlan
from kvmesh.layers.parallel import SINGLE, Embedding, Head, TensorParallel, part, row_parallel, scaled, vocab_part
from kvmesh.layers.rotary import RotaryTable, apply_rotary, unpair
from kvmesh.loading.config import MlaConfig, ModelConfig, MoeConfig
from kvmesh.loading.sharding import check_parallel
from kvmesh.loading.weights import WeightReader

# Of the norms inside attention: the architecture fixes it, whatever the config's rms_norm_eps.
_LATENT_EPS = 1e-6


def latent_group(config: ModelConfig, mla: MlaConfig) -> KvGroup:
    """The latent of every position, in every layer, whole on each rank."""
    return KvGroup("mla", "mla", tuple(range(config.num_layers)), 1, mla.latent_dim)


@dataclass(frozen=True, slots=True)
class _Attention:
    """q_down and q_norm are None where queries have no latent of their own. q_up gives this rank's heads."""

    q_down: Linear | None
    q_norm: torch.Tensor | None
    q_up: Linear
    kv_down: Linear
    kv_norm: torch.Tensor
    kv_up: LatentUp
    out: Linear


@dataclass(frozen=True, slots=True)
class _Block:
    attn_norm: torch.Tensor
    attn: _Attention
    mlp_norm: torch.Tensor
    mlp: GatedMlp | Moe


class _Reader:
    """This rank's part of each block, from a checkpoint."""

    def __init__(self, config: ModelConfig, mla: MlaConfig, reader: WeightReader, tp: TensorParallel) -> None:
        self.config, self.mla, self.reader, self.tp = config, mla, reader, tp
        self.heads = part(config.num_heads, tp)

    def block(self, index: int) -> _Block:
        c, prefix = self.config, f"model.layers.{index}."
        attn_norm = self.reader.read(prefix + "input_layernorm.weight", (c.hidden_size,))
        mlp_norm = self.reader.read(prefix + "post_attention_layernorm.weight", (c.hidden_size,))
        attn = self._attention(prefix + "self_attn.")
        if c.moe is not None and index >= c.moe.first_layer:
            return _Block(attn_norm, attn, mlp_norm, self._moe(prefix + "mlp.", c.moe))
        return _Block(attn_norm, attn, mlp_norm, self._mlp(prefix + "mlp.", c.intermediate_size, summed=True))

    def _attention(self, prefix: str) -> _Attention:
        c, m, reader = self.config, self.mla, self.reader
        count, hidden, bias = self.heads.stop - self.heads.start, c.hidden_size, c.qkv_bias

        def down(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight = reader.read(f"{prefix}{name}.weight", (rows, hidden))
            return weight, reader.read(f"{prefix}{name}.bias", (rows,)) if bias else None

        def heads(name: str, width: int, columns: int) -> torch.Tensor:
            shape = (c.num_heads * width, columns)
            return reader.read(f"{prefix}{name}.weight", shape, rows=scaled(self.heads, width))

        def unpaired(rows: torch.Tensor | None, heads: int) -> torch.Tensor | None:
            if rows is not None and m.interleaved:
                unpair(rows.view(heads, -1, *rows.shape[1:]), m.qk_rope_head_dim)
            return rows

        q_down = q_norm = None
        if m.q_lora_rank is None:
            q_up = heads("q_proj", m.qk_head_dim, hidden)
        else:
            q_down = dense(*down("q_a_proj", m.q_lora_rank))
            q_norm = reader.read(prefix + "q_a_layernorm.weight", (m.q_lora_rank,))
            q_up = heads("q_b_proj", m.qk_head_dim, m.q_lora_rank)
        unpaired(q_up, count)
        kv_down, kv_bias = down("kv_a_proj_with_mqa", m.latent_dim)
        unpaired(kv_down, 1), unpaired(kv_bias, 1)
        kv_norm = reader.read(prefix + "kv_a_layernorm.weight", (m.kv_lora_rank,))
        kv_up = heads("kv_b_proj", m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
        out = reader.read(
            prefix + "o_proj.weight", (hidden, c.num_heads * m.v_head_dim), cols=scaled(self.heads, m.v_head_dim)
        )
        # Once in the sum over ranks.
        out_bias = reader.read(prefix + "o_proj.bias", (hidden,)) if c.o_bias and self.tp.rank == 0 else None
        up = LatentUp(kv_up, count, m.qk_nope_head_dim, m.v_head_dim, m.qk_rope_head_dim, m.scale(c.rope))
        return _Attention(
            q_down, q_norm, dense(q_up), dense(kv_down, kv_bias), kv_norm, up, row_parallel(out, out_bias, self.tp)
        )

    def _mlp(self, prefix: str, wide: int, summed: bool) -> GatedMlp:
        """summed: over ranks; else its result is this rank's part."""
        hidden, mine = self.config.hidden_size, part(wide, self.tp)
        names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up")]
        gate_up = self.reader.fused(names, [wide, wide], hidden, parts=[mine, mine])
        down = self.reader.read(prefix + "down_proj.weight", (hidden, wide), cols=mine)
        return GatedMlp(dense(gate_up), row_parallel(down, None, self.tp if summed else SINGLE))

    def _moe(self, prefix: str, moe: MoeConfig) -> Moe:
        gate, wide = prefix + "gate.", moe.intermediate_size
        weight = self.reader.read(gate + "weight", (moe.num_experts, self.config.hidden_size), dtype=torch.float32)
        bias = None
        if moe.method == "noaux_tc":
            bias = self.reader.read(gate + "e_score_correction_bias", (moe.num_experts,), dtype=torch.float32)
        experts = [self._mlp(f"{prefix}experts.{i}.", wide, summed=False) for i in range(moe.num_experts)]
        shared = None
        if moe.shared_experts:
            shared = self._mlp(prefix + "shared_experts.", wide * moe.shared_experts, summed=False)
        return Moe(Router(moe, weight, bias), experts, shared)


class TorchDeepseek:
    """`Model` (see models.llama) in torch operations."""

    backend = "torch"

    def __init__(self, config: ModelConfig, reader: WeightReader, tp: TensorParallel = SINGLE) -> None:
        """Reads rank `tp.rank`'s weights. DataLoss for tensors that are missing or not of the config's shapes,
        InvalidArgument for a number of ranks that does not divide the model."""
        mla = config.mla
        if mla is None:
            raise Internal("a config without latent attention")
        check_parallel(config, tp.size)
        self.config, self.mla, self.tp = config, mla, tp
        ids, rows = vocab_part(config.vocab_size, tp)
        table = (config.vocab_size, config.hidden_size)
        embed = reader.read("model.embed_tokens.weight", table, rows=ids, pad_rows=rows)
        self.norm = reader.read("model.norm.weight", (config.hidden_size,))
        tied = config.tie_embeddings or not reader.has("lm_head.weight")
        head = embed if tied else reader.read("lm_head.weight", table, rows=ids, pad_rows=rows)
        self.embed, self.head = Embedding(embed, config.vocab_size, tp), Head(head, config.vocab_size, tp)
        self.rotary = RotaryTable(config.rope, mla.qk_rope_head_dim)
        blocks = _Reader(config, mla, reader, tp)
        self.blocks = [blocks.block(i) for i in range(config.num_layers)]
        self.heads = blocks.heads.stop - blocks.heads.start
        # After the layers were found: a corrupt count of them would take all memory here.
        self.kv_group = latent_group(config, mla)

    def bind(self, kv: PagedKv) -> None:
        """Nothing to prepare."""

    def forward(self, plan: StepPlan, kv: PagedKv, kv_ready: Callable[[int], None]) -> torch.Tensor:
        """See `Model.forward`."""
        eps, alone = self.config.rms_eps, self.tp.size == 1
        x = self.embed(plan.token_ids)
        cos_sin = self.rotary.ensure(plan.max_position + 1)[plan.positions]
        for i, block in enumerate(self.blocks):
            q = self._append(block.attn, rms_norm(x, block.attn_norm, eps), cos_sin, kv.layers[i], plan)
            if alone:
                kv_ready(i)
            x = x + block.attn.out(latent_attention(kv.layers[i], q, plan, block.attn.kv_up))
            if not alone:
                # Their sum is here, so every rank has appended.
                kv_ready(i)
            hidden = rms_norm(x, block.mlp_norm, eps)
            if isinstance(block.mlp, Moe):
                # One sum over ranks for routed and shared experts together.
                x = x + self.tp.all_reduce(block.mlp(hidden)).to(x.dtype)
            else:
                x = x + block.mlp(hidden)
        return rms_norm(x, self.norm, eps)

    def _append(
        self, attn: _Attention, x: torch.Tensor, cos_sin: torch.Tensor, layer: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        """This step's latents into the pages → rotated queries (tokens, heads, nope + rope)."""
        m = self.mla
        kv = attn.kv_down(x)
        latent = rms_norm(kv[:, : m.kv_lora_rank], attn.kv_norm, _LATENT_EPS)
        append_latent(layer, latent, apply_rotary(kv[:, None, m.kv_lora_rank :], cos_sin)[:, 0], plan)
        if attn.q_down is not None and attn.q_norm is not None:
            x = rms_norm(attn.q_down(x), attn.q_norm, _LATENT_EPS)
        q = attn.q_up(x).view(len(x), self.heads, m.qk_head_dim)
        rotated = apply_rotary(q[..., m.qk_nope_head_dim :], cos_sin)
        return torch.cat([q[..., : m.qk_nope_head_dim], rotated], dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden)
