"""How much of a prompt each worker already holds: one index over all workers, hash of every 8th block → bitmap.

A prompt's chain is walked once for all workers: the bitmap of those that hold everything up to a hash narrows from hash
to hash, and a worker that drops out holds what came before. A cold prompt costs one look-up. Bitmaps are Python
integers, no longer than their highest bit; those of one walk become one array, from which all depths are read.

A worker that leaves, or starts a snapshot, is masked out at once; its bits are cleared a few at a time with each later
change, and only then is its column given to another.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmesh.kv.hashing import HASH_BYTES

MAX_BLOCKS = 1 << 17
"""Hashes kept of one worker: every 8th of a million blocks. What comes beyond is not known, no more."""

Ints = npt.NDArray[np.int64]

_NONE: Ints = np.zeros(0, np.int64)
_SWEEP_PER_CHANGE = 4
_SWEEP_LEAST = 64


@dataclass(slots=True)
class _Column:
    """One worker's bit and the hashes that have it set."""

    bit: int
    limit: int
    held: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Which owner (a small number, a worker's slot) holds which hashes. Not thread-safe: it lives on the event loop."""

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._columns: dict[int, _Column] = {}
        self._owner_of = np.full(64, -1, np.int64)
        self._used = 0
        self._free: list[int] = []
        self._shown = 0
        self._dirty: deque[_Column] = deque()

    def __len__(self) -> int:
        """Distinct hashes."""
        return len(self._bits)

    # --- what workers say -----------------------------------------------------------------------------------------

    def reset(self, owner: int, limit: int = MAX_BLOCKS) -> None:
        """Forget what the owner holds and hide it until `show`. `limit`: hashes it can hold."""
        self.drop(owner)
        bit = heapq.heappop(self._free) if self._free else self._used
        self._used = max(self._used, bit + 1)
        if bit == len(self._owner_of):
            self._owner_of = np.concatenate([self._owner_of, np.full_like(self._owner_of, -1)])
        self._owner_of[bit] = owner
        self._columns[owner] = _Column(bit, min(limit, MAX_BLOCKS))

    def show(self, owner: int) -> None:
        """What the owner holds is whole: it counts from now on."""
        column = self._columns.get(owner)
        if column is not None:
            self._shown |= 1 << column.bit

    def drop(self, owner: int) -> None:
        """The owner left. Idempotent; takes no time that depends on what it held."""
        column = self._columns.pop(owner, None)
        if column is not None:
            self._shown &= ~(1 << column.bit)
            self._owner_of[column.bit] = -1
            self._dirty.append(column)
            self.sweep(_SWEEP_LEAST)

    def store(self, owner: int, packed: bytes) -> None:
        """The owner holds these hashes, 16 bytes each; those beyond its limit are left out."""
        column = self._columns[owner]
        held, bits, mask = column.held, self._bits, 1 << column.bit
        for block in split(packed):
            if block not in held:
                if len(held) >= column.limit:
                    break
                held.add(block)
                bits[block] = bits.get(block, 0) | mask
        self._after(packed)

    def remove(self, owner: int, packed: bytes) -> None:
        """The owner holds these no more; unknown ones are passed over."""
        column = self._columns[owner]
        held = column.held
        for block in split(packed):
            if block in held:
                held.remove(block)
                self._clear(block, column.bit)
        self._after(packed)

    def _after(self, packed: bytes) -> None:
        if self._dirty:
            self.sweep(_SWEEP_LEAST + _SWEEP_PER_CHANGE * (len(packed) // HASH_BYTES))

    def sweep(self, budget: int) -> int:
        """Clear up to `budget` bits of columns that were dropped; returns how many columns wait still."""
        while self._dirty and budget > 0:
            column = self._dirty[0]
            held, bit = column.held, column.bit
            while held and budget > 0:
                self._clear(held.pop(), bit)
                budget -= 1
            if not held:
                self._dirty.popleft()
                heapq.heappush(self._free, bit)
        return len(self._dirty)

    def _clear(self, block: bytes, bit: int) -> None:
        left = self._bits[block] ^ (1 << bit)
        if left:
            self._bits[block] = left
        else:
            del self._bits[block]

    # --- what the router asks -------------------------------------------------------------------------------------

    def held(self, owner: int) -> frozenset[bytes]:
        """The hashes of one owner, shown or not."""
        column = self._columns.get(owner)
        return frozenset(column.held) if column is not None else frozenset()

    def depths(self, packed: bytes) -> tuple[Ints, Ints]:
        """Owners that hold the chain's first hash, and how many leading hashes each of them holds."""
        bits, mask = self._bits, self._shown
        masks: list[int] = []
        runs: list[int] = []
        for at in range(0, len(packed) - HASH_BYTES + 1, HASH_BYTES):  # Not split: most walks end early.
            left = mask & bits.get(packed[at : at + HASH_BYTES], 0)
            if left == mask and runs:
                runs[-1] += 1
                continue
            if not left:
                break
            mask = left
            masks.append(mask)
            runs.append(1)
        if not masks:
            return _NONE, _NONE
        width = (masks[0].bit_length() + 7) // 8
        raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for mask in masks]), np.uint8)
        held = np.unpackbits(raw.reshape(len(masks), width), axis=1, bitorder="little")
        depths = np.array(runs, np.int64) @ held
        columns = np.flatnonzero(depths)
        return self._owner_of[columns], depths[columns]

    def match(self, chains: Iterable[tuple[int, bytes]], size: int) -> Ints:
        """Matched tokens by owner, for owners below `size`. chains: (tokens of one hash, packed hashes)."""
        matched = np.zeros(size, np.int64)
        for tokens, packed in chains:
            owners, depths = self.depths(packed)
            if len(owners):
                # An owner comes up once in a chain.
                matched[owners] = np.maximum(matched[owners], depths * tokens)
        return matched


def split(packed: bytes) -> list[bytes]:
    """The hashes of a packed run; a rest that is none is left out."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed) - HASH_BYTES + 1, HASH_BYTES)]
