"""Small random models with latent attention and experts, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from kvmesh.loading.source import SCRIPTED_EOS, SCRIPTED_VOCAB
from kvmesh.loading.tokenizer import CHATML_TEMPLATE, scripted_tokenizer

MLA_TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_V2 = (DeepseekV2Config, DeepseekV2ForCausalLM)
_V3 = (DeepseekV3Config, DeepseekV3ForCausalLM)
_GROUPS = {"n_group": 4, "topk_group": 2}
MLA_VARIANTS = {
    "v2_greedy": (*_V2, {"topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "v2_groups": (*_V2, {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **_GROUPS}),
    "v2_yarn": (
        *_V2,
        {"topk_method": "greedy", "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "v2_bias_tied": (*_V2, {"topk_method": "greedy", "attention_bias": True, "tie_word_embeddings": True}),
    # Values wider than keys, one pair to rotate.
    "v2_narrow": (*_V2, {"topk_method": "greedy", "qk_rope_head_dim": 2, "qk_nope_head_dim": 6}),
    # The norms inside attention keep their own 1e-6.
    "v3": (*_V3, {**_GROUPS, "rms_norm_eps": 1e-3}),
    "v3_yarn": (*_V3, {**_GROUPS, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3_yarn_unequal": (*_V3, {**_GROUPS, "rope_parameters": {**_YARN, "mscale": 1.3, "mscale_all_dim": 0.6}}),
    "v3_yarn_plain": (*_V3, {**_GROUPS, "rope_parameters": _YARN}),
    "v3_not_normed": (*_V3, {**_GROUPS, "norm_topk_prob": False, "q_lora_rank": None}),
    "v3_half_split": (*_V3, {**_GROUPS, "rope_interleave": False}),
    "v3_bias": (*_V3, {**_GROUPS, "attention_bias": True}),
    "v3_dense": (*_V3, {**_GROUPS, "first_k_dense_replace": 3}),
    "v3_experts_alone": (*_V3, {**_GROUPS, "first_k_dense_replace": 0, "n_shared_experts": 1}),
}


def make_mla(
    directory: Path, variant: str = "v3_yarn", dtype: torch.dtype = torch.float32, **changes: object
) -> torch.nn.Module:
    """Write a random model of `variant`, with `changes` to its config, and return it."""
    config_type, model_type, extra = MLA_VARIANTS[variant]
    # With this seed no expert is chosen by a margin below 2e-4 on the tests' prompts: rounding never decides.
    torch.manual_seed(23)
    model = model_type(config_type(**{**MLA_TINY, **extra, **changes})).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            # Large enough that attention is far from uniform, experts are chosen clearly, biases and norms matter.
            size = (0.5 if config_type is DeepseekV3Config else 0.2) if "mlp.gate." in name else 0.12
            tensor.copy_(torch.randn_like(tensor) * size + (1.0 if name.endswith("norm.weight") else 0.0))
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


def make_mla_service(directory: Path, variant: str = "v3_yarn", **changes: object) -> torch.nn.Module:
    """`make_mla` with what a whole mesh needs: a tokenizer of bytes (id = byte), a chat template, end-of-sequence."""
    sizes = {"vocab_size": SCRIPTED_VOCAB, "bos_token_id": None, "eos_token_id": SCRIPTED_EOS}
    model = make_mla(directory, variant, **{**sizes, **changes})
    scripted_tokenizer().tokenizer.save(str(directory / "tokenizer.json"))
    words = {"eos_token": "<|im_end|>", "chat_template": CHATML_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(words))
    return model
