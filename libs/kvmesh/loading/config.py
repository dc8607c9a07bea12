"""What a decoder-only model looks like, whichever file says so. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from kvmesh.errors import DataLoss

RopeKind = Literal["default", "linear", "llama3", "yarn"]
MoeMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `linear` divides positions by `factor`; `llama3` stretches low frequencies only; `yarn`
    (arXiv:2309.00071) too, between the dimensions that turn `beta_fast` and `beta_slow` times in `original_max_len`.

    attention_factor multiplies cos and sin. mscale_all_dim: yarn's second scale, of the whole score (`MlaConfig`).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much yarn sharpens attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a token's KV is one vector of `latent_dim` elements
    that all heads share. Sizes in elements.

    q_lora_rank None: queries come from the hidden state directly. interleaved: the checkpoint's rotary rows are in
    neighbouring-pair order.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True

    def sizes(self) -> dict[str, int]:
        """What must be positive."""
        return {
            "q_lora_rank": 1 if self.q_lora_rank is None else self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
        }

    @property
    def latent_dim(self) -> int:
        """What a token keeps in each layer: the compressed KV and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def scale(self, rope: RopeConfig) -> float:
        """What scores are multiplied by before the softmax."""
        mscale = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
        return mscale * mscale / math.sqrt(self.qk_head_dim)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts, DeepSeek's kind: in every layer from `first_layer` on, `shared_experts` that see each token
    and `experts_per_token` of `num_experts` chosen by a router.

    method: greedy (softmax scores, the best), group_limited_greedy (softmax; the best of the `top_groups` groups whose
    best expert is best), noaux_tc (sigmoid scores, chosen with a bias added: the best of the `top_groups` groups whose
    two best experts sum highest; arXiv:2412.19437). normalize: the chosen experts' weights sum to 1 before `scaling`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int
    first_layer: int
    method: MoeMethod
    groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scaling: float = 1.0

    def sizes(self) -> dict[str, int]:
        """What must be positive."""
        return {
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            # These may be 0.
            "n_shared_experts + 1": self.shared_experts + 1,
            "first_k_dense_replace + 1": self.first_layer + 1,
            "n_group": self.groups,
            "topk_group": self.top_groups,
        }

    def validate(self, where: str) -> None:
        """DataLoss naming `where` unless each token finds its experts. After the sizes were found positive."""
        per_group = self.num_experts // self.groups
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise DataLoss(f"{where}: {self.num_experts} experts, {self.top_groups} of {self.groups} groups: no such")
        if self.experts_per_token > self.top_groups * per_group:
            raise DataLoss(
                f"{where}: {self.experts_per_token} experts a token out of {self.top_groups} groups of {per_group}"
            )
        if self.method == "noaux_tc" and per_group < 2:
            raise DataLoss(f"{where}: noaux_tc ranks groups by their two best experts, they have {per_group}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """RMSNorm, RoPE, SwiGLU; GQA (the Llama family) or `mla`; dense or `moe`. Sizes in elements, `max_model_len` in
    tokens. With `mla`: num_kv_heads is 1, the latent; head_dim is that of queries and keys.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None

    def validate(self, where: str) -> ModelConfig:
        """Returns self. DataLoss naming `where` if a size cannot be a model's: a corrupt header must not allocate."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_model_len": self.max_model_len,
            **(self.mla.sizes() if self.mla is not None else {}),
            **(self.moe.sizes() if self.moe is not None else {}),
        }
        for name, size in sizes.items():
            if not 0 < size < 1 << 31:
                raise DataLoss(f"{where}: {name} is {size}")
        rope = self.rope
        positive = {"rms_eps": self.rms_eps, "rope theta": rope.theta, "rope factor": rope.factor}
        if rope.kind == "yarn":
            positive |= {
                "rope's attention_factor": rope.attention_factor,
                "rope's beta_slow": rope.beta_slow,
                "rope's span of rotations": rope.beta_fast - rope.beta_slow,
                "rope's original_max_position_embeddings": float(rope.original_max_len),
                "log of rope theta": math.log(rope.theta) if 0 < rope.theta < math.inf else -1.0,
            }
        if self.mla is not None:
            positive["scale of the scores"] = self.mla.scale(rope)
        if self.moe is not None:
            positive["routed_scaling_factor"] = self.moe.scaling
        if rope.kind == "llama3":
            positive["rope's span of frequencies"] = rope.high_freq_factor - rope.low_freq_factor
        for name, value in positive.items():
            # Each of these makes every logit NaN.
            if not (math.isfinite(value) and value > 0):
                raise DataLoss(f"{where}: {name} is {value}")
        if self.num_heads % self.num_kv_heads or (self.mla is None and self.head_dim % 2):
            raise DataLoss(
                f"{where}: {self.num_heads} heads over {self.num_kv_heads} kv heads of {self.head_dim} do not divide"
            )
        if self.mla is not None and self.mla.qk_rope_head_dim % 2:
            raise DataLoss(f"{where}: qk_rope_head_dim is {self.mla.qk_rope_head_dim}, not even")
        if self.moe is not None:
            self.moe.validate(where)
        return self


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What may be said of a model without loading weights. `revision` fingerprints the file contents."""

    name: str
    revision: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
