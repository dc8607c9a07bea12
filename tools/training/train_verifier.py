# ruff: noqa: E501, E402 (lines of tables; runs as a script from anywhere)
"""Train the semantic cache's verifier and print what it and the guards let through.

    python tools/training/train_verifier.py

Trains on generated pairs of the training topics and categories only, chooses the threshold on training pairs by
cross-validation over templates, tests on whole topics and whole categories that were held out, and writes
services/router/match/verifier.npz. Seeds are fixed: it gives the same file again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "libs")]

import traps
from cosines import cosines
from paraphrases import Pair, groups, near_repeats, paraphrases

from services.router.match.align import align
from services.router.match.features import NAMES, features
from services.router.match.guards import refuse, same_text
from services.router.match.reading import read
from services.router.match.verifier import FILE, VERSION, Verifier, expand
from services.router.match.wilson import wilson

HELD_OUT_TOPICS = ("travel", "law", "pets", "sports", "school", "lines")
SEED = 5
TAU = 0.7
FOLDS = 5
RIDGE = 3.0
TARGET = 0.01
TRAP_WEIGHT = 1.0

Rows = npt.NDArray[np.float64]


def pairs(seed: int, per_template: int, per_form: int, topics: set[str] | None, *, held_out: bool) -> list[Pair]:
    """Generated pairs, each once. `held_out`: those for the test."""
    rng = random.Random(seed)
    everyone = groups(rng, per_template)
    chosen = [g for g in everyone if topics is None or (g.topic in HELD_OUT_TOPICS) == held_out]
    found: list[Pair] = []
    for group in chosen:
        found += paraphrases(group) + near_repeats(rng, group, per_form) + traps.traps(rng, group, everyone, per_form)
    found += traps.lines(rng, 12 * per_form)
    kept = {}
    for pair in found:
        if pair.topic == "lines" or pair.category in traps.HELD_OUT:
            wanted = held_out
        else:
            wanted = (pair.topic in HELD_OUT_TOPICS) == held_out
        if wanted and pair.asked != pair.remembered:
            kept[(pair.asked, pair.remembered)] = pair
    return list(kept.values())


def read_pairs(found: list[Pair]) -> tuple[list[str], Rows, Rows]:
    """Of each pair the guard that refused it ("same text" for no difference at all), its features and cosine."""
    vectors = cosines([(p.asked, p.remembered) for p in found])
    guards, rows = [], np.zeros((len(found), len(NAMES)))
    for i, pair in enumerate(found):
        a, b = read(pair.asked), read(pair.remembered)
        if same_text(a, b):
            guards.append("same text")
            continue
        if a.raw > b.raw:
            a, b = b, a
        aligned = align(a, b)
        guards.append(refuse(a, b, aligned))
        rows[i] = features(a, b, aligned, float(vectors[i]))
    return guards, rows, vectors


def fit(rows: Rows, labels: Rows, weights: Rows) -> Rows:
    """Ridge logistic regression by Newton's method: (terms,)."""
    beta = np.zeros(rows.shape[1])
    penalty = np.full(rows.shape[1], RIDGE)
    penalty[0] = 1e-3
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(rows @ beta, -30, 30)))
        gradient = rows.T @ (weights * (p - labels)) + penalty * beta
        hessian = (rows * (weights * p * (1 - p))[:, None]).T @ rows + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        beta -= step
        if np.abs(step).max() < 1e-8:
            break
    return beta


def scores(rows: Rows, mean: Rows, scale: Rows, beta: Rows) -> Rows:
    """Probabilities."""
    return 1.0 / (1.0 + np.exp(-np.clip(expand(np.clip((rows - mean) / scale, -4, 4)) @ beta, -60, 60)))


def table(
    title: str,
    found: list[Pair],
    served: npt.NDArray[np.bool_],
    guarded: npt.NDArray[np.bool_],
    near: npt.NDArray[np.bool_],
) -> None:
    """Prints a line per category and one for all traps and all others."""
    print(
        f"\n{title}\n{'category':14} {'pairs':>6} {'cos ≥ τ':>8} {'+ guards':>9} {'served':>7} {'rate':>7}   95 % (Wilson)"
    )
    by: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for i, pair in enumerate(found):
        by[(pair.same, pair.category)].append(i)
        by[(pair.same, "all same" if pair.same else "all traps")].append(i)
    for (_, name), at in sorted(by.items()):
        n, hits = len(at), int(served[at].sum())
        low, high = wilson(hits, n)
        print(
            f"{name:14} {n:6d} {int(near[at].sum()):8d} {int(guarded[at].sum()):9d} {hits:7d} {hits / n:7.4f}   {low:.4f}–{high:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    train = pairs(SEED, 4, 2, {"all"}, held_out=False)
    guards, rows, vectors = read_pairs(train)
    labels = np.array([float(p.same) for p in train])
    use = np.array([g == "" for g in guards]) & (vectors >= 0.5)
    print(
        f"{len(train)} training pairs, {int((labels == 0).sum())} of them traps; {int(use.sum())} pass the guards and train"
    )
    mean, scale = rows[use].mean(axis=0), rows[use].std(axis=0) + 1e-6
    x, y = expand(np.clip((rows[use] - mean) / scale, -4, 4)), labels[use]
    w = np.where(y == 0, TRAP_WEIGHT, 1.0)
    template = np.array([p.template for p in train])[use]
    out_of_fold = np.zeros(len(y))
    for fold in range(FOLDS):
        test = template % FOLDS == fold
        beta = fit(x[~test], y[~test], w[~test])
        out_of_fold[test] = 1.0 / (1.0 + np.exp(-np.clip(x[test] @ beta, -60, 60)))
    near = vectors[use] >= TAU
    all_traps = int((labels == 0).sum())
    print(
        f"threshold by cross-validation over templates at τ {TAU}: false hits of {all_traps} traps, hits of {int(labels.sum())} same"
    )
    chosen = 0.995
    for threshold in (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995):
        passed = near & (out_of_fold >= threshold)
        false, true = int((passed & (y == 0)).sum()), int((passed & (y == 1)).sum())
        print(f"  {threshold:.3f}: {false / all_traps:.4f} {true / labels.sum():.4f}")
        if false / all_traps <= TARGET and chosen == 0.995:
            chosen = threshold
    print(f"the smallest with at most {TARGET:.1%} false hits: {chosen}")
    beta = fit(x, y, w)
    np.savez(
        options.out,
        version=np.array(VERSION, dtype=np.int32),
        names=np.array(NAMES, dtype="<U40"),
        mean=mean,
        scale=scale,
        weights=beta,
    )
    Verifier(options.out)
    print(f"wrote {options.out.name}, {options.out.stat().st_size} bytes")
    test = pairs(SEED + 1, 6, 2, {"all"}, held_out=True)
    for title, found in (("training pairs", train), ("held-out topics and categories", test)):
        g, r, v = (guards, rows, vectors) if found is train else read_pairs(found)
        is_near = v >= TAU
        plain = np.array([name in ("", "same text") for name in g])
        trusted = np.array([name == "same text" for name in g]) | (scores(r, mean, scale, beta) >= chosen)
        table(f"{title}, τ {TAU}, threshold {chosen}", found, is_near & plain & trusted, is_near & plain, is_near)


if __name__ == "__main__":
    main()
