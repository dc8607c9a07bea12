"""Sampling on the device, by parameters and rows, beside FlashInfer's kernels.

    python benchmarks/gpu_kernels/sampling.py [--rows 1,20,64,128] [--block 8192] [--warps 16] [--out FILE]

Device time of one step's sampling, µs: events around `DeviceSampler.run`, its copy of parameters included, queued
behind a kernel that keeps the device busy meanwhile, so that the host's launches do not count; they are the columns
`prepare` and `run` (host, µs). Logits are written right before, as the head does. Medians of 15. The floor is one read
of the logits at 4.3 TB/s, what a copy reaches on an H200. Two kinds of logits: `flat`, where thousands of tokens share
the mass, which is the worst case for the edges, and `peaked`, as a model's. FlashInfer: its softmax and the kernel for
these parameters, where its kernels are built already; it draws by rejection and knows no penalties.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libs"))

import numpy as np
import torch

from kvmesh.engine.cuda.sampler import DeviceSampler
from kvmesh.engine.runner import SampleInput, SamplingParams
from kvmesh.engine.sampler import sample_row
from kvmesh.engine.sampling.noise import uniform
from kvmesh.engine.sampling.processors import adjust, distribution
from kvmesh.layers.cuda import sampling as kernels

RATE = 4.3e12
REPEATS = 15
PROMPT = 4000
# About 2 ms: longer than the host needs to queue a step's sampling.
BUSY_CYCLES = 4_000_000
SPREADS = {"flat": 1.0, "peaked": 4.0}
DEVICE = "cuda:0"
CASES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "all, penalties": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
    "greedy, 5 logprobs": {"temperature": 0.0, "want_logprobs": True, "logprobs": 5},
    "greedy, 20 logprobs": {"temperature": 0.0, "want_logprobs": True, "logprobs": 20},
}


def timed(call: Callable[[], Any], first: Callable[[], Any], write: Callable[[], Any]) -> tuple[float, float]:
    """(device µs, host µs) of one call, medians; `first` is the host's, `write` the device's work before it."""
    marks, host = [], []
    for _ in range(REPEATS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first()
        torch.cuda._sleep(BUSY_CYCLES)
        write()
        begin.record()
        at = time.perf_counter()
        call()
        host.append((time.perf_counter() - at) * 1e6)
        end.record()
        torch.cuda.synchronize()
        marks.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(marks[2:]), statistics.median(host[2:])


class Case:
    """Steps of `rows` sequences with the same parameters."""

    def __init__(self, sampler: DeviceSampler, rows: int, params: dict[str, Any], source: torch.Tensor) -> None:
        self.sampler, self.count, self.source = sampler, rows, source
        self.params = [SamplingParams(seed=i, **params) for i in range(rows)]
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(0, sampler.vocab, PROMPT).tolist() for _ in range(rows)]
        self.outputs: list[list[int]] = [[] for _ in range(rows)]
        self.logits = torch.empty_like(source)
        self.tokens = torch.empty(rows, dtype=torch.int32, device=DEVICE)
        self.prepared: Any = None
        self.prepare_us: list[float] = []

    def rows(self) -> list[tuple[int, int, SampleInput, bool]]:
        length = PROMPT + len(self.outputs[0])
        parts = zip(self.params, self.prompts, self.outputs, strict=True)
        return [(i, i, SampleInput(p, 0, length, prompt, out), False) for i, (p, prompt, out) in enumerate(parts)]

    def before(self) -> None:
        at = time.perf_counter()
        self.prepared = self.sampler.prepare(self.rows())
        self.prepare_us.append((time.perf_counter() - at) * 1e6)

    def write(self) -> None:
        self.logits.copy_(self.source)

    def run(self) -> None:
        self.sampler.run(self.logits, self.prepared, self.tokens)

    def after(self) -> None:
        """What was sampled goes to the output, as in an engine."""
        for out, token in zip(self.outputs, self.tokens.tolist(), strict=True):
            out.append(token)

    def agree(self) -> bool:
        """The first and the last row against the CPU's sampler."""
        rows = self.rows()
        self.before()
        self.write()
        self.run()
        got = self.tokens.tolist()
        self.sampler.finish(self.prepared)
        self.sampler.forget(range(self.count))
        return all(agrees(self.source[i].cpu().numpy(), rows[i][2], got[i]) for i in {0, self.count - 1})


def agrees(row: np.ndarray, sample: SampleInput, token: int) -> bool:
    """The CPU's token, or one within 1e-5 of it in the distribution."""
    if sample_row(row, sample) == token:
        return True
    if sample.params.temperature == 0.0:
        return False
    ids, probs = distribution(adjust(row, sample), sample.params)
    noise = uniform(sample.params.seed, sample.choice, sample.position)
    below, upto = float(probs[ids < token].sum()), float(probs[ids <= token].sum())
    return token in ids and below - 1e-5 <= noise <= upto + 1e-5


def flashinfer_call(fi: Any, params: dict[str, Any], logits: torch.Tensor) -> Callable[[], Any] | None:
    rows = len(logits)
    if params["temperature"] == 0.0 or "repetition_penalty" in params:
        return None
    temperature = torch.full((rows,), params["temperature"], device=DEVICE)
    top_k = torch.full((rows,), params.get("top_k", 0), dtype=torch.int32, device=DEVICE)
    top_p = torch.full((rows,), params.get("top_p", 1.0), device=DEVICE)
    kernel = {
        (False, False): lambda probs: fi.sampling.sampling_from_probs(probs),
        (True, False): lambda probs: fi.sampling.top_k_sampling_from_probs(probs, top_k),
        (False, True): lambda probs: fi.sampling.top_p_sampling_from_probs(probs, top_p),
        (True, True): lambda probs: fi.sampling.top_k_top_p_sampling_from_probs(probs, top_k, top_p),
    }["top_k" in params, "top_p" in params]
    return lambda: kernel(fi.sampling.softmax(logits, temperature))


def built_flashinfer() -> Any:
    """The module where its kernels need no compiler, else None."""
    try:
        import flashinfer
    except ImportError:
        return None
    return flashinfer if any((Path(flashinfer.__file__).parent / "data" / "aot").glob("*")) else None


def measure(rows: Sequence[int], vocab: int) -> list[dict[str, Any]]:
    fi = built_flashinfer()
    sampler = DeviceSampler(vocab, max(rows), DEVICE)
    begun = time.perf_counter()
    sampler.warm()
    print(f"vocabulary {vocab}; kernels compiled in {time.perf_counter() - begun:.1f} s")
    print(f"{'rows':>4} {'logits':7} {'parameters':20} {'µs':>7} {'floor':>6} {'fi':>7} {'prepare':>8} {'run':>6} same")
    results = []
    for count in rows:
        for kind, spread in SPREADS.items():
            generator = torch.Generator(DEVICE).manual_seed(count)
            source = torch.randn((count, vocab), device=DEVICE, generator=generator) * spread
            for name, params in CASES.items():
                case = Case(sampler, count, params, source)
                agree = case.agree()

                def call(case: Case = case) -> None:
                    case.run()

                def before(case: Case = case) -> None:
                    # Of the step before: the device is past it.
                    if case.prepared is not None:
                        sampler.finish(case.prepared)
                        case.after()
                    case.before()

                case.prepared = None
                device, host = timed(call, before, case.write)
                sampler.finish(case.prepared)
                sampler.forget(range(count))
                other = None
                if fi is not None and (theirs := flashinfer_call(fi, params, case.logits)) is not None:
                    try:
                        other, _ = timed(theirs, lambda: None, case.write)
                    except Exception as error:
                        print(f"FlashInfer: {str(error).splitlines()[0] if str(error) else error!r}")
                        fi = None
                floor = count * vocab * 4 / RATE * 1e6
                prepare = statistics.median(case.prepare_us[3:])
                results.append(
                    {
                        "rows": count,
                        "logits": kind,
                        "parameters": name,
                        "device_us": round(device, 1),
                        "floor_us": round(floor, 1),
                        "flashinfer_us": None if other is None else round(other, 1),
                        "prepare_us": round(prepare, 1),
                        "run_host_us": round(host, 1),
                        "same_as_cpu": agree,
                    }
                )
                shown = "-" if other is None else f"{other:.1f}"
                print(
                    f"{count:4} {kind:7} {name:20} {device:7.1f} {floor:6.1f} {shown:>7} {prepare:8.0f} {host:6.0f} "
                    f"{'yes' if agree else 'NO'}",
                    flush=True,
                )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,20,64,128")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--block", type=int, default=kernels._BLOCK, help="tokens at a time")
    parser.add_argument("--warps", type=int, default=kernels._WARPS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    kernels._BLOCK, kernels._WARPS = args.block, args.warps
    torch.cuda.set_device(DEVICE)
    results = measure([int(rows) for rows in args.rows.split(",")], args.vocab)
    if args.out is not None:
        report = {
            "device": torch.cuda.get_device_name(DEVICE),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "vocab": args.vocab,
            "block": args.block,
            "warps": args.warps,
            "results": results,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
