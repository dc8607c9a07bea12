# ruff: noqa: E402, E501, I001 (finds the generators beside the trainer; lines of tables)
"""Right and wrong hits of the semantic cache: false hits are trap pairs served of all trap pairs.

    python -m benchmarks.router.quality [--gptcache PYTHON]

On fow-cache (PyPI, CC BY 4.0; looked at for this test only), on generated pairs of topics and categories that the
verifier was not trained on, and on conversations through the router's own policy, partitions and near cache.
`--gptcache` names an interpreter with gptcache, faiss-cpu and sqlalchemy, to run it on the same pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tools" / "training")]

from cosines import cosines, vectors
from paraphrases import near_repeat
from traps import RULES
from train_verifier import SEED, pairs

from kvmesh.proto.v1 import inference_pb2, router_pb2
from services.router.cache.policy import CacheRules, plan
from services.router.match import DEFAULT, Rules, judge
from services.router.match.wilson import wilson
from services.router.near.embedder import MiniLmEmbedder
from services.router.near.nearcache import NearCache

DEFAULT_TAU = 0.7
TAUS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99)
WAIT_S = 60.0


class Row(NamedTuple):
    """A labelled pair."""

    category: str
    same: bool
    asked: str
    remembered: str


def measure(title: str, rows: Sequence[Row]) -> None:
    """A table by category, a sweep over τ, and the time of a judgement."""
    print(f"\n## {title}: {len(rows)} pairs, {sum(not row.same for row in rows)} of them traps")
    cosine = cosines([(row.asked, row.remembered) for row in rows])
    free = Rules(threshold=0.0)
    guarded = [judge(row.asked, row.remembered, float(c), free) for row, c in zip(rows, cosine, strict=True)]
    alone = Rules(guards=frozenset())
    verified = [judge(row.asked, row.remembered, float(c), alone).same for row, c in zip(rows, cosine, strict=True)]
    both = [judge(row.asked, row.remembered, float(c)).same for row, c in zip(rows, cosine, strict=True)]
    ways: list[tuple[str, Callable[[int], bool]]] = [
        ("vectors", lambda i: True),
        ("guards", lambda i: guarded[i].same),
        ("verifier", lambda i: verified[i]),
        ("both", lambda i: both[i]),
    ]
    by: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by[(row.same, row.category)].append(i)
        by[(row.same, "~ all same" if row.same else "~ all traps")].append(i)
    print(f"served at τ {DEFAULT_TAU}, verifier ≥ {DEFAULT.threshold}")
    print(
        f"{'':4} {'category':15} {'pairs':>6} "
        + " ".join(f"{name:>9}" for name, _ in ways)
        + "   rate    95 % (Wilson)"
    )
    for (same, name), at in sorted(by.items()):
        counts = [sum(cosine[i] >= DEFAULT_TAU and way(i) for i in at) for _, way in ways]
        low, high = wilson(counts[-1], len(at))
        print(
            f"{'same' if same else 'trap'} {name:15} {len(at):6d} "
            + " ".join(f"{count:9d}" for count in counts)
            + f"  {counts[-1] / len(at):.4f}  {low:.4f}–{high:.4f}"
        )
    categories = sorted({row.category for row in rows if row.same})
    traps = [i for i, row in enumerate(rows) if not row.same]
    print(
        f"{'τ':>5}  "
        + "  ".join(f"{name:>8} false " + " ".join(f"{c[:11]:>11}" for c in categories) for name, _ in ways)
    )
    for tau in TAUS:
        cells = []
        for _, way in ways:
            false = sum(cosine[i] >= tau and way(i) for i in traps) / max(1, len(traps))
            hits = [sum(cosine[i] >= tau and way(i) for i in by[(True, c)]) / len(by[(True, c)]) for c in categories]
            cells.append(f"{false:14.4f} " + " ".join(f"{hit:11.3f}" for hit in hits))
        print(f"{tau:5.2f}  " + "  ".join(cells))
    sample = [i for i in range(len(rows)) if cosine[i] >= 0.5][:2000]
    spent = []
    for i in sample:
        started = time.perf_counter()
        judge(rows[i].asked, rows[i].remembered, float(cosine[i]))
        spent.append(time.perf_counter() - started)
    print(
        f"judge, texts read before: p50 {np.percentile(spent, 50) * 1e6:.0f} µs, p99 {np.percentile(spent, 99) * 1e6:.0f} µs"
    )


def fow_pairs() -> list[Row] | None:
    """The labelled pairs of fow-cache; None where it is not installed."""
    try:
        from fow_cache.data import load_questions
    except ImportError:
        return None
    return [Row(item["category"], item["same_answer"], item["b"], item["a"]) for item in load_questions()]


def held_out() -> list[Row]:
    """Generated pairs of the topics and categories that were not trained on."""
    found = pairs(SEED + 1, 6, 2, {"all"}, held_out=True)
    return [Row(pair.category, pair.same, pair.asked, pair.remembered) for pair in found]


def beside_gptcache(python: str, rows: Sequence[Row]) -> None:
    """GPTCache's published defaults on the same pairs and vectors."""
    known = vectors(sorted({text for row in rows for text in (row.asked, row.remembered)}))
    usable = [row for row in rows if known[row.asked] is not None and known[row.remembered] is not None]
    with tempfile.TemporaryDirectory() as place:
        texts = sorted({text for row in usable for text in (row.asked, row.remembered)})
        np.savez(Path(place) / "vectors.npz", texts=np.array(texts), rows=np.stack([known[t] for t in texts]))  # type: ignore[misc]
        (Path(place) / "pairs.json").write_text(json.dumps([[row.remembered, row.asked] for row in usable]))
        side = Path(__file__).with_name("gptcache_side.py")
        ran = subprocess.run([python, str(side), place], capture_output=True, text=True, timeout=1200, check=True)
    served = json.loads(ran.stdout.strip().splitlines()[-1])
    print(
        "\nGPTCache 0.1.44, init_similar_cache() as published (SQLite + FAISS, search distance, threshold 0.8), the same vectors"
    )
    by: dict[tuple[bool, str], list[bool]] = defaultdict(list)
    for row, hit in zip(usable, served, strict=True):
        by[(row.same, row.category)].append(hit)
        by[(row.same, "~ all same" if row.same else "~ all traps")].append(hit)
    for (same, name), hits in sorted(by.items()):
        print(f"{'same' if same else 'trap'} {name:15} {len(hits):6d} {sum(hits):6d}  {sum(hits) / len(hits):.3f}")


def request(messages: Sequence[dict[str, str]], user: str) -> router_pb2.RouteRequest:
    """As a gateway sends a chat; `user` keeps the tests apart."""
    return router_pb2.RouteRequest(
        request_id="r",
        gateway_id="g",
        model="m",
        user=user,
        messages=[inference_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages],
        sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=32),
    )


async def conversations() -> None:
    """Pairs of conversations, and conversations asked again in other words, through policy, partition and near cache."""
    try:
        from fow_cache.data import load_conversations
    except ImportError:
        print("\n## conversations: skipped, the package fow-cache is not installed")
        return
    items = load_conversations()
    cache = NearCache(MiniLmEmbedder, max_entries=10_000, max_bytes=64 << 20, ttl_s=3600.0, embed_timeout_s=WAIT_S)
    cache.start()
    await asyncio.to_thread(cache.settled.wait, WAIT_S)
    rules = CacheRules(embedder=cache.embedder_id or "minilm")

    def semantic(messages: list[dict[str, str]]) -> bool:
        return plan(request(messages, "u"), "t", rules, 1).semantic

    async def served(number: int, a: list[dict[str, str]], b: list[dict[str, str]]) -> bool:
        first, second = (plan(request(messages, f"u{number}"), "t", rules, 1) for messages in (a, b))
        if not first.semantic or not second.semantic:
            return first.key.exact == second.key.exact
        if first.key.exact == second.key.exact:
            return True
        assert await cache.store(first.key, b"answer", WAIT_S)
        return (await cache.lookup(second.key, DEFAULT_TAU, WAIT_S)).result == "hit"

    counts: dict[tuple[bool, str], list[bool]] = defaultdict(list)
    number = 0
    for item in items:
        number += 1
        hit = await served(number, item["a"], item["b"])
        alike = item["a"][:-1] == item["b"][:-1]
        name = f"{item['subtype']}{' (history equal)' if alike else ''}"
        counts[(item["same_answer"], name)].append(hit)
        counts[(item["same_answer"], "~ all")].append(hit)
    rng = random.Random(SEED)
    for item in items:
        for _ in range(2):
            *history, last = item["a"]
            asked = near_repeat(rng, last["content"])
            number += 1
            again = [*history, last | {"content": asked}]
            hit = await served(number, item["a"], again)
            # A relative date, say: such a request is answered from an equal one only.
            kind = "in other words" if semantic(item["a"]) and semantic(again) else "exact only by policy"
            counts[(True, f"~ history equal, {kind}")].append(hit)
        for name in ("numbers", "antonym", "negation", "scope", "kind", "word"):
            changed = RULES[name](rng, last["content"])
            if changed and changed != last["content"]:
                number += 1
                hit = await served(number, item["a"], [*history, last | {"content": changed}])
                counts[(False, "~ history equal, last message a trap")].append(hit)
    await asyncio.to_thread(cache.close)
    print(f"\n## conversations of fow-cache: {len(items)} pairs, and each again with the same history")
    for (same, name), hits in sorted(counts.items()):
        low, high = wilson(sum(hits), len(hits))
        print(
            f"{'same' if same else 'trap'} {name:45} {len(hits):5d} served {sum(hits):4d}  "
            f"{sum(hits) / len(hits):.3f}  {low:.3f}–{high:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gptcache", help="an interpreter that has gptcache")
    options = parser.parse_args()
    print(f"$ python -m benchmarks.router.quality{' --gptcache PYTHON' if options.gptcache else ''}")
    rows: Any = fow_pairs()
    if rows is None:
        print("\n## fow-cache: skipped, the package fow-cache is not installed")
    else:
        measure("fow-cache", rows)
        if options.gptcache:
            beside_gptcache(options.gptcache, rows)
    asyncio.run(conversations())
    generated = held_out()
    measure("generated, held-out topics and categories", generated)
    if options.gptcache:
        beside_gptcache(options.gptcache, generated[:: max(1, len(generated) // 1500)])


if __name__ == "__main__":
    main()
