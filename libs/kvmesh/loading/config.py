"""What a decoder-only model looks like, whichever file says so. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from kvmesh.errors import DataLoss


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `linear` divides positions by `factor`; `llama3` stretches low frequencies only."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The Llama family: RMSNorm, GQA, RoPE, SwiGLU. Sizes in elements; `max_model_len` in tokens."""

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
        }
        for name, size in sizes.items():
            if not 0 < size < 1 << 31:
                raise DataLoss(f"{where}: {name} is {size}")
        rope = self.rope
        positive = {"rms_eps": self.rms_eps, "rope theta": rope.theta, "rope factor": rope.factor}
        if rope.kind == "llama3":
            positive["rope's span of frequencies"] = rope.high_freq_factor - rope.low_freq_factor
        for name, value in positive.items():
            # Each of these makes every logit NaN.
            if not (math.isfinite(value) and value > 0):
                raise DataLoss(f"{where}: {name} is {value}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise DataLoss(
                f"{where}: {self.num_heads} heads over {self.num_kv_heads} kv heads of {self.head_dim} do not divide"
            )
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
