"""GPTCache on labelled pairs, run by an interpreter that has it: a folder with pairs.json and vectors.npz in argv[1].

For each pair a cache of its own, as `gptcache.adapter.api.init_similar_cache` makes it (SQLite + FAISS, search
distance, threshold 0.8): `put` the first question, `get` the second. Only the embedder is replaced, by the same
vectors that the others get: the default one is downloaded. Prints a JSON list of whether each pair was served.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gptcache import Cache
from gptcache.adapter.api import get, init_similar_cache, put


class Known:
    """Looks its vectors up."""

    dimension = 384

    def __init__(self, vectors: dict[str, Any]) -> None:
        self._vectors = vectors

    def to_embeddings(self, data: str, **_: object) -> Any:
        return self._vectors[data]


def main() -> None:
    folder = Path(sys.argv[1])
    pairs = json.loads((folder / "pairs.json").read_text())
    with np.load(folder / "vectors.npz", allow_pickle=False) as stored:
        vectors = dict(zip(stored["texts"].tolist(), stored["rows"], strict=True))
    served = []
    for remembered, asked in pairs:
        with tempfile.TemporaryDirectory() as place:
            cache = Cache()
            init_similar_cache(data_dir=place, cache_obj=cache, embedding=Known(vectors))
            put(remembered, "answer", cache_obj=cache)
            served.append(get(asked, cache_obj=cache) is not None)
    print(json.dumps(served))


if __name__ == "__main__":
    main()
