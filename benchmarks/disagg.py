"""One prefill and one decode GPU against two unified replicas: latencies and goodput at rising Poisson rates.

The workers are the services of production with sidecars beside them, on random weights of a real config; this process
speaks the worker API as a gateway does, in turn to the replicas of the unified pair. Each rate has the same prompts and
arrival times for both. Times as the client sees them; the exposed part of a transfer is from prefill's last chunk
computed to the last byte counted at decode, by the workers' own clocks.

    idle      single requests: TTFT, exposed transfer
    main      the rate of the comparison, for --seconds
    ladder    rising rates, --ladder-seconds each, up to the first that misses the limits of goodput
              (inter-token p99 <= 25 ms, TTFT p99 <= 1 s)

    python benchmarks/disagg.py [--sides disagg,unified] [--rate 6.8] [--ladder 9,11,13] [--unified-ladder 2,4]
                                [--out FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "libs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.client import Asked, WorkerClient, load
from gpu.fleet import Engine, Fleet, running
from gpu.floors import CONFIGS
from gpu.report import Tee
from gpu.workload import poisson, prompts, spread, trace_of
from kvmesh.proto.v1 import engine_pb2 as pb

SERVED = "bench"
INTER_TOKEN_LIMIT_MS, TTFT_LIMIT_MS = 25.0, 1000.0
# vLLM 0.25.0 over NixlConnector on two such GPUs, 6.8 requests/s for 50 s (vocabulary 49,152).
VLLM = {
    "disagg": {"ttft idle": 187, "ttft p50": 345, "ttft p99": 876, "inter-token p99": 115, "tok/s": 2985},
    "unified": {"ttft idle": 102, "ttft p50": 119, "ttft p99": 204, "inter-token p99": 91, "tok/s": 3011},
}
GOALS = {"ttft p50": 150.0, "inter-token p99": 20.0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-3.1-8b.json")
    parser.add_argument("--model", default="", help="instead of random weights of --config; --vocab is then needed")
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--sides", default="disagg,unified")
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--transports", default="nvlink,shm")
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--out-tokens", type=int, default=500)
    parser.add_argument("--rate", type=float, default=6.8, help="requests a second of the main run")
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--ladder", default="8,9,10,11", help="rates of the disaggregated pair")
    parser.add_argument("--unified-ladder", default="2,3,4,5", help="rates of the unified pair")
    parser.add_argument("--ladder-seconds", type=float, default=15.0)
    parser.add_argument("--idle", type=int, default=10, help="single requests")
    parser.add_argument("--prefill-budget", type=int, default=4096, help="tokens of a step of the prefill worker")
    parser.add_argument("--unified-budget", type=int, default=1024, help="tokens of a step of a unified worker")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--flags", default="", help="further settings of every worker, comma separated, without --")
    parser.add_argument("--out", type=Path, help="JSON; a .log beside it, and the workers' logs in a folder")
    args = parser.parse_args()
    if not args.model:
        args.model = f"random:{args.config.resolve()}"
        args.vocab = args.vocab or json.loads(args.config.read_text())["vocab_size"]
    return args


def figures(asked: Sequence[Asked], fleet: Fleet) -> dict[str, Any]:
    """Of requests that ran: `trace_of`, how their KV came, and what of that was exposed."""
    told: dict[str, Any] = trace_of([a.submitted for a in asked], [a.stamps for a in asked])
    marks = fleet.marks()
    exposed, joined, queued = [], [], []
    for a in asked:
        mine = marks.get(a.request_id, {})
        if "computed" in mine and "kv_complete" in mine:
            exposed.append((mine["kv_complete"] - mine["computed"]) * 1e3)
            queued.append((mine["computing"] - mine["run_received"]) * 1e3)
            joined.append((mine["first_token"] - mine["kv_complete"]) * 1e3)
    ends = [a.finished for a in asked if a.finished is not None]
    told["transport"] = sorted({end.transport or "none" for end in ends})
    told["transfer_bytes"] = max((end.transfer_bytes for end in ends), default=0)
    told["preemptions"] = sum(end.preemptions for end in ends)
    told["prefill_retries"] = sum(end.prefill_retries for end in ends)
    if exposed:
        told |= {
            "exposed_ms": spread(exposed),
            "prefill_queue_ms": spread(queued),
            "kv_to_first_token_ms": spread(joined),
        }
    return told


def good(told: dict[str, Any]) -> bool:
    return bool(told["inter_token_ms"]["p99"] <= INTER_TOKEN_LIMIT_MS and told["ttft_ms"]["p99"] <= TTFT_LIMIT_MS)


class Side:
    """One of the two arrangements."""

    def __init__(self, name: str, args: argparse.Namespace, log: Tee) -> None:
        self.name, self.args, self.log = name, args, log
        self.report: dict[str, Any] = {}

    def engines(self) -> list[Engine]:
        args = self.args
        first, second = args.devices.split(",")
        further = [f"--{flag}" for flag in args.flags.split(",") if flag]
        length = -(-(args.prompt + args.out_tokens + 1) // 256) * 256
        common = [
            "--no-prefix-cache",
            "--max-queue=4096",
            f"--max-model-len={length}",
            "--stall-timeout-s=60",
            *further,
        ]

        def budget(tokens: int, batch: int) -> list[str]:
            tokens = max(tokens, batch)
            return [f"--token-budget={tokens}", f"--chunk-size={tokens}", f"--max-batch={batch}"]

        if self.name == "unified":
            flags = [*common, *budget(args.unified_budget, args.max_batch)]
            return [Engine(f"unified-{i}", "unified", d, flags, sidecar=False) for i, d in enumerate((first, second))]
        prefill = [*common, *budget(args.prefill_budget, min(args.max_batch, 64)), "--no-cuda-graphs"]
        decode = [*common, *budget(args.prefill_budget, args.max_batch)]
        return [Engine("prefill-0", "prefill", first, prefill), Engine("decode-0", "decode", second, decode)]

    async def run(self) -> dict[str, Any]:
        args, log = self.args, self.log
        begun = time.perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(running(self.engines(), args.model, args.transports, SERVED))
            log(f"{self.name}: up after {time.perf_counter() - begun:.1f} s")
            self.report["start_s"] = round(time.perf_counter() - begun, 1)
            targets = []
            if self.name == "disagg":
                targets = [pb.PrefillTarget(worker_id="prefill-0", address=fleet.addresses["prefill-0"])]
            names = ["decode-0"] if targets else ["unified-0", "unified-1"]
            try:
                clients = [
                    await stack.enter_async_context(WorkerClient(fleet.addresses[name], fleet.token, SERVED, targets))
                    for name in names
                ]
                await self._measure(clients, fleet)
            except BaseException:
                log(fleet.logs())
                raise
            finally:
                if args.out is not None:
                    fleet.keep_logs(args.out.parent / f"disagg-logs-{self.name}")
        return self.report

    async def _measure(self, clients: list[WorkerClient], fleet: Fleet) -> None:
        args = self.args
        # Warm: what is loaded at first use, and the paths between the processes.
        warm = prompts(8, args.prompt, args.vocab, seed=9)
        await load(clients, warm, [0.0] * 4 + [1.0] * 4, min(16, args.out_tokens), 300)
        single: list[Asked] = []
        for ids in prompts(args.idle, args.prompt, args.vocab, seed=5):
            single += await load(clients[:1], [ids], [0.0], min(16, args.out_tokens), 60)
            await asyncio.sleep(0.05)
        if single:
            self.report["idle"] = self._tell("idle", figures(single, fleet))
        if args.rate:
            self.report["main"] = await self._rate(clients, fleet, args.rate, args.seconds)
        rates = args.ladder if self.name == "disagg" else args.unified_ladder
        ladder: list[dict[str, Any]] = []
        self.report["ladder"] = ladder
        for rate in [float(r) for r in rates.split(",") if r]:
            ladder.append(await self._rate(clients, fleet, rate, args.ladder_seconds))
            if not ladder[-1]["good"]:
                break
        every = [*ladder, *([self.report["main"]] if args.rate else [])]
        self.report["goodput"] = max((row["rate"] for row in every if row["good"]), default=0.0)

    async def _rate(self, clients: list[WorkerClient], fleet: Fleet, rate: float, seconds: float) -> dict[str, Any]:
        arrivals = poisson(rate, seconds)
        texts = prompts(len(arrivals), self.args.prompt, self.args.vocab, seed=2)
        # This process's pauses would be taken for the workers'.
        gc.collect()
        gc.disable()
        try:
            asked = await load(clients, texts, arrivals, self.args.out_tokens, seconds + 120)
        finally:
            gc.enable()
        told = figures(asked, fleet)
        told = {"rate": rate, "seconds": seconds, "good": good(told), **told}
        return self._tell(f"{rate:g} requests/s", told)

    def _tell(self, what: str, told: dict[str, Any]) -> dict[str, Any]:
        self.log(f"{self.name}, {what}: {json.dumps(told)}")
        return told


def summary(report: dict[str, Any]) -> list[str]:
    sides = {name: report[name] for name in ("disagg", "unified") if name in report}
    lines = [f"{'':28}" + "".join(f"{name:>12}{'vLLM':>8}" for name in sides)]

    def row(label: str, key: str, pick: Any) -> None:
        line = f"{label:28}"
        for name, side in sides.items():
            try:
                value = f"{pick(side):.2f}"
            except (KeyError, TypeError):
                value = ""
            line += f"{value:>12}{VLLM[name].get(key, ''):>8}"
        goal = GOALS.get(key)
        lines.append(line + (f"   goal, disaggregated: <= {goal:g}" if goal else ""))

    row("TTFT idle p50, ms", "ttft idle", lambda s: s["idle"]["ttft_ms"]["p50"])
    row("TTFT p50, ms", "ttft p50", lambda s: s["main"]["ttft_ms"]["p50"])
    row("TTFT p99, ms", "ttft p99", lambda s: s["main"]["ttft_ms"]["p99"])
    row("inter-token p50, ms", "", lambda s: s["main"]["inter_token_ms"]["p50"])
    row("inter-token p99, ms", "inter-token p99", lambda s: s["main"]["inter_token_ms"]["p99"])
    row("TPOT p50, ms", "", lambda s: s["main"]["tpot_ms"]["p50"])
    row("TPOT p99, ms", "", lambda s: s["main"]["tpot_ms"]["p99"])
    row("tokens out/s", "tok/s", lambda s: s["main"]["out_tok_s"])
    row("exposed transfer idle p50, ms", "", lambda s: s["idle"]["exposed_ms"]["p50"])
    row("exposed transfer p50, ms", "", lambda s: s["main"]["exposed_ms"]["p50"])
    row("goodput, requests/s", "", lambda s: s["goodput"])
    if len(sides) == 2:
        with contextlib.suppress(KeyError, ZeroDivisionError):
            ttft = [side["idle"]["ttft_ms"]["p50"] for side in sides.values()]
            lines.append(f"TTFT idle, disaggregated against unified: {ttft[0] / ttft[1]:.3f} (goal <= 1.10)")
        with contextlib.suppress(KeyError, ZeroDivisionError):
            ratio = sides["disagg"]["goodput"] / sides["unified"]["goodput"]
            lines.append(f"goodput, disaggregated against unified: {ratio:.2f} (goal >= 2)")
    return lines


def main() -> int:
    args = parse()
    log = Tee(args.out.with_suffix(".log") if args.out is not None else None)
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "model": args.model}
    failed = False
    try:
        for name in args.sides.split(","):
            side = Side(name, args, log)
            report[name] = side.report
            try:
                asyncio.run(side.run())
            except Exception as error:
                # The other side's figures are still worth having.
                failed = True
                log(f"{name} FAILED: {error!r}")
        log()
        for line in summary(report):
            log(line)
    finally:
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        log.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
