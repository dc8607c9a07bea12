"""Vectors of texts, remembered in a file: embedding is nearly all of the time that training takes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.router.near.embedder import Embedder, load_embedder


class Vectors:
    """The embedder of a router's setting, before an optional .npz cache. Call it with a text."""

    def __init__(self, name: str, cache: Path | None = None) -> None:
        """Raises FailedPrecondition for an embedder that cannot be loaded, ValueError for "none"."""
        embedder = load_embedder(name)
        if embedder is None:
            raise ValueError("training needs an embedder")
        self._embedder: Embedder = embedder
        self._cache = cache
        self._known: dict[str, npt.NDArray[np.float32]] = {}
        if cache is not None and cache.exists():
            with np.load(cache, allow_pickle=False) as stored:
                self._known = dict(zip(stored["keys"].tolist(), stored["vectors"], strict=True))

    def __call__(self, text: str) -> npt.NDArray[np.float32] | None:
        """float32 (dim,), None for a text that has no vector."""
        named = f"{self._embedder.name}\0{text}".encode("utf-8", "replace")
        key = hashlib.blake2b(named, digest_size=16).hexdigest()
        found = self._known.get(key)
        if found is None:
            vector = self._embedder.embed(text)
            found = np.full(self._embedder.dim, np.nan, np.float32) if vector is None else vector
            self._known[key] = found
        return found if np.isfinite(found).all() else None

    def save(self) -> None:
        """Write the cache, if there is one."""
        if self._cache is not None:
            np.savez(self._cache, keys=np.array(list(self._known)), vectors=np.array(list(self._known.values())))
