"""Cutting a write into parts for several NICs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.transports.base import Write

# A run is cut inside only at multiples of this from its start.
GRAIN_BYTES = 4096
# A part for another NIC is not worth its work request below this.
MIN_PART_BYTES = 64 << 10


class Part(NamedTuple):
    """Rows of a write for one rail. nbytes: their sum, at least 1."""

    rail: int
    src: list[int]
    dst: list[int]
    length: list[int]
    nbytes: int


def spread(
    write: Write,
    weights: Sequence[float],
    *,
    first: int = 0,
    grain: int = GRAIN_BYTES,
    min_part: int = MIN_PART_BYTES,
) -> list[Part]:
    """The rows of `write`, each byte once, in stretches of about `weights[rail]` of the whole for each rail.

    Neighbours stay together, so that what merges on the wire goes on merging. A small write is not cut to pieces: no
    more parts than whole `min_part`s (one at least), beginning with rail `first`, which the caller moves on from write
    to write. weights: above 0, one per rail. Parts have different rails. Raises InvalidArgument.
    """
    rails = len(weights)
    if not rails or not all(weight > 0 for weight in weights) or not 0 <= first < rails:
        raise InvalidArgument(f"a write cannot be spread over weights {list(weights)} from rail {first}")
    count = max(1, min(rails, write.nbytes // min_part))
    if count == 1:
        return [Part(first, list(write.src), list(write.dst), list(write.length), write.nbytes)]
    order = [(first + step) % rails for step in range(count)]
    total = float(sum(weights[rail] for rail in order))
    parts: list[Part] = []
    share = 0.0
    row = inside = done = 0
    rows = len(write.length)
    for rail in order[:-1]:
        share += weights[rail]
        until = int(write.nbytes * share / total)
        src: list[int] = []
        dst: list[int] = []
        length: list[int] = []
        begun = done
        while row < rows and done < until:
            whole = write.length[row]
            left = whole - inside
            # To the target, at a multiple of the grain from the row's start; or all of the row.
            end = inside + min(left, until - done)
            cut = whole if end == whole else end // grain * grain
            if cut <= inside:
                break
            src.append(write.src[row] + inside)
            dst.append(write.dst[row] + inside)
            length.append(cut - inside)
            done += cut - inside
            if cut == whole:
                row, inside = row + 1, 0
            else:
                inside = cut
                break
        if length:
            parts.append(Part(rail, src, dst, length, done - begun))
    if row < rows:
        rest = slice(row, rows)
        src, dst, length = list(write.src[rest]), list(write.dst[rest]), list(write.length[rest])
        src[0] += inside
        dst[0] += inside
        length[0] -= inside
        parts.append(Part(order[-1], src, dst, length, write.nbytes - done))
    return parts
