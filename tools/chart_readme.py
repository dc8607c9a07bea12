"""The table of values in the chart's README, made of the comments in values.yaml. `--check`: say whether it is current.

A comment that begins with "# -- " describes the key below it; further comment lines go on with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).resolve().parents[1] / "deploy/helm/kvmesh"
BEGIN, END = "<!-- values: python tools/chart_readme.py -->", "<!-- /values -->"
MARK = "# -- "


class Value(NamedTuple):
    """One documented value. `path`: its keys."""

    path: tuple[str, ...]
    default: Any
    text: str


def described(source: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, text) of every key that has a description, in the file's order."""
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in source.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            if bare.startswith(MARK):
                comment = [bare.removeprefix(MARK)]
            elif comment:
                comment.append(bare.lstrip("# "))
            continue
        key, colon, _ = bare.partition(":")
        if not bare or bare.startswith("- ") or not colon:
            comment = []
            continue
        indent = len(line) - len(line.lstrip())
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, key.strip("\"'")))
        if comment:
            yield tuple(name for _, name in stack), " ".join(comment)
        comment = []


def undescribed(tree: Any, known: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Leaves that neither they nor a parent are described of."""
    if path in known:
        return
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from undescribed(value, known, (*path, str(key)))
    else:
        yield ".".join(path)


def values_of(source: str) -> list[Value]:
    """All values. ValueError names those without a description, and descriptions of what is not there."""
    tree = yaml.safe_load(source)
    found = []
    for path, text in described(source):
        here = tree
        for key in path:
            if not isinstance(here, dict) or key not in here:
                raise ValueError(f"{'.'.join(path)}: described, but not a value")
            here = here[key]
        found.append(Value(path, here, text))
    if missing := list(undescribed(tree, {value.path for value in found})):
        raise ValueError(f"without a description: {', '.join(missing)}")
    return found


def table(values: list[Value]) -> str:
    """Markdown, one section a top-level key that has several values."""
    lines = ["| value | default | |", "|---|---|---|"]
    for value in values:
        default = json.dumps(value.default, ensure_ascii=False)
        cells = (f"`{'.'.join(value.path)}`", f"`{default}`", value.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def updated(readme: str, source: str) -> str:
    """The README with a table that is current. ValueError where it has no place for one."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks {BEGIN} … {END}")
    return f"{head}{BEGIN}\n{table(values_of(source))}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """The exit status."""
    readme = CHART / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = updated(old, (CHART / "values.yaml").read_text(encoding="utf-8"))
    if "--check" in arguments:
        if new != old:
            print(f"{readme} is not current: run python tools/chart_readme.py", file=sys.stderr)
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
