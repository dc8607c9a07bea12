"""The complexity classifier on held-out subjects: AUC, calibration, cost against quality, attacks, time.

    python benchmarks/router.py complexity LABELS… [--cache vectors.npz] [--out benchmarks/results]

LABELS: JSONL files, or the published RouteLLM folder (see tools/training/complexity/labels.py). Writes
router_complexity.txt and .svg; the text is what is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.router.classes.features import of_neutral
from services.router.classes.model import Weights
from services.router.classes.neutral import neutral
from services.router.classes.pools import Classes, Pools
from tools.training.complexity import attacks, fit, judge, labels, report, train
from tools.training.complexity.labels import Row
from tools.training.complexity.train import Embed, Table
from tools.training.complexity.vectors import Vectors

ATTACKED = 40


def rule(t: Table, seed: int) -> tuple[list[str], train.HeldOut, train.Verdict]:
    """Figures of both targets on the judged subjects, of the first on the design third and on all subjects too."""
    judged = train.judged_rows(t, everything=False)
    lines = report.data_lines(t, judged)
    kept: list[tuple[train.HeldOut, train.Verdict]] = []
    for target in train.TARGETS:
        one = replace(t.data, y=t.labels(target))
        held = train.held_out(one, seed=seed)
        kept.append((held, train.verdict(one, held, judged, seed=seed)))
        lines += ["", *report.verdict_lines(f"target {target!r}, judged subjects", kept[-1][1])]
        if target == "right":
            every = train.verdict(one, held, np.ones(len(judged), dtype=bool), seed=seed)
            lines += ["", *report.verdict_lines("target 'right', all subjects (a third of them seen in design)", every)]
    held, verdict = kept[0]
    lines += ["", "cost against quality, target 'right', judged subjects", *report.quality_lines(t, held, judged)]
    return lines, held, verdict


def transfer(t: Table, seed: int) -> list[str]:
    """Each source predicted from the others alone."""
    lines = []
    for source in np.unique(t.sources) if len(np.unique(t.sources)) > 1 else ():
        test = t.sources == source
        if len(np.unique(t.data.groups[~test])) < train.MIN_SUBJECTS:
            continue
        found = []
        for name in train.MODELS:
            columns, use_vector = train.seen(name)
            one = fit.fit(t.data.of(~test), columns=columns, use_vector=use_vector, seed=seed)
            p = one.probabilities(t.data.x[test], t.data.e[test])
            found.append(f"{name} {judge.auc(t.data.y[test], p):.3f}")
        lines.append(f"source {source} held out whole, {int(test.sum())} rows: AUC " + "  ".join(found))
    return lines


def growth(t: Table, judged: npt.NDArray[np.bool_], seed: int) -> list[str]:
    """Whether more labels would help: the AUCs by the part of the training rows that was used."""
    lines = []
    for share in (0.25, 0.5, 1.0):
        held = train.held_out(t.data, seed=seed, models=("classifier", "features"), share=share).probabilities
        found = {name: judge.auc(t.data.y[judged], p[judged]) for name, p in held.items()}
        told = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        lines.append(
            f"trained on {share:.0%} of the rows: AUC {told}  gain {found['classifier'] - found['features']:+.3f}"
        )
    return lines


def attack(weights: Weights, rows: list[Row], embed: Embed) -> list[str]:
    """How far one appended or prefixed sentence moves the probability."""
    picked = np.random.default_rng(1).choice(len(rows), min(ATTACKED, len(rows)), replace=False)

    def probability(text: str) -> float | None:
        read = neutral(text)
        vector = embed(read)
        return None if vector is None else weights.probability(of_neutral(read, len(text)), vector)

    lines = []
    for kind, sentences in (("recognised", attacks.RECOGNISED), ("not recognised", attacks.UNRECOGNISED)):
        moved = []
        for i in picked:
            text = rows[i].text.rstrip()
            text += "" if text[-1] in ".?!" else "."
            base = probability(text)
            for sentence in sentences:
                for attacked in (f"{text} {sentence}", f"{sentence} {text}"):
                    p = probability(attacked)
                    if base is not None and p is not None:
                        moved.append(abs(p - base))
        lines.append(
            f"attacks, {kind}: {len(moved)} texts, probability moved by mean {np.mean(moved):.3f}, "
            f"p99 {np.quantile(moved, 0.99):.3f}, most {max(moved):.3f}"
        )
    return lines


def speed(weights: Weights, rows: list[Row], embed: Embed) -> list[str]:
    """Time of a decision without the embedding."""
    classes = Classes({"auto": Pools("small", "large")}, weights, 0.5)
    vector = embed(neutral(rows[0].text))
    assert vector is not None
    spent = []
    for row in rows[:500]:
        start = time.thread_time()
        classes.choose("auto", classes.reading(row.text), vector, session_id="s", tenant="t")
        spent.append(time.thread_time() - start)
    big = "What is 2 + 2, and why? " * 45000
    start = time.thread_time()
    classes.choose("auto", big, embed(classes.reading(big)))
    lone = time.thread_time() - start
    p50, p99 = np.quantile(spent, (0.5, 0.99)) * 1e3
    return [
        f"processor time of a decision without embedding: p50 {p50:.2f} ms, p99 {p99:.2f} ms",
        f"a prompt of 1 MB: {lone * 1e3:.1f} ms, tokenizing its cut text included",
    ]


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("paths", nargs="+", type=Path)
    options.add_argument("--cache", type=Path)
    options.add_argument("--prompt", default="stem", choices=("stem", "whole"))
    options.add_argument("--embedder", default="minilm")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = options.parse_args(argv)
    rows = labels.read(args.paths, prompt=args.prompt)
    embed = Vectors(args.embedder, args.cache)
    t = train.table(rows, embed)
    lines, held, verdict = rule(t, args.seed)
    weights = train.weights(t, held, verdict, embedder=args.embedder, target="right", seed=args.seed)
    lines += ["", *growth(t, train.judged_rows(t, everything=False), args.seed), "", *transfer(t, args.seed)]
    lines += ["", *attack(weights, rows, embed), *speed(weights, rows, embed)]
    embed.save()
    text = "\n".join(["complexity classifier (python benchmarks/router.py complexity LABELS)", "", *lines]) + "\n"
    print(text, end="")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "router_complexity.txt").write_text(text, encoding="utf-8")
    judged = train.judged_rows(t, everything=False)
    small = float(t.weak[judged].mean() / t.strong[judged].mean())
    judge.plot(
        args.out / "router_complexity.svg",
        report.curves(t, held, judged),
        small,
        "Complexity classes: quality against cost, held-out subjects",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
