"""Small random models of the Llama family, written by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS = {
    "plain": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "head_dim": (LlamaConfig, LlamaForCausalLM, {"head_dim": 32}),
    "mqa": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "linear_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    ),
    "llama3_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
}


def make_tiny(directory: Path, variant: str, dtype: torch.dtype = torch.float32, **save: object) -> torch.nn.Module:
    """Write a random model of `variant` and return it."""
    config_type, model_type, extra = VARIANTS[variant]
    torch.manual_seed(17)
    model = model_type(config_type(**{**TINY, **extra})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that attention is far from uniform and biases and norms matter.
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (1.0 if parameter.dim() == 1 else 0.0))
    model = model.to(dtype)
    model.save_pretrained(directory, **save)
    return model
