"""How a skinny product is cut into blocks: by rules over its shape, or by a table of what was measured. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

Kind = Literal["linear", "gate_up", "head"]

MAX_ROWS = 128
BUCKETS = (16, 32, 64, 128)
# Of the target, an H200.
_SMS = 132
GEMV_ROWS = 4
_MAX_SPLITS = 8


def row_bucket(m: int) -> int:
    """Rows that the buffers of a step of m rows have: 16, 32, 64 or 128."""
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"{m} rows: skinny products have 1 to {MAX_ROWS}")
    return next(bucket for bucket in BUCKETS if m <= bucket)


@dataclass(frozen=True)
class Config:
    """One way to cut a product. gate_up has two weight tiles of `block_n` rows a block."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    splits: int = 1  # of K, at most; linear only
    tma: bool = False  # weights and x come by tensor maps; else every thread copies its 16 bytes
    gemv: bool = False  # up to GEMV_ROWS rows, without tensor cores; no head
    prefetch: int = 0  # columns of a block's weight rows that are asked for into L2 before the wait
    step: int = (
        0  # rows of a tile that are used, 0 for all: it can make blocks as many as are resident; no tma, no head
    )
    turn: int = 0  # blocks of K by which neighbouring tiles start apart
    late: bool = False  # the next kernel's blocks start behind the loop, not in front of it

    @property
    def tile_rows(self) -> int:
        """Rows of the product that a block computes."""
        return self.step or self.block_n

    def split_columns(self, k: int) -> int:
        """Columns of K in a split: whole blocks."""
        blocks = -(-k // self.block_k)
        return -(-blocks // self.splits) * self.block_k

    def num_splits(self, k: int) -> int:
        """Splits of K, none of them empty."""
        return -(-k // self.split_columns(k))

    def shared_bytes(self, rows: int, kind: Kind) -> int:
        """Shared memory of the pipeline's buffers, about."""
        if self.gemv:
            return 0
        tiles = 2 if kind == "gate_up" else 1
        return self.stages * self.block_k * (tiles * self.block_n + rows) * 2


def even_splits(blocks: int, most: int) -> int:
    """The largest number of splits, at most `most`, that leaves less than a tenth of the blocks' time idle."""
    return max(s for s in range(1, max(1, most) + 1) if s * -(-blocks // s) <= blocks * 1.1)


# What an H200 was measured to do best for Llama-3.1-8B's shapes, by (kind, rows, n, k): rows is a power of two, for
# counts up to it; below 16, a head has only an entry for one row. k is 0 for a head. Everything else is cut by rules.
MEASURED: dict[tuple[Kind, int, int, int], Config] = {
    ("linear", 1, 6144, 4096): Config(4, 2048, 1, 4, gemv=True),
    ("linear", 2, 6144, 4096): Config(64, 64, 6, 4, splits=4, prefetch=128, turn=1),
    ("linear", 16, 6144, 4096): Config(64, 128, 3, 4, splits=4, prefetch=128, turn=1),
    ("linear", 32, 6144, 4096): Config(128, 64, 5, 4, splits=4, prefetch=128, step=96, turn=1),
    ("linear", 64, 6144, 4096): Config(64, 128, 3, 4, splits=2, prefetch=128),
    ("linear", 128, 6144, 4096): Config(128, 64, 3, 4, splits=4, prefetch=256),
    ("linear", 1, 4096, 4096): Config(8, 1024, 1, 4, gemv=True),
    ("linear", 2, 4096, 4096): Config(4, 2048, 1, 4, gemv=True),
    ("linear", 16, 4096, 4096): Config(64, 128, 4, 4, splits=4, prefetch=128),
    ("linear", 32, 4096, 4096): Config(64, 128, 4, 4, splits=4, tma=True, prefetch=128),
    ("linear", 64, 4096, 4096): Config(64, 128, 3, 4, splits=4, prefetch=128),
    ("linear", 128, 4096, 4096): Config(128, 64, 6, 4, splits=4, tma=True, prefetch=128),
    ("gate_up", 1, 28672, 4096): Config(2, 2048, 1, 4, gemv=True),
    ("gate_up", 2, 28672, 4096): Config(64, 128, 3, 4, prefetch=64, turn=1),
    ("gate_up", 4, 28672, 4096): Config(64, 128, 3, 4, prefetch=64, turn=1),
    ("gate_up", 8, 28672, 4096): Config(64, 128, 3, 4, prefetch=64, turn=1),
    ("gate_up", 16, 28672, 4096): Config(64, 128, 3, 4, prefetch=64, step=56),
    ("gate_up", 32, 28672, 4096): Config(64, 64, 5, 4, prefetch=64, step=56),
    ("gate_up", 64, 28672, 4096): Config(64, 64, 4, 4, prefetch=64, step=56),
    ("gate_up", 128, 28672, 4096): Config(128, 64, 4, 8, prefetch=64, late=True),
    ("linear", 1, 4096, 14336): Config(4, 2048, 1, 4, gemv=True),
    ("linear", 2, 4096, 14336): Config(64, 128, 4, 4, splits=4, prefetch=128, turn=1),
    ("linear", 4, 4096, 14336): Config(64, 128, 4, 4, splits=4, prefetch=128, turn=1),
    ("linear", 8, 4096, 14336): Config(64, 128, 4, 4, splits=4, prefetch=128, turn=1),
    ("linear", 16, 4096, 14336): Config(64, 128, 4, 4, splits=4, tma=True, prefetch=128, turn=1),
    ("linear", 32, 4096, 14336): Config(128, 128, 4, 8, splits=4, prefetch=128),
    ("linear", 64, 4096, 14336): Config(128, 64, 8, 4, splits=4, prefetch=128),
    ("linear", 128, 4096, 14336): Config(128, 64, 6, 4, splits=4, tma=True, prefetch=128),
    ("head", 1, 128256, 0): Config(64, 128, 4, 4, prefetch=128, turn=1),
    ("head", 16, 128256, 0): Config(128, 128, 3, 4, prefetch=128, turn=1),
    ("head", 32, 128256, 0): Config(128, 64, 5, 4, tma=True, prefetch=128),
    ("head", 64, 128256, 0): Config(128, 64, 4, 4, tma=True, prefetch=128, late=True),
    ("head", 128, 128256, 0): Config(256, 64, 4, 8, tma=True, prefetch=128),
}


@cache
def config_for(kind: Kind, m: int, n: int, k: int) -> Config:
    """The configuration of a product of m rows with n outputs (gate_up: of both halves together) and k inputs."""
    rows = row_bucket(m)
    few = 1 << (m - 1).bit_length()
    return MEASURED.get((kind, few, n, k)) or MEASURED.get((kind, rows, n, k)) or _by_rule(kind, rows, n, k)


def _by_rule(kind: Kind, rows: int, n: int, k: int) -> Config:
    if kind == "gate_up":
        # One wave of two blocks an SM at hidden sizes of 8B models; more rows want taller tiles, for x is read by
        # every block.
        if rows <= 32:
            return Config(64, 64, 5, 4, prefetch=64)
        if rows == 64:
            return Config(64, 64, 4, 4, prefetch=64)
        return Config(128, 64, 4, 8, prefetch=64)
    if kind == "head":
        if rows <= 32:
            return Config(128, 64, 5, 4, prefetch=128)
        if rows == 64:
            return Config(128, 64, 4, 4, prefetch=128)
        return Config(256, 64, 4, 8, prefetch=128)
    # As many blocks as are resident at once, each with at least four rounds of its loop. Every split is written and
    # read once more, which counts with many rows: there one deep block an SM does.
    block_n, block_k, stages, most = (64, 128, 4, _MAX_SPLITS) if rows <= 32 else (128, 64, 4, 4)
    if rows == 128:
        stages = 3
    tiles, blocks = -(-n // block_n), -(-k // block_k)
    splits = even_splits(blocks, min(2 * _SMS // tiles, most, blocks // 4))
    if tiles * splits <= _SMS and rows >= 64:
        stages *= 2
    return Config(block_n, block_k, stages, 4, splits=splits, prefetch=128)


def splits_for(m: int, n: int, k: int) -> int:
    """Partial sums that `skinny_linear` writes for this product."""
    return config_for("linear", m, n, k).num_splits(k)


def head_tiles(m: int, vocab: int) -> int:
    """Tiles of the vocabulary for which `skinny_head` writes a maximum."""
    return -(-vocab // config_for("head", m, vocab, 0).block_n)
