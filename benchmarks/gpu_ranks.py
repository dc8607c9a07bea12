"""Decode step of two tensor-parallel ranks on two GPUs: of one host, of two hosts, and of one GPU beside them.

    python benchmarks/gpu_ranks.py [--sides one_gpu,one_host,two_hosts_nvlink,two_hosts] [--concurrency 1,20,64]
                                   [--context 4250] [--steps 40] [--config FILE] [--no-graphs] [--out FILE.json]

Each side is a process of its own, one after the other, on random weights of a real config: single steps launched one
ahead, without the core (as `gpu_engine.py --parts steps`); then steps of whole prompts. KV of the leader holds noise,
that of the second rank zeros. Two hosts are two GPUs of this machine: of `two_hosts` NCCL is told that they are
machines, so sums go through sockets of the loopback device and copies to host memory; a real network is slower.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "libs"))

from gpu.floors import CONFIGS
from gpu.report import Tee

SIDES = ("one_gpu", "one_host", "two_hosts_nvlink", "two_hosts")
SIDE_S = 240.0
BUDGET = 4096


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-3.1-8b.json")
    parser.add_argument("--concurrency", default="1,20,64")
    parser.add_argument("--context", type=int, default=4250)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON; a .log beside it")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """In the process of one side: a line of JSON for each measurement."""
    import torch

    from gpu.engine import Engine, vocab_of
    from gpu.ranks import TwoHosts, TwoHostsNvlink, TwoRanks
    from gpu.steps import Steps
    from kvmesh.engine.worker.leaving import leave

    makes: dict[str, type[Engine]] = {
        "one_gpu": Engine,
        "one_host": TwoRanks,
        "two_hosts": TwoHosts,
        "two_hosts_nvlink": TwoHostsNvlink,
    }
    counts = [int(n) for n in args.concurrency.split(",")]
    longest = -(-(args.context + args.steps + 64) // 256) * 256
    engine = makes[args.side](
        f"random:{args.config}", "cuda:0", max_batch=max(counts), token_budget=BUDGET, max_model_len=longest,
        tokens=max(counts) * longest, graphs=not args.no_graphs,
    )  # fmt: skip
    if hasattr(engine.runner, "record_events"):
        engine.runner.record_events = True
    steps = Steps(engine)

    def say(row: dict[str, Any]) -> None:
        print(json.dumps({"side": args.side, **row}), flush=True)

    say({"load_s": round(engine.load_s, 1), "device": torch.cuda.get_device_name(0), "torch": torch.__version__})
    for n in counts:
        row: dict[str, Any] = steps.measure(steps.decode(n, args.context, args.steps), args.steps)
        say({"decode": n, "context": args.context, **row})
    row = steps.measure(steps.prefill(BUDGET, BUDGET, vocab_of(args.config)), 6)
    say({"prefill": BUDGET, "tok_s": round(BUDGET / row["step_ms"] * 1e3), **row})
    engine.close()
    # As a worker does.
    leave(0)


def main() -> None:
    args = parse()
    if args.side:
        measure(args)
        return
    log = Tee(args.out.with_suffix(".log") if args.out is not None else None)
    log("$ " + " ".join(["python", *sys.argv]))
    rows: list[dict[str, Any]] = []
    for side in args.sides.split(","):
        own = [sys.executable, *sys.argv, "--side", side]
        with subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, errors = process.communicate(timeout=SIDE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        rows += [json.loads(line) for line in lines]
        for line in lines:
            log(line)
        if process.returncode:
            log(f"{side} ended with {process.returncode}: {errors[-3000:]}")
    log()
    took = {(row["side"], row["decode"]): row["step_ms"] for row in rows if "decode" in row}
    for side in dict.fromkeys(side for side, _ in took):
        told = ", ".join(f"{n}: {ms:.2f}" for (own, n), ms in took.items() if own == side)
        log(f"{side}: ms a decode step by rows: {told}")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    log.close()


if __name__ == "__main__":
    main()
