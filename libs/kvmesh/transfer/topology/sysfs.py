"""Reading sysfs where anything may be missing, unreadable or nonsense: what cannot be read is None, never an error."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAX_TEXT_BYTES = 64 << 10
MAX_ENTRIES = 4096
# More CPUs than any machine has: a bound on what a broken file may make us hold.
MAX_CPUS = 1 << 16
_DIGITS = re.compile(r"(\d+)")


def read_text(path: Path) -> str | None:
    """A file's text without the blanks around it."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode(errors="replace").strip()
    except OSError:
        # Some entries of sysfs exist and answer EINVAL.
        return None


def read_int(path: Path) -> int | None:
    """A decimal or 0x number."""
    text = read_text(path)
    if not text or len(text) > 32:
        return None
    try:
        return int(text, 0)
    except ValueError:
        return None


def link_name(path: Path) -> str:
    """The name of what a link points to (a device's driver), "" where it is none."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def names_in(path: Path) -> list[str]:
    """Names in a folder, in an order for people (mlx5_2 before mlx5_10)."""
    try:
        found = os.listdir(path)
    except OSError:
        return []
    return sorted(found, key=natural)[:MAX_ENTRIES]


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which numbers in names count as numbers."""
    # Python's ints have a length limit; a name of sysfs has not.
    return [
        (int(part[:18]), part) if part[:1].isdigit() and part.isascii() else (-1, part) for part in _DIGITS.split(name)
    ]


def parse_cpulist(text: str) -> frozenset[int] | None:
    """`0-3,8` as a set; "" is the empty set (a node of memory alone), None is nonsense."""
    cpus: set[int] = set()
    for part in text.split(","):
        part = part.strip()
        if not part:
            continue
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not first.isascii() or (dash and not (last.isdecimal() and last.isascii())):
            return None
        if len(first) > 9 or len(last) > 9:
            return None
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < MAX_CPUS:
            return None
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def format_cpulist(cpus: frozenset[int]) -> str:
    """And back."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
