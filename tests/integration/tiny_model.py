"""A small random model of the Llama family with a byte tokenizer, as a Hugging Face directory. No torch is needed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, DIM = 258, 64, 96, 3, 8, 2, 8


def write_tiny(directory: Path, seed: int = 5) -> Path:
    """8 heads over 2 kv heads: 1, 2, 4 and 8 ranks can share it. Greedy answers to it are far from ties."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{prefix}mlp.gate_proj.weight": (WIDE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (WIDE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE),
        }
    # Large enough that attention is far from uniform: a head in the wrong place changes the answer.
    tensors = {name: (rng.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    norms += [f"model.layers.{i}.{n}_layernorm.weight" for i in range(LAYERS) for n in ("input", "post_attention")]
    tensors |= {name: np.ones(HIDDEN, dtype=np.float32) for name in norms}
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "eos_token_id": 257,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "add_bos_token": False}))
    return directory
