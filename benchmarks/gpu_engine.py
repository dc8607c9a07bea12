"""Speed of the GPU engine on random weights of a real config, beside its floor and vLLM on the same machine.

    table     all requests at once, by concurrency, through the engine core: prefill rate until the last first token,
              decode step (median while all decode), end to end; what the device idles between steps; host CPU a step
    steps     single decode steps of the runner at 4,250 tokens of context (KV pages hold noise), without the core;
              and prefill steps of whole prompts
    poisson   requests that arrive one by one
    profile   time on the device by kernel, of decode steps and prefill steps (torch.profiler)

    python benchmarks/gpu_engine.py [--parts table,steps,poisson,profile] [--quick] [--profile N]
                                    [--peer vllm [--peer-path DIR]] [--out FILE.json]

--quick: few output tokens, from prompts that begin near the context that is to be measured; end to end is then left
out. The floor is the bytes of a step at 4.3 TB/s, and a prompt's operations at the rates of `gpu.floors`. Without
--peer the peer's published figures stand beside ours, on the same kind of machine but not the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "libs"))

import torch

from gpu.engine import Engine, vocab_of
from gpu.floors import CONFIGS, Shape
from gpu.peer import run_vllm
from gpu.report import Tee, kernels, table
from gpu.steps import Steps
from gpu.workload import poisson, prompts

CONTEXT = 4250


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-3.1-8b.json")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parts", default="table", help="table, steps, poisson, profile; comma separated")
    parser.add_argument("--concurrency", default="1,10,20,64,128")
    parser.add_argument("--prompt", type=int, default=0, help="tokens in; default 4000, with --quick 4250 - out / 2")
    parser.add_argument("--out-tokens", type=int, default=0, help="tokens out; default 500, with --quick 64")
    parser.add_argument("--context", type=int, default=CONTEXT, help="of steps and profile")
    parser.add_argument("--steps", type=int, default=40, help="of steps")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=3.4, help="poisson: requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="poisson: arrivals within")
    parser.add_argument("--profile", type=int, default=10, metavar="N", help="profile: steps")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--peer-path", default=os.environ.get("VLLM_PATH", ""), help="folder that holds the peer")
    parser.add_argument("--peer-timeout", type=float, default=480.0)
    parser.add_argument("--peer-concurrency", default="", help="default: as --concurrency")
    parser.add_argument("--out", type=Path, help="JSON; a .log beside it")
    return parser.parse_args()


class Bench:
    def __init__(self, args: argparse.Namespace, log: Tee) -> None:
        self.args, self.log = args, log
        self.parts = args.parts.split(",")
        self.counts = [int(n) for n in args.concurrency.split(",")]
        self.out = args.out_tokens or (64 if args.quick else 500)
        self.prompt = args.prompt or (CONTEXT - self.out // 2 if args.quick else 4000)
        self.vocab = vocab_of(args.config)
        self.on_gpu = args.device.startswith("cuda")
        # Floors are those of one machine.
        self.shape = Shape.of(args.config) if self.on_gpu else None
        # With few tokens out, the first request would end before the last has begun.
        self.more = {n: self.prompt * n // args.budget + 2 if args.quick else 0 for n in self.counts}
        longest = self.prompt + self.out + max(self.more.values())
        longest = max(longest, args.context + args.steps + 64)
        self.max_model_len = -(-(longest + 1) // 256) * 256
        self.report: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "device": torch.cuda.get_device_name(args.device) if self.on_gpu else "cpu",
            "torch": torch.__version__,
            "config": args.config.name,
            "prompt": self.prompt,
            "out": self.out,
            "token_budget": args.budget,
        }
        self.engine: Engine | None = None

    def load(self) -> Engine:
        args = self.args
        self.engine = engine = Engine(
            f"random:{args.config}",
            args.device,
            max_batch=max(self.counts),
            token_budget=args.budget,
            max_model_len=self.max_model_len,
            tokens=max(self.counts) * (max(self.prompt + self.out, args.context) + max(self.more.values()) + 128),
            graphs=not args.no_graphs,
            overlap=not args.no_overlap,
        )
        if hasattr(engine.runner, "record_events"):
            engine.runner.record_events = True
        self.report |= {"load_s": round(engine.load_s, 1), "page_size": engine.layout.page_size}
        self.report["num_pages"] = engine.layout.num_pages
        self.log(f"loaded in {engine.load_s:.1f} s: {engine.layout.num_pages} pages of {engine.layout.page_size}")
        return engine

    def table(self, engine: Engine) -> None:
        engine.serve(prompts(min(4, max(self.counts)), self.prompt, self.vocab, seed=99), 8)
        rows = []
        for n in self.counts:
            out = self.out + self.more[n]
            begun = time.perf_counter()
            gc.collect()
            row = engine.serve(prompts(n, self.prompt, self.vocab), out).row(engine, self.prompt)
            row |= {"context": self.prompt + out / 2 if not self.args.quick else self.prompt + self.more[n] / 2 + 32}
            rows.append(row)
            self.log(f"{json.dumps(row)}  ({time.perf_counter() - begun:.1f} s)")
        self.report["table"] = rows

    def steps(self, engine: Engine, steps: Steps) -> None:
        rows = []
        for n in self.counts:
            row = {"concurrency": n, "context": self.args.context}
            row |= steps.measure(steps.decode(n, self.args.context, self.args.steps), self.args.steps)  # type: ignore[arg-type]
            if self.shape is not None:
                row["floor_ms"] = round(self.shape.decode_ms(n, self.args.context), 3)  # type: ignore[assignment]
            rows.append(row)
            self.log(f"decode steps: {json.dumps(row)}")
        count = max(1, self.args.budget // self.prompt)
        row = steps.measure(steps.prefill(self.prompt, self.args.budget, self.vocab), 8)  # type: ignore[assignment]
        rate = count * min(self.prompt, self.args.budget) / row["step_ms"] * 1e3
        row |= {"prompts_a_step": count, "tok_s": round(rate)}
        self.log(f"prefill steps: {json.dumps(row)}")
        self.report["steps"] = {"decode": rows, "prefill": row}

    def poisson(self, engine: Engine) -> None:
        args = self.args
        arrivals = poisson(args.rate, args.seconds)
        told = engine.serve(prompts(len(arrivals), self.prompt, self.vocab, seed=1), self.out, arrivals).arrivals()
        self.report["poisson"] = {"rate": args.rate, "seconds": args.seconds, **told}
        self.log(f"poisson, {args.rate} requests/s for {args.seconds:g} s: {json.dumps(told)}")

    def profile(self, engine: Engine, steps: Steps) -> None:
        n_steps = self.args.profile
        told: dict[str, Any] = {}
        for n in self.counts:
            told[f"decode {n}"] = steps.profile(steps.decode(n, self.args.context, n_steps), n_steps)
        told["prefill"] = steps.profile(steps.prefill(self.prompt, self.args.budget, self.vocab), 3)
        for name, rows in told.items():
            self.log(f"\n{name}, by kernel:")
            for line in kernels(rows):
                self.log(line)
        self.report["profile"] = told

    def peer(self) -> dict[str, Any]:
        args = self.args
        counts = [int(n) for n in args.peer_concurrency.split(",")] if args.peer_concurrency else self.counts
        job = {
            "config": str(args.config.resolve()),
            "concurrency": counts,
            "prompt": self.prompt,
            "out": self.out,
            "more": {str(n): self.more.get(n, 0) for n in counts},
            "max_model_len": self.max_model_len,
            "utilization": 0.85,
            "path": args.peer_path,
        }
        told = run_vllm(job, args.peer_timeout, self.log)
        self.report["vllm"] = told
        return told

    def run(self) -> None:
        unknown = set(self.parts) - {"table", "steps", "poisson", "profile", "none"}
        if unknown:
            sys.exit(f"unknown part {sorted(unknown)[0]!r}")
        if self.parts != ["none"]:
            engine = self.load()
            if "table" in self.parts:
                self.table(engine)
            if "poisson" in self.parts:
                self.poisson(engine)
            if {"steps", "profile"} & set(self.parts):
                steps = Steps(engine)
                if "steps" in self.parts:
                    self.steps(engine, steps)
                if "profile" in self.parts:
                    self.profile(engine, steps)
                del steps
            engine.close()
            self.engine = None
            del engine
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
        peer = self.peer() if self.args.peer else {}
        if "table" in self.report:
            self.log()
            standard = (self.prompt, self.out) == (4000, 500) or bool(peer.get("rows"))
            lines = table(
                self.report["table"], self.shape, self.prompt, self.out, peer, standard and not self.args.quick
            )
            for line in lines:
                self.log(line)

    def save(self) -> None:
        if self.args.out is not None:
            self.args.out.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    args = parse()
    log = Tee(args.out.with_suffix(".log") if args.out is not None else None)
    bench = Bench(args, log)
    try:
        bench.run()
    finally:
        # What was measured before something failed is worth keeping.
        bench.save()
        log.close()


if __name__ == "__main__":
    main()
