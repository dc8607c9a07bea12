"""How the rows of a batch are handed from where they are made to where they are posted."""

from __future__ import annotations

from collections.abc import Iterator

ROW = 5
Rows = list[int]
"""Writes, five numbers each and no object for any: source address, lkey, destination address, rkey, bytes."""


def each(rows: Rows) -> Iterator[tuple[int, int, int, int, int]]:
    """One after another."""
    numbers = iter(rows)
    return zip(numbers, numbers, numbers, numbers, numbers, strict=True)
