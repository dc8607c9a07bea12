"""Which τ suits one's own questions: hits and false hits over a file of labelled pairs.

    python -m services.router.match.tune LABELS.jsonl --tenant acme --plot curve.svg

A line is {"asked": "…", "remembered": "…", "same": true}: may the answer to `remembered` be given to `asked`?
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument, KvmeshError
from services.router.match import DEFAULT, Rules, judge
from services.router.match.wilson import wilson

MAX_FILE_BYTES = 64 << 20
MAX_LINES = 100_000
MAX_TEXT_CHARS = 4096
TAUS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99)
TARGET = 0.01


class Embeds(Protocol):
    """Of services.router.near.embedder.Embedder what is needed here."""

    def embed(self, text: str) -> npt.NDArray[np.float32] | None:
        """Unit vector, or None for a text that cannot be told from others."""


@dataclass(frozen=True, slots=True)
class Label:
    """One line of the file."""

    asked: str
    remembered: str
    same: bool


@dataclass(frozen=True, slots=True)
class Point:
    """What τ gives: counts of pairs that are served."""

    tau: float
    hits: int
    same: int
    false: int
    different: int

    @property
    def hit_rate(self) -> float:
        """Served of the pairs that are the same."""
        return self.hits / self.same if self.same else 0.0

    @property
    def false_rate(self) -> float:
        """Served of the pairs that are not."""
        return self.false / self.different if self.different else 0.0


def read_labels(lines: Iterable[str]) -> list[Label]:
    """The pairs of a JSON-lines file. Raises InvalidArgument that names the first bad line; nothing is used then."""
    found = []
    for number, line in enumerate(lines, 1):
        if number > MAX_LINES:
            raise InvalidArgument(f"line {number}: more than {MAX_LINES} lines")
        if line.strip():
            found.append(_label(number, line))
    if not any(label.same for label in found) or all(label.same for label in found):
        raise InvalidArgument("the file needs pairs that are the same and pairs that are not")
    return found


def _label(number: int, line: str) -> Label:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"line {number}: no JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise InvalidArgument(f"line {number}: not an object")
    if unknown := set(row) - {"asked", "remembered", "same"}:
        raise InvalidArgument(f"line {number}: unknown field {sorted(unknown)[0]!r}")
    for name in ("asked", "remembered"):
        text = row.get(name)
        if not isinstance(text, str) or not text.strip():
            raise InvalidArgument(f"line {number}: {name} must be a text that is not empty")
        if len(text) > MAX_TEXT_CHARS:
            raise InvalidArgument(
                f"line {number}: {name} has {len(text)} characters; at most {MAX_TEXT_CHARS} are read"
            )
        if not text.isprintable() and any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            raise InvalidArgument(f"line {number}: {name} is not valid Unicode")
    if not isinstance(row.get("same"), bool):
        raise InvalidArgument(f"line {number}: same must be true or false")
    return Label(row["asked"], row["remembered"], row["same"])


def sweep(
    labels: Sequence[Label], embedder: Embeds, rules: Rules = DEFAULT, taus: Sequence[float] = TAUS
) -> list[Point]:
    """A point for each τ, ascending. Pairs without a vector are never served, as in the router."""
    if any(not 0.0 <= tau <= 1.0 for tau in taus):
        raise InvalidArgument("τ must be within 0 and 1")
    vectors = {text: embedder.embed(text) for label in labels for text in (label.asked, label.remembered)}
    passed: list[tuple[float, bool]] = []
    for label in labels:
        one, other = vectors[label.asked], vectors[label.remembered]
        if one is None or other is None:
            continue
        cosine = float(np.dot(one, other))
        if judge(label.asked, label.remembered, cosine, rules).same:
            passed.append((cosine, label.same))
    same = sum(label.same for label in labels)
    return [
        Point(
            tau,
            sum(cosine >= tau and is_same for cosine, is_same in passed),
            same,
            sum(cosine >= tau and not is_same for cosine, is_same in passed),
            len(labels) - same,
        )
        for tau in sorted(taus)
    ]


def recommend(points: Sequence[Point], target: float = TARGET) -> Point | None:
    """The point of most hits whose false-hit rate is at most `target`, and stays so for every higher τ."""
    best: Point | None = None
    for point in reversed(points):
        if point.false_rate > target:
            break
        if best is None or point.hits >= best.hits:
            best = point
    return best


def table(points: Sequence[Point]) -> str:
    """The curve as text."""
    rows = [f"{'τ':>5} {'hits':>11} {'rate':>6}  {'95 %':13} {'false hits':>11} {'rate':>7}  95 %"]
    for point in points:
        low, high = wilson(point.hits, point.same)
        false_low, false_high = wilson(point.false, point.different)
        rows.append(
            f"{point.tau:5.2f} {point.hits:5d}/{point.same:<5d} {point.hit_rate:6.3f}  {low:.3f}–{high:.3f}   "
            f"{point.false:5d}/{point.different:<5d} {point.false_rate:7.4f}  {false_low:.4f}–{false_high:.4f}"
        )
    return "\n".join(rows)


def plot(points: Sequence[Point], title: str) -> str:
    """Both rates with their intervals over τ, as an SVG document."""
    width, height, left, top, right, bottom = 640, 400, 60, 40, 20, 50
    low_tau, high_tau = points[0].tau, points[-1].tau

    def x(tau: float) -> float:
        return left + (tau - low_tau) / ((high_tau - low_tau) or 1.0) * (width - left - right)

    def y(rate: float) -> float:
        return height - bottom - rate * (height - top - bottom)

    def curve(color: str, name: str, at: int, rate: Callable[[Point], tuple[int, int]]) -> str:
        bounds = [(point.tau, *wilson(*rate(point))) for point in points]
        band = [f"{x(tau):.1f},{y(low):.1f}" for tau, low, _ in bounds]
        band += [f"{x(tau):.1f},{y(high):.1f}" for tau, _, high in reversed(bounds)]
        line = [f"{x(p.tau):.1f},{y(rate(p)[0] / rate(p)[1] if rate(p)[1] else 0.0):.1f}" for p in points]
        return (
            f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.2"/>'
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{left + 10 + at}" y="{top - 8}" fill="{color}">{name}</text>'
        )

    grid = "".join(
        f'<line x1="{left}" x2="{width - right}" y1="{y(r / 5):.1f}" y2="{y(r / 5):.1f}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{y(r / 5) + 4:.1f}" text-anchor="end">{r / 5:.1f}</text>'
        for r in range(6)
    )
    ticks = "".join(
        f'<text x="{x(p.tau):.1f}" y="{height - bottom + 18}" text-anchor="middle">{p.tau:g}</text>'
        for p in points[::2]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{width / 2}" y="16" text-anchor="middle">{_escape(title)}</text>{grid}{ticks}'
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">τ (least cosine)</text>'
        f"{curve('#1668b8', 'hits', 0, lambda p: (p.hits, p.same))}"
        f"{curve('#c4314b', 'false hits', 80, lambda p: (p.false, p.different))}</svg>\n"
    )


def _escape(text: str) -> str:
    kept = "".join(char if char.isprintable() else "?" for char in text)
    return kept.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def read_file(path: Path) -> list[Label]:
    """`read_labels` of a file. Raises InvalidArgument also when it cannot be read or is too large."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidArgument(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidArgument(f"{path} cannot be read: {exc}") from exc
    return read_labels(text.split("\n"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 when the file or an option is bad, 1 when no τ meets the target."""
    parser = argparse.ArgumentParser(prog="kvmesh cache tune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("labels", type=Path)
    parser.add_argument("--tenant", default="", help="named in the advice and the plot")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument(
        "--target", type=float, default=TARGET, help="greatest rate of false hits (default %(default)s)"
    )
    parser.add_argument("--threshold", type=float, default=DEFAULT.threshold, help="of the verifier")
    parser.add_argument("--no-guards", action="store_true", help="vectors and verifier alone")
    parser.add_argument("--embedder", default="minilm", choices=("minilm", "hash"))
    options = parser.parse_args(arguments)
    try:
        if not 0.0 <= options.target <= 1.0:
            raise InvalidArgument(f"the target must be within 0 and 1, not {options.target}")
        rules = Rules(frozenset() if options.no_guards else DEFAULT.guards, options.threshold)
        labels = read_file(options.labels)
        from services.router.near.embedder import load_embedder

        embedder = load_embedder(options.embedder)
        assert embedder is not None
        points = sweep(labels, embedder, rules)
        best = recommend(points, options.target)
        whose = f" for tenant {options.tenant}" if options.tenant else ""
        if options.plot is not None:
            options.plot.write_text(plot(points, f"{options.labels.name}{whose}"), encoding="utf-8")
    except KvmeshError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"error: {options.plot} cannot be written: {exc}", file=sys.stderr)
        return 2
    print(table(points))
    if best is None:
        print(f"no τ keeps false hits at {options.target:.2%} or less{whose}; leave the semantic cache off")
        return 1
    high = wilson(best.false, best.different)[1]
    print(
        f"recommended{whose}: τ = {best.tau:g} ({best.hit_rate:.1%} hits, {best.false_rate:.2%} false hits, "
        f"at most {high:.2%} with 95 % confidence)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
