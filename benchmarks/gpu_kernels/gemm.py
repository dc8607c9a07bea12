"""The matrix products of a decode step, where they are: eight layers of an 8B model's four in one graph.

    python benchmarks/gpu_kernels/gemm.py [--candidates few|many] [--rows 20,64,1] [--seconds 55] [--out gemm.json]

A product alone is timed wrongly: with programmatic dependent launch its blocks take the places that the kernel before
leaves free. So each candidate of skinny_linear and skinny_gate_up is checked against torch in fp32, then put in the
place of the table's in a chain of layers (kernels that sum partials are between the products, as in a model) and the
whole chain is timed; the best stays, and the next product has its turn. cuBLAS (torch.mm) is one of the candidates.
The head is timed alone, over weights that the L2 does not hold. Floors are the weights' bytes at 4.3 TB/s, what a copy
reaches on an H200. At the end: entries of skinny_config.MEASURED, and where cuBLAS is better.

Candidates are compiled first, by as many processes as there are cores; they find each other's work in Triton's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libs"))

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvmesh.layers.cuda import skinny
from kvmesh.layers.cuda.activation import silu_mul
from kvmesh.layers.cuda.skinny_config import GEMV_ROWS, Config, Kind, config_for, even_splits, row_bucket

RATE = 4.3e12
SMS, SHARED = 132, 227 << 10
# Elements of a layer's weights, and columns of a block that sums partials.
POOL, FOLD = 220_000_000, 1024
SHAPES: dict[str, tuple[Kind, int, int]] = {
    "qkv": ("linear", 6144, 4096),
    "o": ("linear", 4096, 4096),
    "gate_up": ("gate_up", 28672, 4096),
    "down": ("linear", 4096, 14336),
    "head": ("head", 128256, 4096),
}
# In the order of what is to be known first.
ROWS = (20, 64, 1, 16, 32, 2, 4, 128, 8)
LAYERS = 8
ORDER = ("gate_up", "down", "qkv", "o")
# Bytes of weights that the head's graph walks over, and how long it is to take.
FOOTPRINT, GRAPH_S, REPLAYS, CHAIN_REPLAYS = 512 << 20, 1.5e-3, 15, 11

# (block_n, block_k, stages, warps, step); block_n counts each of gate_up's two tiles.
Tile = tuple[int, int, int, int, int]
TILES: dict[tuple[str, int], list[Tile]] = {
    ("linear", 16): [
        (64, 128, 4, 4, 0),
        (64, 64, 6, 4, 0),
        (64, 128, 3, 4, 0),
        (64, 256, 2, 4, 0),
        (128, 128, 3, 4, 0),
        (128, 64, 5, 4, 96),
        (32, 256, 4, 4, 0),
    ],
    ("linear", 32): [
        (64, 128, 4, 4, 0),
        (64, 64, 6, 4, 0),
        (64, 128, 3, 4, 0),
        (64, 256, 2, 4, 0),
        (128, 64, 5, 4, 0),
        (128, 64, 5, 4, 96),
        (128, 128, 4, 8, 0),
    ],
    ("linear", 64): [
        (64, 64, 6, 4, 0),
        (128, 64, 8, 4, 0),
        (128, 64, 4, 4, 0),
        (128, 64, 4, 4, 96),
        (128, 64, 3, 4, 0),
        (64, 128, 3, 4, 0),
        (128, 128, 4, 8, 0),
        (256, 64, 5, 8, 0),
    ],
    ("linear", 128): [(128, 64, 3, 4, 0), (128, 64, 6, 8, 0), (256, 64, 4, 8, 0), (128, 128, 3, 8, 0)],
    ("gate_up", 16): [
        (64, 128, 3, 4, 0),
        (64, 64, 5, 4, 0),
        (64, 128, 3, 4, 56),
        (64, 64, 5, 4, 56),
        (64, 64, 6, 4, 56),
    ],
    ("gate_up", 32): [(64, 64, 5, 4, 0), (64, 64, 5, 4, 56), (64, 128, 2, 4, 56), (128, 64, 6, 8, 112)],
    ("gate_up", 64): [
        (64, 64, 4, 4, 0),
        (64, 64, 4, 4, 56),
        (64, 128, 2, 4, 56),
        (128, 64, 5, 8, 112),
        (128, 64, 5, 8, 0),
    ],
    ("gate_up", 128): [(64, 64, 3, 4, 0), (64, 64, 3, 4, 56), (128, 64, 4, 8, 112), (128, 64, 4, 8, 0)],
    ("head", 16): [(128, 128, 3, 4, 0), (64, 128, 4, 4, 0), (64, 256, 2, 4, 0)],
    ("head", 32): [(128, 64, 5, 4, 0), (64, 128, 4, 4, 0), (128, 128, 4, 8, 0)],
    ("head", 64): [(128, 64, 4, 4, 0), (128, 128, 4, 8, 0), (256, 64, 5, 8, 0)],
    ("head", 128): [(256, 64, 4, 8, 0), (128, 64, 3, 4, 0)],
}
# (block_n, block_k, warps, splits) of the kernels for a few rows.
GEMV: dict[Kind, list[tuple[int, int, int, int]]] = {
    "linear": [
        (4, 2048, 4, 1),
        (16, 512, 4, 2),
        (8, 1024, 4, 1),
        (8, 1024, 4, 2),
        (4, 2048, 4, 2),
        (4, 1024, 4, 1),
        (2, 2048, 4, 1),
        (4, 4096, 8, 1),
        (8, 2048, 8, 1),
    ],
    "gate_up": [(4, 1024, 4, 1), (4, 512, 4, 1), (8, 512, 4, 1), (2, 2048, 4, 1), (2, 1024, 4, 1), (4, 2048, 8, 1)],
    "head": [],
}


def splits_of(config: Config, rows: int, n: int, k: int) -> set[int]:
    """Numbers of splits with which the blocks fill an SM once, twice, …: as often as are resident."""
    resident = min(4, max(1, SHARED // (config.shared_bytes(rows, "linear") + 1024)))
    tiles = triton.cdiv(n, config.tile_rows)
    most = [min(8, each * SMS // tiles) for each in (resident, max(1, resident - 1))]
    return {even_splits(triton.cdiv(k, config.block_k), max(1, each)) for each in most}


def candidates(kind: Kind, m: int, n: int, k: int, many: bool) -> list[Config]:
    """What is tried for a product, the table's own first."""
    rows = row_bucket(m)
    own = config_for(kind, m, n, 0 if kind == "head" else k)
    found = {own: None}
    if m <= GEMV_ROWS:
        for block_n, block_k, warps, splits in GEMV[kind]:
            found[Config(block_n, block_k, 1, warps, splits=splits, gemv=True)] = None
        if m == 1 and kind != "head":
            return list(found)
    bases = []
    for block_n, block_k, stages, warps, step in TILES[kind, rows]:
        prefetch = 128 if kind != "gate_up" else 64
        bases.append(Config(block_n, block_k, stages, warps, prefetch=prefetch, step=step))
    if m <= 8 and not many:
        bases = bases[:2]
    elif not own.gemv:
        for other in ({"tma": False}, {"tma": True}, {"late": True}, {"prefetch": own.prefetch * 2}, {"prefetch": 0}):
            found[dataclasses.replace(own, **other)] = None  # type: ignore[arg-type]
        found[dataclasses.replace(own, tma=True, turn=1)] = None
    for base in bases:
        for turn in (0, 1):
            config = dataclasses.replace(base, turn=turn)
            if kind != "linear":
                found[config] = None
                continue
            for splits in splits_of(config, rows, n, k):
                found[dataclasses.replace(config, splits=splits)] = None
    return list(found)


def label(config: Config) -> str:
    """A configuration in a few characters."""
    if config.gemv:
        return f"v{config.block_n}x{config.block_k}w{config.warps}s{config.splits}"
    form = f"{config.block_n}x{config.block_k}/{config.stages}w{config.warps}s{config.splits}"
    more = "tx" * config.tma + "l" * config.late + f"+{config.prefetch}"
    return form + f"u{config.step}" * (config.step > 0) + f"r{config.turn}" * (config.turn > 0) + more


class Product:
    """One product: its operands and outputs, and how to launch it."""

    def __init__(self, kind: Kind, x: torch.Tensor, weights: list[torch.Tensor], m: int) -> None:
        self.kind, self.x, self.weights, self.m = kind, x, weights, m
        self.n, self.k = weights[0].shape

    def outputs(self, config: Config) -> tuple[torch.Tensor, ...]:
        rows, nan = self.x.shape[0], float("nan")
        if self.kind == "linear":
            return (torch.full((config.num_splits(self.k), rows, self.n), nan, device="cuda"),)
        if self.kind == "gate_up":
            return (torch.full((rows, self.n // 2), nan, device="cuda", dtype=torch.bfloat16),)
        tiles = triton.cdiv(self.n, config.block_n)
        return (
            torch.full((rows, self.n), nan, device="cuda"),
            torch.full((rows, tiles), nan, device="cuda"),
            torch.full((rows, tiles), -7, device="cuda", dtype=torch.int32),
        )

    def launch(self, config: Config, weight: torch.Tensor, out: tuple[torch.Tensor, ...], pdl: bool) -> None:
        function: Any = {
            "linear": skinny.skinny_linear,
            "gate_up": skinny.skinny_gate_up,
            "head": skinny.skinny_head,
        }[self.kind]
        function(self.x, weight, *out, self.m, pdl=pdl, config=config)

    def reference(self) -> torch.Tensor:
        full = self.x[: self.m].float() @ self.weights[0].float().T
        if self.kind != "gate_up":
            return full
        gate, up = full.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def error(self, config: Config, want: torch.Tensor) -> float:
        """Relative error of what a configuration computes; nan where something was not written."""
        out = self.outputs(config)
        self.launch(config, self.weights[0], out, True)
        have = out[0].sum(0) if self.kind == "linear" else out[0].float()
        error = ((have[: self.m] - want).norm() / want.norm()).item()
        if self.kind == "head":
            tokens = torch.full((len(self.x),), -7, device="cuda", dtype=torch.int32)
            skinny.argmax_reduce(out[1], out[2], tokens, self.m, pdl=True)
            if not torch.equal(tokens[: self.m].long(), out[0][: self.m].argmax(1)):
                return float("inf")
        return error


@cache
def capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def graph_of(launches: Iterable[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    # Without torch.cuda.graph's collection of garbage: it takes longer than what is measured.
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(capture_stream()):
        graph.capture_begin()
        for launch in launches:
            launch()
        graph.capture_end()
    return graph


def median_s(graph: torch.cuda.CUDAGraph, replays: int = REPLAYS) -> float:
    """Median seconds of a replay."""
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e-3


def rounds(product: Product) -> int:
    nbytes = sum(weight.numel() * 2 for weight in product.weights)
    return max(1, round(GRAPH_S / (nbytes / RATE)))


def time_candidate(product: Product, config: Config) -> float:
    out = product.outputs(config)
    walk = product.weights * rounds(product)
    graph = graph_of(lambda w=w: product.launch(config, w, out, True) for w in walk)
    return median_s(graph) / len(walk)


def time_cublas(product: Product) -> float:
    x = product.x[: product.m]
    out = torch.empty(product.m, product.n, device="cuda", dtype=torch.bfloat16)
    walk = product.weights * rounds(product)
    torch.mm(x, walk[0].T, out=out)
    graph = graph_of(lambda w=w: torch.mm(x, w.T, out=out) for w in walk)
    return median_s(graph) / len(walk)


def operands(name: str, m: int, pool: torch.Tensor | None = None) -> Product:
    """Operands of a product: weights are cut out of a pool of random values."""
    kind, n, k = SHAPES[name]
    x = torch.randn(row_bucket(m), k, device="cuda").to(torch.bfloat16)
    if pool is None:
        return Product(kind, x, [torch.empty(n, k, device="cuda", dtype=torch.bfloat16)], m)
    copies = max(2, -(-FOOTPRINT // (n * k * 2)))
    return Product(kind, x, [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(copies)], m)


def compile_one(job: tuple[str, int, Config, bool]) -> str:
    """Compiles one candidate in a process of its own, by launching it; says what went wrong."""
    name, m, config, pdl = job
    try:
        product = operands(name, m)
        product.launch(config, product.weights[0], product.outputs(config), pdl)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def shared_kernel(name: str, m: int, config: Config) -> tuple[Any, ...]:
    """What is equal for products of one kernel."""
    rows = 1 << (m - 1).bit_length() if config.gemv else row_bucket(m)
    return SHAPES[name][0], rows, dataclasses.replace(config, splits=1)


def compile_all(jobs: list[tuple[str, int, Config, bool]]) -> dict[tuple[str, int, Config, bool], str]:
    """Errors by job; a kernel that several shapes share is compiled once, by the first of them."""
    unique: dict[Any, tuple[str, int, Config, bool]] = {}
    for job in jobs:
        kernel = dataclasses.replace(job[2], splits=1)
        unique.setdefault((*shared_kernel(job[0], job[1], kernel), job[3]), job)
    failed = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as processes:
        futures = {processes.submit(compile_one, job): job for job in unique.values()}
        for future in as_completed(futures):
            error = f"{future.exception()!r}" if future.exception() else future.result()
            if error:
                failed[futures[future]] = error
    return failed


@triton.jit(do_not_specialize=["splits", "rows"])
def fold(  # type: ignore[no-untyped-def]
    partials_ptr, x_ptr, splits, rows, n, width, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """x (rows, width) bf16 = sum of partials (splits, rows, n), bent so that values neither vanish nor grow."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, LANES)[:, None]
    parts = tl.load(partials_ptr + (split * rows + row) * n + columns[None, :], mask=split < splits, other=0.0)
    total = tl.sum(parts.to(tl.float32), axis=0)
    tl.store(x_ptr + row * width + columns, (total / (0.3 + tl.abs(total))).to(tl.bfloat16))


def _at(name: str, m: int) -> tuple[Kind, int, int, int]:
    kind, n, k = SHAPES[name]
    return kind, m, n, k


# A product's way: one of ours, or (None) cuBLAS.
Plan = dict[str, Config | None]


class Chain:
    """LAYERS layers' four products of m rows, with sums of partials between them."""

    def __init__(self, m: int, pool: torch.Tensor) -> None:
        rows, at = row_bucket(m), 0
        self.m, self.rows, self.weights = m, rows, []
        for _ in range(LAYERS):
            layer = {}
            for name in ("qkv", "o", "gate_up", "down"):
                _, n, k = SHAPES[name]
                layer[name] = pool[at : at + n * k].view(n, k)
                at += n * k
            self.weights.append(layer)
        self.x = torch.randn(rows, SHAPES["qkv"][2], device="cuda").to(torch.bfloat16)
        self.act = torch.randn(rows, SHAPES["down"][2], device="cuda").to(torch.bfloat16)
        self.products = {
            name: Product(SHAPES[name][0], self.act if name == "down" else self.x, [weight], m)
            for name, weight in self.weights[0].items()
        }
        self.dense = {
            name: torch.empty(m, p.n, device="cuda", dtype=torch.bfloat16) for name, p in self.products.items()
        }
        self.outs: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}

    def _out(self, name: str, config: Config) -> tuple[torch.Tensor, ...]:
        if name == "gate_up":
            return (self.act,)
        key = name, config.num_splits(self.products[name].k)
        if key not in self.outs:
            self.outs[key] = self.products[name].outputs(config)
        return self.outs[key]

    def _layer(self, layer: dict[str, torch.Tensor], plan: Plan, pdl: bool) -> None:
        options: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
        width = self.x.shape[1]
        for name, weight in layer.items():
            product, config = self.products[name], plan[name]
            if config is None:
                torch.mm(product.x[: self.m], weight.T, out=self.dense[name])
                source, rows = self.dense[name][None], self.m
                if name == "gate_up":
                    silu_mul(self.dense[name], self.act[: self.m], pdl=pdl)
            else:
                out = self._out(name, config)
                product.launch(config, weight, out, pdl)
                source, rows = out[0], self.rows
            if name != "gate_up":
                grid = (self.m, triton.cdiv(width, FOLD))
                fold[grid](source, self.x, source.shape[0], rows, product.n, width, 8, FOLD, num_warps=4, **options)

    def seconds(self, plan: Plan, pdl: bool = True) -> float:
        """Of one layer, with these ways."""
        self._layer(self.weights[0], plan, pdl)
        launches = (lambda layer=layer: self._layer(layer, plan, pdl) for layer in self.weights)
        return median_s(graph_of(launches), CHAIN_REPLAYS) / LAYERS


class Tuner:
    """Candidates in the chain, and what they took."""

    def __init__(
        self, plans: dict[tuple[str, int], list[Config]], bad: set[tuple[Any, ...]], pool: torch.Tensor
    ) -> None:
        self.plans, self.bad, self.pool = plans, bad, pool
        self.checked: dict[tuple[Any, ...], bool] = {}
        self.results: list[dict[str, Any]] = []

    def usable(self, name: str, m: int) -> list[Config]:
        """Those that compile and are right."""
        product, want, good = operands(name, m, self.pool), None, []
        for config in self.plans[name, m]:
            key = (name, config.splits, *shared_kernel(name, m, config))
            if key[2:] in self.bad:
                continue
            if key not in self.checked:
                want = product.reference() if want is None else want
                error = product.error(config, want)
                self.checked[key] = error < (1e-2 if product.kind == "gate_up" else 2e-3)
                if not self.checked[key]:
                    print(f"WRONG: {name} m={m} {label(config)}: relative error {error}")
            if self.checked[key]:
                good.append(config)
        return good

    def record(self, name: str, m: int, config: Config | None, us: float, gain: float) -> None:
        cut = "cublas" if config is None else dataclasses.asdict(config)
        self.results.append({"name": name, "m": m, "us": us, "gain_us": gain, "config": cut})

    def tune(self, m: int, started: float) -> dict[str, Any]:
        """One pass over the four products of a layer."""
        chain = Chain(m, self.pool)
        plan: Plan = {name: config_for(*_at(name, m)) for name in ORDER}
        blas = chain.seconds(dict.fromkeys(ORDER), pdl=False)
        table = best = min(chain.seconds(plan) for _ in range(2))
        floor = sum(n * k * 2 for name, (_, n, k) in SHAPES.items() if name != "head") / RATE
        print(f"m={m}: a layer {table * 1e6:.1f} µs by the table, cuBLAS {blas * 1e6:.1f}, floor {floor * 1e6:.1f}")
        for name in ORDER:
            ways: list[Config | None] = [*self.usable(name, m), None]
            timed = [(chain.seconds({**plan, name: way}), way) for way in ways]
            own = timed[0][0]
            for seconds, way in timed:
                self.record(name, m, way, seconds * 1e6, (own - seconds) * 1e6)
            fewest = sorted(timed, key=lambda pair: pair[0])[:6]
            # Once more: a median of a few replays has its luck.
            fewest = sorted(
                ((min(t, chain.seconds({**plan, name: w})), w) for t, w in fewest), key=lambda pair: pair[0]
            )
            mm = next(seconds for seconds, way in timed if way is None)
            ours = next((pair for pair in fewest if pair[1] is not None), timed[0])
            if ours[0] < best * 0.999:
                best, plan[name] = ours[0], ours[1]
            tops = "  ".join(f"{s * 1e6:.1f} {label(w) if w else 'cublas'}" for s, w in fewest)
            print(f"{name:>8}  own {own * 1e6:.1f}  cublas {mm * 1e6:.1f} | {tops}", flush=True)
        best = min(best, chain.seconds(plan))
        mixed: Plan = {
            name: None if self.gain(name, m, None) > self.gain(name, m, plan[name]) + 0.3 else plan[name]
            for name in ORDER
        }
        both = chain.seconds(mixed) if None in mixed.values() else best
        print(
            f"    best of ours {best * 1e6:.1f} µs, with cuBLAS's {both * 1e6:.1f}; {time.monotonic() - started:.0f} s"
        )
        us = {"table": table, "cublas": blas, "best": best, "with_cublas": both}
        return {"m": m, "us_per_layer": {key: value * 1e6 for key, value in us.items()}}

    def gain(self, name: str, m: int, way: Config | None) -> float:
        """µs a layer that a way saved over the table's."""
        cut = "cublas" if way is None else dataclasses.asdict(way)
        return next((r["gain_us"] for r in self.results if (r["name"], r["m"], r["config"]) == (name, m, cut)), 0.0)

    def head(self, m: int) -> None:
        """The head, alone."""
        product = operands("head", m, self.pool)
        timed = [(time_candidate(product, config), config) for config in self.usable("head", m)]
        if not timed:
            return
        for seconds, config in timed:
            self.record("head", m, config, seconds * 1e6, (timed[0][0] - seconds) * 1e6)
        timed.sort(key=lambda pair: pair[0])
        tops = "  ".join(f"{s * 1e6:.1f} {label(c)}" for s, c in timed[:5])
        floor = product.n * product.k * 2 / RATE
        print(f"    head  floor {floor * 1e6:.1f}  cublas {time_cublas(product) * 1e6:.1f} | {tops}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", choices=("few", "many"), default="few")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=55.0, help="no other number of rows is begun after these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    row_counts, many = [int(m) for m in args.rows.split(",")], args.candidates == "many"
    # What is to be known first is compiled and timed first.
    row_counts.sort(key=lambda m: ROWS.index(m) if m in ROWS else len(ROWS))
    started = time.monotonic()
    plans = {
        (name, m): candidates(*_at(name, m), many)
        for m in row_counts
        for name in SHAPES
        if name != "head" or not 1 < m < 16
    }
    jobs = [(name, m, config, True) for (name, m), plan in plans.items() for config in plan]
    jobs += [(name, m, config_for(*_at(name, m)), True) for m in row_counts for name in ORDER]
    failed = compile_all(list(dict.fromkeys(jobs)))
    bad = {shared_kernel(*job[:3]) for job in failed}
    for job, error in failed.items():
        print(f"does not compile: {job[0]} m={job[1]} {label(job[2])}: {error}")
    print(f"{torch.cuda.get_device_name(0)}; candidates compiled in {time.monotonic() - started:.0f} s", flush=True)

    pool = torch.empty(LAYERS * POOL, device="cuda", dtype=torch.bfloat16).normal_(std=1 / 64)
    tuner, chains = Tuner(plans, bad, pool), []
    for m in row_counts:
        if time.monotonic() - started > args.seconds:
            print(f"m={m}: no time left")
            continue
        chains.append(tuner.tune(m, started))
        if ("head", m) in plans:
            tuner.head(m)
    print_choice(tuner.results)
    if args.out:
        args.out.write_text(json.dumps({"products": tuner.results, "chains": chains}) + "\n")
    print(f"{time.monotonic() - started:.0f} s in all")


def written(config: Config) -> str:
    """A configuration as source text, without what is the default."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return "Config(" + ", ".join(f"{key}={value!r}" for key, (value, usual) in values.items() if value != usual) + ")"


def print_choice(results: list[dict[str, Any]]) -> None:
    """For each entry of the tables the way that saves most over its row counts."""
    sums: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for row in results:
        key = 1 << (row["m"] - 1).bit_length()
        gains = sums.setdefault((row["name"], key), {})
        gains.setdefault(json.dumps(row["config"]), {})[row["m"]] = row["gain_us"]
    for (name, key), gains in sorted(sums.items(), key=lambda item: (list(SHAPES).index(item[0][0]), item[0][1])):
        kind, n, k = SHAPES[name]
        most = max(map(len, gains.values()))
        total = {way: sum(each.values()) / most for way, each in gains.items() if len(each) == most}
        cublas = total.pop('"cublas"', None)
        best = max(total, key=lambda way: total[way])
        at = f'("{kind}", {key}, {n}, {0 if kind == "head" else k})'
        print(f"    {at}: {written(Config(**json.loads(best)))},  # {total[best]:+.1f} µs")
        if cublas is not None and cublas > total[best] + 0.3:
            print(f"    BLAS: {at},  # cuBLAS {cublas:+.1f} µs")


if __name__ == "__main__":
    main()
