"""What training tells: one text, for people and for benchmarks/results."""

from __future__ import annotations

import numpy as np

from tools.training.complexity import judge, train
from tools.training.complexity.fit import Array, Mask
from tools.training.complexity.train import HeldOut, Table, Verdict

QUALITIES = (0.95, 0.97, 0.99)


def data_lines(t: Table, judged: Mask) -> list[str]:
    """Sizes and rates."""
    lines = [
        f"rows {len(t.weak)}, subjects {len(t.subjects)}, of them judged {int(judged.sum())} rows of "
        f"{len(np.unique(t.data.groups[judged]))} subjects; {t.dropped} rows without a vector left out",
        f"weak right {t.weak.mean():.3f}, strong right {t.strong.mean():.3f}, "
        f"weak right or strong wrong {t.labels('no_worse').mean():.3f}",
    ]
    for source in np.unique(t.sources):
        rows = t.sources == source
        lines.append(f"  {source}: {int(rows.sum())} rows, weak {t.weak[rows].mean():.3f}")
    return lines


def verdict_lines(name: str, v: Verdict) -> list[str]:
    """AUCs, gain, ECE, and whether the rule is met."""
    return [
        f"{name}: {v.rows} rows of {v.subjects} subjects, each held out",
        "  AUC            " + "  ".join(f"{m} {a:.3f}" for m, a in v.auc.items()),
        "  within subject " + "  ".join(f"{m} {a:.3f}" for m, a in v.within.items()),
        f"  gain over the better baseline {v.gain.difference:+.3f} (95 % {v.gain.low:+.3f} to {v.gain.high:+.3f}; "
        f"bootstrap of {judge.REPLICATES} over subjects)",
        f"  ECE {v.ece:.3f} ({judge.BINS} equal bins; perfect calibration would show {v.ece_floor:.3f} on so few rows)",
        f"  rule (gain >= {train.MARGIN}, interval above 0, ECE <= {train.MAX_ECE}): "
        + ("MET" if v.passed else "NOT MET: ships off"),
    ]


def curves(t: Table, held: HeldOut, judged: Mask) -> dict[str, Array]:
    """Cost–quality curve by model, on the judged rows."""
    return {n: judge.curve(p[judged], t.weak[judged], t.strong[judged]) for n, p in held.probabilities.items()}


def quality_lines(t: Table, held: HeldOut, judged: Mask) -> list[str]:
    """Share of requests that the small pool takes at a quality; confusion at the default one."""
    weak, strong = t.weak[judged], t.strong[judged]
    floor = weak.mean() / strong.mean()
    lines = [f"quality of the small pool alone {floor:.3f} of the large one's"]
    for name, line in curves(t, held, judged).items():
        shares = "  ".join(f"{q:.2f}: {judge.share_at(line, q)[0]:.2f}" for q in QUALITIES)
        kept = judge.recovered(line, weak, strong)
        lines.append(f"  {name:<10} share to the small pool at quality {shares}  gap kept {kept:.3f}")
    low, high = judge.recovered_interval(held.probabilities["classifier"][judged], weak, strong, t.data.groups[judged])
    lines.append(f"  the classifier's gap kept: 95 % {low:.3f} to {high:.3f} (bootstrap over subjects)")
    sent_at_random = "  ".join(f"{q:.2f}: {min(1.0, (1 - q) / (1 - floor)):.2f}" for q in QUALITIES)
    lines.append(f"  {'random':<10} share to the small pool at quality {sent_at_random}  gap kept 0.500")
    line = judge.curve(held.probabilities["classifier"][judged], weak, strong)
    share, threshold = judge.share_at(line, 0.97)
    lines.append(f"confusion at quality .97 (threshold {threshold:.3f}, {share:.2f} to the small pool):")
    for pool, right, wrong in judge.confusion(held.probabilities["classifier"][judged], weak, threshold):
        lines.append(f"  to {pool}: small pool right {right}, wrong {wrong}")
    half = judge.threshold_for_cost(line, 0.5)
    at_half = float(line[line[:, 0] == half][0, 2])
    lines.append(f"half of the requests to the small pool: threshold {half:.3f}, quality {at_half:.3f}")
    return lines
