"""The matrix products of a decode step, beside cuBLAS and beside the time that reading their weights takes.

    python benchmarks/gpu_kernels/gemm.py [--candidates few|many] [--shapes qkv,o] [--rows 1,64] [--out gemm.json]

1. Each candidate of skinny_linear, skinny_gate_up and skinny_head is checked against torch in fp32, then timed: one
   CUDA graph of many launches, over weights of half a gigabyte and more, so that the L2 holds none of what is read.
   cuBLAS (torch.mm) is timed the same way. The floor is the weights' bytes at 4.3 TB/s, what a copy reaches on an H200.
2. Eight layers of an 8B model's four products in one graph, with a small kernel that sums partials between them: what
   programmatic dependent launch buys, and what the prefetch of weights in front of its wait does.

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
from kvmesh.layers.cuda.skinny_config import Config, Kind, config_for, even_splits, row_bucket

RATE = 4.3e12
SMS, SHARED = 132, 227 << 10
SHAPES: dict[str, tuple[Kind, int, int]] = {
    "qkv": ("linear", 6144, 4096),
    "o": ("linear", 4096, 4096),
    "gate_up": ("gate_up", 28672, 4096),
    "down": ("linear", 4096, 14336),
    "head": ("head", 128256, 4096),
}
ROWS = (1, 4, 16, 32, 64, 128)
CHAIN_ROWS = (1, 16, 64)
CHAIN_PREFETCH = (0, 128, 256, 512, 1024)
LAYERS = 8
# Bytes of weights that a graph walks over, and how long it is to take.
FOOTPRINT, GRAPH_S, REPLAYS = 512 << 20, 1.5e-3, 20

# (block_n, block_k, stages, warps); block_n counts each of gate_up's two tiles.
Tile = tuple[int, int, int, int]
FEW: dict[tuple[str, int], list[Tile]] = {
    ("tile", 16): [(64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 5, 4), (128, 128, 3, 4)],
    ("tile", 32): [(64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 5, 4)],
    ("tile", 64): [(64, 64, 6, 4), (128, 64, 4, 4), (256, 64, 5, 8)],
    ("tile", 128): [(128, 64, 3, 4), (128, 64, 6, 8), (256, 64, 4, 8)],
    ("gate_up", 16): [(64, 64, 5, 4), (64, 128, 3, 4), (128, 64, 6, 8)],
    ("gate_up", 32): [(64, 64, 5, 4), (128, 64, 5, 8)],
    ("gate_up", 64): [(64, 64, 4, 4), (128, 64, 5, 8)],
    ("gate_up", 128): [(64, 64, 3, 4), (128, 64, 4, 8)],
}
MORE: dict[tuple[str, int], list[Tile]] = {
    ("tile", 16): [
        (64, 256, 2, 4),
        (64, 64, 10, 4),
        (64, 128, 3, 4),
        (64, 256, 5, 4),
        (128, 64, 3, 4),
        (256, 64, 3, 8),
    ],
    ("tile", 32): [(64, 128, 3, 4), (128, 128, 2, 4), (64, 256, 4, 4), (256, 64, 3, 8)],
    ("tile", 64): [(128, 128, 2, 4), (128, 128, 4, 8), (64, 128, 3, 4), (128, 64, 8, 4)],
    ("tile", 128): [(64, 64, 4, 4), (128, 128, 3, 8), (128, 64, 3, 8)],
    ("gate_up", 16): [(64, 64, 6, 4), (64, 128, 5, 4), (64, 64, 3, 4), (128, 64, 3, 8)],
    ("gate_up", 32): [(64, 64, 3, 4), (64, 128, 2, 4)],
    ("gate_up", 64): [(64, 128, 2, 4), (64, 64, 8, 4), (128, 64, 4, 4)],
    ("gate_up", 128): [(64, 64, 6, 4), (64, 64, 3, 8), (64, 128, 3, 8)],
}


# (block_n, block_k, warps, splits) of the kernels for one row.
GEMV: dict[Kind, list[tuple[int, int, int, int]]] = {
    "linear": [(8, 1024, 4, 1), (16, 512, 4, 1), (8, 512, 4, 1), (4, 2048, 4, 1), (16, 512, 4, 2), (8, 1024, 4, 2)],
    "gate_up": [(8, 512, 4, 1), (4, 1024, 4, 1), (8, 1024, 8, 1), (4, 512, 4, 1)],
    "head": [],
}


def candidates(kind: Kind, m: int, n: int, k: int, many: bool) -> list[Config]:
    """What is tried for a product, the rule's own first."""
    rows = row_bucket(m)
    key = ("gate_up" if kind == "gate_up" else "tile", rows)
    found = {config_for(kind, m, n, 0 if kind == "head" else k): None}
    if m == 1:
        for block_n, block_k, warps, splits in GEMV[kind]:
            found[Config(block_n, block_k, 1, warps, splits=splits, gemv=True)] = None
    for block_n, block_k, stages, warps in FEW[key] + (MORE[key] if many else []):
        halves = 2 if kind == "gate_up" else 1
        prefetch = max(block_k, 512 * 64 // (block_n * halves))
        for tma in (0, 1, 2) if many else (0, 2):
            config = Config(block_n, block_k, stages, warps, tma=tma, prefetch=prefetch)
            shared = config.shared_bytes(rows, kind)
            if shared > SHARED:
                continue
            if kind != "linear":
                found[config] = None
                continue
            tiles, resident = triton.cdiv(n, block_n), max(1, SHARED // (shared + 1024))
            for blocks in {min(resident, 2), min(resident, 3)} | ({1} if many else set()):
                splits = even_splits(triton.cdiv(k, block_k), min(8, max(1, blocks * SMS // tiles)))
                found[dataclasses.replace(config, splits=splits)] = None
    return list(found)


def label(config: Config) -> str:
    """A configuration in a few characters."""
    if config.gemv:
        return f"v{config.block_n}x{config.block_k}w{config.warps}s{config.splits}"
    form = f"{config.block_n}x{config.block_k}/{config.stages}w{config.warps}"
    return f"{form}s{config.splits}" + ("", "tw", "tx")[config.tma]


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


def compile_all(jobs: list[tuple[str, int, Config, bool]]) -> dict[tuple[str, int, Config, bool], str]:
    """Errors by job; a kernel that several shapes share is compiled once, by the first of them."""
    unique = {}
    for job in jobs:
        kernel = dataclasses.replace(job[2], splits=1)
        unique.setdefault((SHAPES[job[0]][0], row_bucket(job[1]), kernel, job[3]), job)
    failed = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as processes:
        futures = {processes.submit(compile_one, job): job for job in unique.values()}
        for future in as_completed(futures):
            error = f"{future.exception()!r}" if future.exception() else future.result()
            if error:
                failed[futures[future]] = error
    return failed


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    partials_ptr, x_ptr, m, n, width, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """x (ROWS, width) bf16 = sum of partials (SPLITS, ROWS, n) fp32, scaled so that values stay small."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + (split * ROWS + row) * n + columns)
    tl.store(x_ptr + row * width + columns, (total * 0.1).to(tl.bfloat16))


def chain_configs(m: int, prefetch: int | None) -> dict[str, Config]:
    configs = {name: config_for(*_at(name, m)) for name in ("qkv", "o", "gate_up", "down")}
    if prefetch is None:
        return configs
    return {
        name: dataclasses.replace(config, prefetch=prefetch // (2 if name == "gate_up" else 1))
        for name, config in configs.items()
    }


def _at(name: str, m: int) -> tuple[Kind, int, int, int]:
    kind, n, k = SHAPES[name]
    return kind, m, n, k


def chain(m: int, pool: torch.Tensor, pdl: bool, prefetch: int | None, cublas: bool = False) -> float:
    """Seconds of LAYERS layers' four products with sums of partials between them."""
    rows, configs = row_bucket(m), chain_configs(m, prefetch)
    weights, at = [], 0
    for _ in range(LAYERS):
        layer = {}
        for name in configs:
            _, n, k = SHAPES[name]
            layer[name] = pool[at : at + n * k].view(n, k)
            at += n * k
        weights.append(layer)
    x = torch.randn(rows, 4096, device="cuda").to(torch.bfloat16)
    act = torch.empty(rows, 14336, device="cuda", dtype=torch.bfloat16)
    products = {name: Product(SHAPES[name][0], act if name == "down" else x, [weights[0][name]], m) for name in configs}
    outs = {name: products[name].outputs(configs[name]) for name in configs}
    dense = {name: torch.empty(m, SHAPES[name][1], device="cuda", dtype=torch.bfloat16) for name in configs}

    def run() -> None:
        for layer in weights:
            for name, config in configs.items():
                product, out = products[name], outs[name]
                if cublas:
                    torch.mm(product.x[:m], layer[name].T, out=dense[name])
                else:
                    product.launch(config, layer[name], out, pdl)
                if name != "gate_up":
                    options: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
                    fold[(m, 4)](out[0], x, m, product.n, 4096, out[0].shape[0], rows, 1024, num_warps=4, **options)

    run()
    return median_s(graph_of([run]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", choices=("few", "many"), default="few")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names, row_counts, many = args.shapes.split(","), [int(m) for m in args.rows.split(",")], args.candidates == "many"
    started = time.monotonic()
    plans = {(name, m): candidates(*_at(name, m), many) for name in names for m in row_counts}
    jobs = [(name, m, config, True) for (name, m), plan in plans.items() for config in plan]
    for m in CHAIN_ROWS:
        for prefetch in (None, *CHAIN_PREFETCH):
            jobs += [(name, m, c, True) for name, c in chain_configs(m, prefetch).items()]
        jobs += [(name, m, c, False) for name, c in chain_configs(m, None).items()]
    failed = compile_all(list(dict.fromkeys(jobs)))
    bad = {(SHAPES[job[0]][0], row_bucket(job[1]), dataclasses.replace(job[2], splits=1)) for job in failed}
    for job, error in failed.items():
        print(f"does not compile: {job[0]} m={job[1]} {label(job[2])}: {error}")
    print(f"{torch.cuda.get_device_name(0)}; candidates compiled in {time.monotonic() - started:.0f} s")

    pool = torch.empty(LAYERS * 220_000_000, device="cuda", dtype=torch.bfloat16).normal_(std=1 / 64)
    results: list[dict[str, Any]] = []
    print(f"{'':12}  floor cuBLAS   best   TB/s   rule | best ones, µs")
    for (name, m), plan in plans.items():
        kind, n, k = SHAPES[name]
        product = operands(name, m, pool)
        want, nbytes = product.reference(), n * k * 2
        cublas = time_cublas(product)
        timed: list[tuple[float, Config]] = []
        for config in plan:
            if (kind, row_bucket(m), dataclasses.replace(config, splits=1)) in bad:
                continue
            error = product.error(config, want)
            if not error < (1e-2 if kind == "gate_up" else 2e-3):
                print(f"WRONG: {name} m={m} {label(config)}: relative error {error}")
                continue
            seconds = time_candidate(product, config)
            timed.append((seconds, config))
            # Whoever sums the partials reads them all.
            reader = config.num_splits(k) * m * n * 4 / RATE if kind == "linear" else 0.0
            results.append(
                {
                    "name": name,
                    "m": m,
                    "us": seconds * 1e6,
                    "with_reader_us": (seconds + reader) * 1e6,
                    "error": error,
                    "config": dataclasses.asdict(config),
                }
            )
        results.append({"name": name, "m": m, "us": cublas * 1e6, "config": "cublas"})
        if not timed:
            continue
        rule = next((s for s, c in timed if c == plan[0]), float("nan"))
        timed.sort(key=lambda pair: pair[0])
        best = timed[0][0]
        tops = "  ".join(f"{s * 1e6:.1f} {label(c)}" for s, c in timed[:4])
        print(
            f"{name:>8}{m:>4} {nbytes / RATE * 1e6:6.1f} {cublas * 1e6:6.1f} {best * 1e6:6.1f} "
            f"{nbytes / best / 1e12:6.2f} {rule * 1e6:6.1f} | {tops}",
            flush=True,
        )
        del want
    chains = []
    floor = LAYERS * sum(n * k * 2 for name, (_, n, k) in SHAPES.items() if name != "head") / RATE
    print(f"chain of {LAYERS} layers, µs; floor {floor * 1e6:.0f}")
    for m in CHAIN_ROWS:
        times = {"cublas": chain(m, pool, False, None, cublas=True), "plain": chain(m, pool, False, None)}
        for prefetch in CHAIN_PREFETCH:
            times[f"pdl+{prefetch}"] = chain(m, pool, True, prefetch)
        times["pdl, rule"] = chain(m, pool, True, None)
        chains.append({"m": m, "us": {key: value * 1e6 for key, value in times.items()}})
        print(f"  m={m:<4}" + "  ".join(f"{key} {value * 1e6:.0f}" for key, value in times.items()), flush=True)
    print_choice(results)
    if args.out:
        args.out.write_text(json.dumps({"products": results, "chains": chains}) + "\n")
    print(f"{time.monotonic() - started:.0f} s in all")


def print_choice(results: list[dict[str, Any]]) -> None:
    """For each bucket of rows the candidate with the least time over its row counts, as entries of the table.

    One row alone has an entry where the bucket's choice is more than 2 % slower than the best.
    """
    sums: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for row in results:
        if row["config"] != "cublas":
            times = sums.setdefault((row["name"], row_bucket(row["m"])), {})
            times.setdefault(json.dumps(row["config"]), {})[row["m"]] = row["with_reader_us"]
    for (name, rows), times in sums.items():
        kind, n, k = SHAPES[name]
        most = max(map(len, times.values()))
        best = min((c for c in times if len(times[c]) == most), key=lambda c: sum(times[c].values()))
        chosen = {rows: best}
        if 1 in times[best]:
            alone = min((c for c in times if 1 in times[c]), key=lambda c: times[c][1])
            if times[alone][1] < 0.98 * times[best][1]:
                chosen[1] = alone
        for key, config in chosen.items():
            print(f'    ("{kind}", {key}, {n}, {0 if kind == "head" else k}): {Config(**json.loads(config))!r},')


if __name__ == "__main__":
    main()
