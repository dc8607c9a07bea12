"""How good held-out probabilities are: AUC with intervals over subjects, calibration error, cost against quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]

BINS = 10
REPLICATES = 2000


def auc(y: Array, p: Array) -> float:
    """Probability that a row with y = 1 has the higher p, ties count half; NaN with one class only."""
    ones = float(y.sum())
    zeros = len(y) - ones
    if not ones or not zeros:
        return float("nan")
    _, place, count = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((ranks[y == 1].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def within(y: Array, p: Array, groups: Groups) -> float:
    """AUC inside subjects, weighted by their pairs: what is left when the subject is known."""
    total = pairs = 0.0
    for g in np.unique(groups):
        rows = groups == g
        weight = y[rows].sum() * (rows.sum() - y[rows].sum())
        if weight:
            total += weight * auc(y[rows], p[rows])
            pairs += weight
    return total / pairs if pairs else float("nan")


@dataclass(frozen=True, slots=True)
class Gain:
    """AUC of the model less that of the better baseline, with the 95 % interval of the bootstrap over subjects."""

    difference: float
    low: float
    high: float


def gain(y: Array, model: Array, baselines: list[Array], groups: Groups, *, seed: int = 0) -> Gain:
    """In each replicate the better of the baselines counts, so the interval pays for having chosen it."""

    def difference(rows: npt.NDArray[np.int64] | slice) -> float:
        return auc(y[rows], model[rows]) - max(auc(y[rows], b[rows]) for b in baselines)

    rng = np.random.default_rng(seed)
    rows_of = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    drawn = [
        difference(np.concatenate([rows_of[i] for i in rng.integers(0, len(rows_of), len(rows_of))]))
        for _ in range(REPLICATES)
    ]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return Gain(difference(slice(None)), float(low), float(high))


def ece(y: Array, p: Array) -> float:
    """Expected calibration error over BINS bins of equal size."""
    order = np.argsort(p, kind="stable")
    bins = np.array_split(order, BINS)
    return float(sum(len(b) * abs(p[b].mean() - y[b].mean()) for b in bins if len(b)) / len(y))


def ece_floor(p: Array, *, seed: int = 0) -> float:
    """ECE that perfectly calibrated probabilities would show on so few rows, on average."""
    rng = np.random.default_rng(seed)
    return float(np.mean([ece((rng.random(len(p)) < p).astype(float), p) for _ in range(200)]))


def curve(p: Array, weak: Array, strong: Array, points: int = 101) -> Array:
    """(K, 3): threshold, share sent to the small pool, quality as a part of the large pool's; by falling threshold.

    A threshold sends every row with p ≥ it, so rows of equal p go together.
    """
    order = np.argsort(-p, kind="stable")
    right = np.where(weak[order] > 0, 1.0, 0.0).cumsum()
    rest = strong.sum() - strong[order].cumsum()
    total = max(1.0, float(strong.sum()))
    rows = []
    for k in np.unique(np.linspace(1, len(p), points).round().astype(int)):
        threshold = p[order[k - 1]]
        last = int((p >= threshold).sum())
        rows.append((threshold, last / len(p), (right[last - 1] + rest[last - 1]) / total))
    found = np.array(rows)
    return np.asarray(found[np.unique(-found[:, 0], return_index=True)[1]])


def recovered(line: Array, weak: Array, strong: Array) -> float:
    """Mean part of the quality gap between the pools that is kept, over all shares; random sending gives .5."""
    low, high = float(weak.mean() / max(strong.mean(), 1e-9)), 1.0
    if high - low < 1e-9:
        return float("nan")
    shares, quality = np.r_[0.0, line[:, 1]], np.r_[1.0, line[:, 2]]
    return float(np.trapezoid((quality - low) / (high - low), shares))


def recovered_interval(p: Array, weak: Array, strong: Array, groups: Groups, *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of `recovered`, bootstrap over subjects (a tenth of REPLICATES: each is a whole curve)."""
    rng = np.random.default_rng(seed)
    rows_of = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    drawn = []
    for _ in range(max(20, REPLICATES // 10)):
        rows = np.concatenate([rows_of[i] for i in rng.integers(0, len(rows_of), len(rows_of))])
        drawn.append(recovered(curve(p[rows], weak[rows], strong[rows], 26), weak[rows], strong[rows]))
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def share_at(line: Array, quality: float) -> tuple[float, float]:
    """(share sent to the small pool, threshold) before the curve first falls below `quality`."""
    share, threshold = 0.0, 2.0
    for t, s, q in line:
        if q < quality:
            break
        share, threshold = float(s), float(t)
    return share, threshold


def threshold_for_cost(line: Array, large_share: float) -> float:
    """Threshold that leaves at most `large_share` of the requests to the large pool."""
    enough = line[line[:, 1] >= 1.0 - large_share]
    return float(enough[0, 0]) if len(enough) else float(line[-1, 0])


def confusion(p: Array, suffices: Array, threshold: float) -> list[tuple[str, int, int]]:
    """Rows (sent to, small pool was right, it was wrong)."""
    sent = p >= threshold
    return [
        ("small", int((sent & (suffices > 0)).sum()), int((sent & (suffices == 0)).sum())),
        ("large", int((~sent & (suffices > 0)).sum()), int((~sent & (suffices == 0)).sum())),
    ]


_COLOURS = ("#1f6feb", "#d97706", "#059669", "#7c3aed")


def plot(path: Path, lines: Mapping[str, Array], weak_quality: float, title: str) -> None:
    """SVG of quality against the share sent to the small pool; the dashed line is random sending."""
    width, height, left, top, w, h = 640, 440, 64, 60, 540, 310
    low = min([weak_quality] + [float(line[:, 2].min()) for line in lines.values()])
    high = max([1.0] + [float(line[:, 2].max()) for line in lines.values()])
    low, high = np.floor(low * 20) / 20, np.ceil(high * 20) / 20

    def at(share: float, quality: float) -> str:
        return f"{left + w * share:.1f},{top + h * (high - quality) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{title}</text>',
    ]
    for i in range(6):
        x = left + w * i / 5
        parts.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{top + h}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x}" y="{top + h + 18}" text-anchor="middle">{i * 20} %</text>')
    for tick in np.arange(low, high + 1e-9, 0.05):
        y = at(0, float(tick)).split(",")[1]
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + w}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{tick:.2f}</text>')
    parts.append(
        f'<polyline points="{at(0, 1.0)} {at(1, weak_quality)}" fill="none" stroke="#9ca3af" stroke-dasharray="5 4"/>'
    )
    for i, (name, line) in enumerate(lines.items()):
        points = " ".join([at(0, 1.0)] + [at(float(s), float(q)) for _, s, q in line])
        colour = _COLOURS[i % len(_COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 12}" y="{top + h - 14 - 16 * i}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{left + 12}" y="{top + h - 14 - 16 * len(lines)}" fill="#6b7280">random (dashed)</text>')
    parts.append(f'<text x="{left + w / 2}" y="{height - 20}" text-anchor="middle">sent to the small pool</text>')
    parts.append(f'<text x="14" y="{top - 14}">quality (large pool = 1)</text></svg>')
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
