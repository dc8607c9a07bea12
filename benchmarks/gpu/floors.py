"""What a model's shape costs at the rates measured on an H200, and the peer's figures.

Rates: 4.3 TB/s of device memory (copy, bytes read and written), 798 TFLOP/s of a large bf16 product, 464 TFLOP/s of
paged prefill attention at 4,000 tokens (FlashInfer fa3).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

BYTES_PER_S = 4.3e12
GEMM_FLOPS = 798e12
ATTENTION_FLOPS = 464e12
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Shape:
    """A dense GQA model in bf16."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    vocab: int

    @classmethod
    def of(cls, config: Path) -> Shape:
        raw = json.loads(config.read_text(encoding="utf-8"))
        heads = raw["num_attention_heads"]
        return cls(
            raw["num_hidden_layers"],
            raw["hidden_size"],
            heads,
            raw["num_key_value_heads"],
            raw.get("head_dim") or raw["hidden_size"] // heads,
            raw["intermediate_size"],
            raw["vocab_size"],
        )

    @property
    def layer_parameters(self) -> int:
        """Elements of a layer's matrices."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv) + 3 * self.hidden * self.wide

    @property
    def step_weight_bytes(self) -> int:
        """Weights that each step reads: all but the embedding."""
        return 2 * (self.layers * self.layer_parameters + self.vocab * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """K and V of a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def decode_ms(self, batch: int, context: float) -> float:
        """A decode step by the bytes that it must read."""
        return (self.step_weight_bytes + batch * context * self.kv_bytes) / BYTES_PER_S * 1e3

    def prefill_rate(self, prompt: int) -> float:
        """Prompt tokens a second by the operations that they take, each layer whole, at the rates above.

        Not quite a floor for our steps: behind the last layer's K and V they compute sampled rows alone (3 % of the
        operations of 32 layers), and attend to whole prompts without pages, faster than the rate above.
        """
        products = 2 * self.layers * self.layer_parameters / GEMM_FLOPS
        # Causal: half of the prompt on average.
        attention = 4 * self.layers * self.heads * self.head_dim * (prompt / 2) / ATTENTION_FLOPS
        return 1 / (products + attention)


# vLLM 0.25.0 on the same shape (Llama-3.1-8B, random weights, 4,000 in and 500 out, all at once, prefix cache off),
# measured on such a machine: prefill tok/s, decode step ms, decode tok/s, end to end tok/s out. By concurrency.
VLLM = {
    1: (43_500, 5.07, 197, 191),
    10: (40_600, 6.79, 1_473, 1_143),
    20: (40_700, 8.44, 2_369, 1_619),
    64: (40_800, 13.9, 4_611, 2_424),
    128: (40_800, 22.9, 5_581, 2_667),
}
