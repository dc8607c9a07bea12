"""Paged decode attention of an 8B model's layer (32/8 heads, head_dim 128, pages of 64), beside FlashInfer's.

    python benchmarks/gpu_kernels/attention.py [--batches 1,20] [--tokens 4250] [--candidates few|many] [--kv bf16|fp8]
        [--out FILE]

Every candidate is checked against torch in fp32 and timed: one CUDA graph of launches over different layers, so that
the L2 holds nothing of what is read; medians of 20 replays, µs a layer, the merge of splits included. The floor is the
KV's bytes at 4.3 TB/s, what a copy reaches on an H200. `behind` is the same with a small kernel before each launch, as
rotary is in a step, the small kernels' own time included: it shows what reading ahead of the wait buys.

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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libs"))

import itertools

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvmesh.layers.cuda.decode_attention import AttentionConfig, Workspace, config_for, decode_attention

RATE = 4.3e12
KV_HEADS, GROUP, HEAD_DIM, PAGE = 8, 4, 128, 64
SCALE = HEAD_DIM**-0.5
# Layers that a graph walks over: enough bytes to pass the L2 ten times, and no more than a model has.
FOOTPRINT, LAYERS = 600 << 20, (8, 32)
REPLAYS = 20
A = AttentionConfig
FEW = [A(1, 128, 4, 3), A(2, 64, 4, 3)]
MORE = [A(1, 64, 4, 6), A(4, 64, 4, 3)]
# Of e4m3 pages.
FEW8 = [
    A(1, 64, 4, 4, paired=True),
    A(1, 64, 4, 7, paired=True),
    A(1, 128, 4, 3, paired=True),
    A(1, 128, 4, 4, paired=True),
    A(1, 128, 8, 4, paired=True),
    A(2, 64, 4, 3, paired=True),
    A(2, 64, 4, 4, paired=True),
    A(2, 64, 4, 5, paired=True),
    A(2, 128, 4, 3, paired=True),
    A(4, 64, 4, 4, paired=True),  # more blocks than fit at once
]
MORE8 = [
    A(2, 32, 4, 5, paired=True),
    A(2, 64, 2, 4, paired=True),
    A(4, 32, 2, 4, paired=True),
]
AHEAD = (64, 128, 256, 512)


def label(config: AttentionConfig) -> str:
    return f"{'SE'[config.paired]}{config.blocks}/{config.tile}w{config.warps}s{config.stages}+{config.ahead}"


@triton.jit
def touch(q_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stands where rotary does: every query is written, as it was."""
    gdc_launch_dependents()
    gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q_ptr + at, tl.load(q_ptr + at, mask=at < n), mask=at < n)


class Step:
    """Rows of given lengths in several layers' regions, and how to run attention over them."""

    def __init__(self, lengths: list[int], pool: torch.Tensor) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)
        self.rows = len(lengths)
        counts = -(-self.lengths // PAGE)
        pages = int(counts.sum())
        page = KV_HEADS * 2 * PAGE * HEAD_DIM
        self.nbytes = int(self.lengths.sum()) * KV_HEADS * 2 * HEAD_DIM * pool.itemsize
        layers = max(1, min(max(LAYERS[0], -(-FOOTPRINT // self.nbytes)), LAYERS[1], pool.numel() // (pages * page)))
        self.layers = [
            pool[i * pages * page : (i + 1) * pages * page].view(pages, KV_HEADS, 2, PAGE, HEAD_DIM)
            for i in range(layers)
        ]
        order = np.random.default_rng(1).permutation(pages).astype(np.int32)
        tables = np.full((self.rows, int(counts.max()) + 1), 1 << 30, dtype=np.int32)
        for row, (end, count) in enumerate(zip(counts.cumsum(), counts, strict=True)):
            tables[row, :count] = order[end - count : end]
        self.counts, self.order = counts, order
        self.tables = torch.from_numpy(tables).cuda()
        self.q = torch.randn(self.rows, KV_HEADS * GROUP, HEAD_DIM, device="cuda").to(torch.bfloat16)
        self.out = torch.empty(self.rows, KV_HEADS * GROUP * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.n = self.q.numel()

    def launcher(self, config: AttentionConfig) -> Callable[[torch.Tensor], None]:
        plan = config.plan(self.rows, KV_HEADS, torch.cuda.get_device_properties(0).multi_processor_count)
        host = np.zeros(plan.words, dtype=np.int32)
        plan.fill(self.lengths, host)
        work = torch.from_numpy(host).cuda()
        space = Workspace.allocate(plan.segments, self.rows, KV_HEADS, GROUP, HEAD_DIM, "cuda")
        space.partial.fill_(float("nan"))
        space.lse.fill_(float("nan"))

        def launch(layer: torch.Tensor) -> None:
            decode_attention(self.q, layer, self.tables, work, self.out, space, SCALE, plan, config, pdl=True)

        return launch

    def touch(self) -> None:
        touch[(triton.cdiv(self.n, 1024),)](self.q, self.n, 1024, launch_pdl=True)

    def flashinfer(self) -> Callable[[torch.Tensor], None]:
        import flashinfer  # type: ignore[import-not-found]

        space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        ends = np.concatenate(([0], self.counts.cumsum())).astype(np.int32)
        last = (self.lengths - 1) % PAGE + 1
        columns = [torch.from_numpy(a.astype(np.int32)) for a in (ends, self.order, last)]
        wrapper.plan(
            columns[0],
            columns[1].cuda(),
            columns[2],
            KV_HEADS * GROUP,
            KV_HEADS,
            HEAD_DIM,
            PAGE,
            q_data_type=torch.bfloat16,
            kv_data_type=self.layers[0].dtype,
        )
        out = self.out.view_as(self.q)
        return lambda layer: wrapper.run(self.q, (layer[:, :, 0], layer[:, :, 1]), out=out)

    def error(self, launch: Callable[[torch.Tensor], None]) -> float:
        """Largest relative error of a row in the first layer; nan where something was not written."""
        self.out.fill_(float("nan"))
        launch(self.layers[0])
        worst = 0.0
        for row, n in enumerate(self.lengths.tolist()):
            pages = self.tables[row, : -(-n // PAGE)].long()
            # Bytes are gathered: torch does not index 8-bit floats everywhere.
            kv = self.layers[0].view(torch.uint8)[pages].view(self.layers[0].dtype).float()
            kv = kv.permute(1, 2, 0, 3, 4).reshape(KV_HEADS, 2, -1, HEAD_DIM)[:, :, :n]
            q = self.q[row].float().view(KV_HEADS, GROUP, HEAD_DIM)
            want = ((q @ kv[:, 0].transpose(1, 2) * SCALE).softmax(-1) @ kv[:, 1]).flatten()
            error = ((self.out[row].float() - want).norm() / want.norm()).item()
            worst = error if error != error else max(worst, error)
        return worst

    def seconds(self, launch: Callable[[torch.Tensor], None], behind: bool = False) -> float:
        """Median seconds a layer."""

        def walk() -> None:
            for layer in self.layers:
                if behind:
                    self.touch()
                launch(layer)

        walk()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            walk()
            graph.capture_end()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return statistics.median(times) * 1e-3 / len(self.layers)


def kernel_of(config: AttentionConfig) -> AttentionConfig:
    """One of the configs that share its compiled kernel."""
    return dataclasses.replace(config, blocks=1, ahead=min(config.ahead, 1))


def compile_one(config: AttentionConfig) -> str:
    """Compiles a candidate in a process of its own, by launching it; says what went wrong."""
    try:
        kind = torch.float8_e4m3fn if config.paired else torch.bfloat16
        step = Step([100], torch.zeros(8 * 2 * KV_HEADS * 2 * PAGE * HEAD_DIM, device="cuda").to(kind))
        step.launcher(config)(step.layers[0])
        step.touch()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def host_us(rows: int, tokens: int) -> float:
    """Median µs of filling a work list."""
    plan = config_for(rows).plan(rows, KV_HEADS, 132)
    out, lengths = np.zeros(plan.words, dtype=np.int32), np.full(rows, tokens, dtype=np.int32)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        plan.fill(lengths, out)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def mix() -> list[int]:
    """32 rows from hundreds of tokens to sixty thousand."""
    rng = np.random.default_rng(7)
    return [60000, *np.exp(rng.normal(7.5, 1.2, 31)).astype(int).clip(1, 30000).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,10,20,64,128")
    parser.add_argument("--tokens", type=int, default=4250)
    parser.add_argument("--candidates", choices=("few", "many"), default="few")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    shapes = {str(b): [args.tokens] * b for b in map(int, args.batches.split(","))} | {"mix": mix()}
    quantized = args.kv == "fp8"
    few, more = (FEW8, MORE8) if quantized else (FEW, MORE)
    plain = few + (more if args.candidates == "many" else [])
    ahead = [dataclasses.replace(config, ahead=n) for config in plain for n in AHEAD]
    rules = {name: config_for(len(lengths), quantized) for name, lengths in shapes.items()}
    jobs = list(dict.fromkeys([*plain, *ahead, *rules.values()]))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as processes:
        kernels = list(dict.fromkeys(map(kernel_of, jobs)))
        errors = dict(zip(kernels, processes.map(compile_one, kernels), strict=True))
    failed = {config: errors[kernel_of(config)] for config in jobs if errors[kernel_of(config)]}
    for config, error in failed.items():
        print(f"does not run: {label(config)}: {error}")
    print(f"{torch.cuda.get_device_name(0)}; {len(kernels)} kernels compiled in {time.monotonic() - started:.0f} s")

    largest = max(sum(-(-n // PAGE) for n in lengths) for lengths in shapes.values())
    elements = max(LAYERS[0] * largest * KV_HEADS * 2 * PAGE * HEAD_DIM, FOOTPRINT)
    pool = torch.empty(elements, device="cuda", dtype=torch.bfloat16).normal_()
    if quantized:
        pool = pool.to(torch.float8_e4m3fn)
    check = Step([args.tokens, 1, 65, 1000, 16, 9999], pool)
    for config in [c for c in jobs if c not in failed]:
        error = check.error(check.launcher(config))
        if not error < 0.01:
            failed[config] = f"error {error}"
            print(f"WRONG: {label(config)}: relative error {error}")

    results: dict[str, Any] = {"tokens": args.tokens, "kv": args.kv, "gpu": torch.cuda.get_device_name(0), "shapes": {}}
    for name, lengths in shapes.items():
        step = Step(lengths, pool)
        result: dict[str, Any] = {"rows": len(lengths), "bytes": step.nbytes, "floor_us": step.nbytes / RATE * 1e6}
        try:
            result["flashinfer_us"] = step.seconds(step.flashinfer()) * 1e6
        except Exception as error:
            result["flashinfer_us"] = None
            print(f"no FlashInfer: {type(error).__name__}: {str(error)[:120]}")

        times, behind = {}, {}
        for config in dict.fromkeys([rules[name], *plain]):
            if config not in failed:
                times[config] = step.seconds(step.launcher(config)) * 1e6
        best = sorted(times, key=times.__getitem__)
        # The reading ahead is tried on the best few, behind a small kernel as in a step.
        for config in best[:3]:
            for variant in (config, *(dataclasses.replace(config, ahead=n) for n in AHEAD)):
                if variant not in failed and variant in jobs:
                    launch = step.launcher(variant)
                    behind[variant] = step.seconds(launch, behind=True) * 1e6
                    if variant not in times:
                        times[variant] = step.seconds(launch) * 1e6
        best = sorted(times, key=times.__getitem__)
        fastest = times[best[0]]
        result |= {
            "best": dataclasses.asdict(best[0]),
            "best_us": fastest,
            "tb_s": step.nbytes / fastest / 1e6,
            "rule": label(rules[name]),
            "rule_us": times.get(rules[name]),
            "host_plan_us": host_us(len(lengths), args.tokens),
            "us": {label(c): round(times[c], 2) for c in best},
            "behind_us": {label(c): round(behind[c], 2) for c in sorted(behind, key=behind.__getitem__)},
        }
        results["shapes"][name] = result
        rival = result["flashinfer_us"]
        print(
            f"rows {name:>4}: floor {result['floor_us']:7.1f}  FlashInfer {rival or float('nan'):7.1f}"
            f"  best {fastest:7.1f} ({result['tb_s']:.2f} TB/s)  rule {result['rule_us'] or float('nan'):7.1f}"
            f" {result['rule']}  host plan {result['host_plan_us']:.0f} µs"
        )
        for title in ("us", "behind_us"):
            shown = "  ".join(f"{key} {value:.1f}" for key, value in list(result[title].items())[:16])
            print(f"   {title:9} {shown}")
    results["seconds"] = time.monotonic() - started
    print(f"{results['seconds']:.0f} s in all")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
