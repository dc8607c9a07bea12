"""Cosines of pairs of texts by the router's embedder, each text embedded once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.router.near.embedder import MiniLmEmbedder, Vector

_EMBEDDED: dict[str, Vector | None] = {}
_EMBEDDER: list[MiniLmEmbedder] = []


def vectors(texts: list[str]) -> dict[str, Vector | None]:
    """Each text's vector; those embedded before, in this process or kept in the folder KVMESH_VECTORS, not again."""
    store = Path(os.environ["KVMESH_VECTORS"]) / "vectors.npz" if "KVMESH_VECTORS" in os.environ else None
    if store is not None and store.exists() and not _EMBEDDED:
        with np.load(store) as kept:
            _EMBEDDED.update(zip(kept["texts"].tolist(), kept["rows"].astype(np.float32), strict=True))
    missing = [text for text in texts if text not in _EMBEDDED]
    if missing and not _EMBEDDER:
        _EMBEDDER.append(MiniLmEmbedder())
    for text in missing:
        _EMBEDDED[text] = _EMBEDDER[0].embed(text)
    if store is not None and missing:
        known = {text: row for text, row in _EMBEDDED.items() if row is not None}
        store.parent.mkdir(parents=True, exist_ok=True)
        np.savez(store, texts=np.array(list(known)), rows=np.stack(list(known.values())).astype(np.float16))
    return {text: _EMBEDDED[text] for text in texts}


def cosines(pairs: list[tuple[str, str]]) -> npt.NDArray[np.float64]:
    """(len(pairs),); -1 where a text has no vector."""
    known = vectors(sorted({text for pair in pairs for text in pair}))
    found = np.full(len(pairs), -1.0)
    for i, (a, b) in enumerate(pairs):
        one, other = known[a], known[b]
        if one is not None and other is not None:
            found[i] = float(np.dot(one, other))
    return found
