"""Train the complexity classifier on your own labels, or on the published RouteLLM responses.

    python -m tools.training.train_complexity labels.jsonl --judge all --out weights.npz
    python -m tools.training.train_complexity RouteLLM/routellm/evals --prompt stem --out weights.npz

Exit status: 0, weights written that met the rule on held-out subjects; 3, they did not meet it (they are written only
with --unproven, and a router takes those only with class_unproven); 2, bad labels or too few: nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvmesh.errors import KvmeshError
from services.router.classes import model
from tools.training.complexity import judge, labels, report, train
from tools.training.complexity.labels import Row
from tools.training.complexity.train import Embed
from tools.training.complexity.vectors import Vectors


def run(rows: list[Row], embed: Embed, args: argparse.Namespace) -> int:
    """Fit, judge, write; returns the exit status."""
    t = train.table(rows, embed)
    if len(t.weak) < train.MIN_ROWS or len(t.subjects) < train.MIN_SUBJECTS:
        print(
            f"{len(t.weak)} rows of {len(t.subjects)} subjects; at least {train.MIN_ROWS} of {train.MIN_SUBJECTS} "
            "are needed to hold subjects out",
            file=sys.stderr,
        )
        return 2
    t.data.y[:] = t.labels(args.target)
    judged = train.judged_rows(t, args.judge == "all")
    held = train.held_out(t.data, seed=args.seed)
    verdict = train.verdict(t.data, held, judged, seed=args.seed)
    lines = [*report.data_lines(t, judged), *report.verdict_lines(args.target, verdict)]
    lines += report.quality_lines(t, held, judged)
    print("\n".join(lines))
    if args.plot is not None:
        small = float(t.weak[judged].mean() / t.strong[judged].mean())
        judge.plot(args.plot, report.curves(t, held, judged), small, "Quality against cost, held-out subjects")
    if not verdict.passed and not args.unproven:
        print("not written: the rule is not met")
        return 3
    trained = train.weights(t, held, verdict, embedder=args.embedder, target=args.target, seed=args.seed)
    args.out.write_bytes(model.dump(trained))
    print(f"written: {args.out} ({'proven' if verdict.passed else 'unproven'})")
    return 0 if verdict.passed else 3


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("paths", nargs="+", type=Path, help="JSONL files, or folders (JSONL or RouteLLM's CSV)")
    options.add_argument("--out", type=Path, required=True, help="weights file to write (.npz)")
    options.add_argument("--plot", type=Path, help="cost-quality plot to write (.svg)")
    options.add_argument("--embedder", default="minilm", choices=("minilm", "hash"), help="the router's setting")
    options.add_argument("--cache", type=Path, help="file that remembers vectors between runs (.npz)")
    options.add_argument("--prompt", default="stem", choices=("stem", "whole"), help="RouteLLM: question or all of it")
    options.add_argument("--target", default="right", choices=train.TARGETS, help="when the small pool suffices")
    options.add_argument("--judge", default="held-out", choices=("held-out", "all"), help="subjects that the rule sees")
    options.add_argument("--unproven", action="store_true", help="write weights that miss the rule, marked so")
    options.add_argument("--seed", type=int, default=0)
    return options


def main(argv: list[str] | None = None) -> int:
    """The command."""
    args = parser().parse_args(argv)
    try:
        rows = labels.read(args.paths, prompt=args.prompt)
        vectors = Vectors(args.embedder, args.cache)
        status = run(rows, vectors, args)
        vectors.save()
        return status
    except (labels.LabelError, KvmeshError, OSError) as exc:
        print(f"nothing written:\n{exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
