"""The judge of shadowed hits on labelled pairs: how often it is right, on topics that it was not made on.

    python benchmarks/router.py judge [--fit] [--pairs FILE]

Each line of the pairs has a question, one that asks the same and one that comes near, a fresh answer to the first and
remembered ones to the others: a right and a wrong hit. A topic is for tuning or held out. `--fit` prints the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.router.cache.stored import refusal
from services.router.judge import Verdict, head, judge
from services.router.judge.evidence import NAMES, Closeness, closeness, evidence
from services.router.judge.rate import SKILL, Skill, corrected
from services.router.match import judge as questions
from services.router.match.wilson import wilson
from services.router.near.embedder import Embedder, MiniLmEmbedder

PAIRS = Path(__file__).resolve().parents[2] / "tests" / "unit" / "router" / "judge_pairs.jsonl"
RIDGE = 5.0
LOST = 0.05
"""Share of right pairs that the threshold may give up, on tuning topics left out in turn."""

Array = npt.NDArray[np.float64]


class Pair(NamedTuple):
    """A hit that was asked again, with the truth. cosine: of the questions."""

    topic: str
    tuning: bool
    right: bool
    asked: str
    remembered: str
    served: str
    fresh: str
    close: Closeness
    cosine: float


def load(path: Path, embedder: Embedder) -> list[Pair]:
    """Two pairs a line. Raises ValueError, naming the line, for one that lacks a text."""
    groups = []
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            groups.append(
                {k: str(row[k]) for k in ("half", "topic", "asked", "twin", "near", "fresh", "right", "wrong")}
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"{path.name}, line {at}: {exc!r}") from exc
    texts = [head(g[k]) for g in groups for k in ("asked", "twin", "near", "fresh", "right", "wrong")]
    if {group["half"] for group in groups} != {"tune", "held"}:
        raise ValueError(f'{path.name}: there must be pairs of the halves "tune" and "held", and of no other')
    vector = dict(zip(texts, embedder.embed_batch(texts), strict=True))
    pairs = []
    for group in groups:
        tuning = group["half"] == "tune"
        asked, fresh = group["asked"], group["fresh"]
        for right, remembered, served in (
            (True, group["twin"], group["right"]),
            (False, group["near"], group["wrong"]),
        ):
            four = [vector[head(text)] for text in (asked, remembered, served, fresh)]
            cosine = float(np.dot(four[0], four[1]))  # type: ignore[arg-type]
            close = closeness(*four)
            assert close is not None, asked
            pairs.append(Pair(group["topic"], tuning, right, asked, remembered, served, fresh, close, cosine))
    return pairs


def decide(pairs: Sequence[Pair]) -> list[Verdict]:
    """The judge's verdicts."""
    return [judge(p.asked, p.remembered, p.served, p.fresh, p.close) for p in pairs]


def skill(pairs: Sequence[Pair], verdicts: Sequence[Verdict]) -> Skill:
    """Of those that got a verdict."""
    told = [
        (pair.right, verdict.right) for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.right is not None
    ]
    wrong, right = [v for truth, v in told if not truth], [v for truth, v in told if truth]
    return Skill(wrong.count(False), len(wrong), right.count(True), len(right))


def fit(pairs: Sequence[Pair]) -> tuple[float, Array, float]:
    """(bias, weights, threshold) of the tuning pairs: ridge logistic; the threshold by leaving topics out in turn."""
    # Where nobody answered there is nothing to learn.
    pairs = [pair for pair in pairs if pair.tuning and not refusal(pair.fresh) and not refusal(pair.served)]
    table = np.array([evidence(p.asked, p.served, p.fresh, p.close) for p in pairs])
    truth = np.array([p.right for p in pairs], dtype=np.float64)
    topics = np.array([p.topic for p in pairs])
    scores = np.zeros(len(pairs))
    for topic in dict.fromkeys(topics):
        out = topics == topic
        bias, weights = _logistic(table[~out], truth[~out])
        scores[out] = bias + table[out] @ weights
    least = float(np.quantile(scores[truth == 1], LOST))
    bias, weights = _logistic(table, truth)
    return bias, weights, 1 / (1 + np.exp(-least))


def _logistic(table: Array, truth: Array) -> tuple[float, Array]:
    mean, scale = table.mean(axis=0), table.std(axis=0) + 1e-9
    rows = np.column_stack([np.ones(len(table)), (table - mean) / scale])
    ridge = np.diag([0.0] + [RIDGE] * table.shape[1])
    weights = np.zeros(rows.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-rows @ weights))
        weights -= np.linalg.solve(
            rows.T @ (rows * (p * (1 - p))[:, None]) + ridge, rows.T @ (p - truth) + ridge @ weights
        )
    plain = weights[1:] / scale
    return float(weights[0] - plain @ mean), plain


def share(hits: int, trials: int) -> str:
    """A rate with its interval."""
    low, high = wilson(hits, trials)
    return f"{hits:3d} of {trials:3d} = {hits / max(1, trials):.3f}   95 % {low:.3f} to {high:.3f}"


def report(title: str, pairs: Sequence[Pair], *, mistakes: bool = False) -> None:
    """Accuracy, sensitivity and specificity."""
    verdicts = decide(pairs)
    found = skill(pairs, verdicts)
    print(f"\n{title}: {len(pairs)} pairs of {len({p.topic for p in pairs})} topics, half of them wrong hits")
    print(f"  no verdict   {sum(v.right is None for v in verdicts)}")
    print(f"  accuracy     {share(found.found + found.kept, found.wrong + found.right)}")
    print(f"  sensitivity  {share(found.found, found.wrong)}   (wrong hits called wrong)")
    print(f"  specificity  {share(found.kept, found.right)}   (right hits called right)")
    if mistakes:
        for pair, verdict in zip(pairs, verdicts, strict=True):
            if verdict.right not in (None, pair.right):
                truth = "right" if pair.right else "wrong"
                print(f"    {verdict.probability:.2f} {truth}: {pair.asked} | {pair.remembered}")


def main(argv: Sequence[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="router.py judge", description=__doc__)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--fit", action="store_true", help="print weights made on the tuning pairs, and judge nothing")
    parser.add_argument("--mistakes", action="store_true", help="name those of the tuning pairs")
    args = parser.parse_args(argv)
    try:
        pairs = load(args.pairs, MiniLmEmbedder())
    except (OSError, ValueError) as exc:
        print(exc, file=sys.stderr)
        return 1
    if args.fit:
        bias, weights, threshold = fit(pairs)
        print(f"BIAS = {bias:.2f}\nWEIGHTS = ({', '.join(f'{weight:.2f}' for weight in weights)})")
        print(f"THRESHOLD = {threshold:.2f}\n# {', '.join(NAMES)}")
        return 0
    held = [pair for pair in pairs if not pair.tuning]
    report("Tuning", [pair for pair in pairs if pair.tuning], mistakes=args.mistakes)
    report("Held out", held)
    began = time.perf_counter()
    measured = skill(held, decide(held))
    print(f"\na verdict takes {(time.perf_counter() - began) / len(held) * 1e3:.2f} ms without its embeddings")
    print(f"shipped with {SKILL}" + ("" if measured == SKILL else f", BUT MEASURED {measured}"))
    served = [questions(p.asked, p.remembered, p.cosine).same for p in pairs]
    passed = [sum(s for s, p in zip(served, pairs, strict=True) if p.right is right) for right in (True, False)]
    print(f"guards and verifier would serve {passed[0]} right and {passed[1]} wrong pairs of {len(pairs) // 2} each")
    print("\nwhat shadows would show (corrected rate, 95 % interval):")
    for judged, wrong in ((100, 5), (100, 10), (1000, 30), (1000, 50), (1000, 100), (10000, 500)):
        rate, low, high = corrected(wrong, judged)
        print(f"  {wrong:4d} of {judged:5d} called wrong: {rate:.3f}, {low:.3f} to {high:.3f}")
    return 0 if measured == SKILL else 1
