"""Simulation of a fleet on one fixed trace: how even the load is, how much of the prompts is found in caches, TTFT.

    python benchmarks/router.py simulation [--quick] [--sizes 8,64,512] [--out benchmarks/results/router_simulation.txt]

Every policy gets the same requests at the same times (see `trace`); workers are those of `worker`. Figures are of the
time after the warm-up:

- load of a worker in a window of 10 s: tokens of the requests placed on it then that it has to compute (prompt tokens
  that its cache did not hold, and output); beside it all tokens of those requests, whether cached or not. Each is set
  against the mean of its window over the fleet, so that a burst is not an imbalance; `p99/mean` is the 99th percentile
  over workers and windows, `worst` the highest.
- hits: prompt tokens found in the worker's cache, over those that one infinite cache would have had.
- TTFT: from arrival to the first token's step.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from router import trace
from router.policies import REPORT_S, CacheAware, Clock, Mesh, Policy, PowerOfTwo, Random, RoundRobin
from router.trace import Cost, Request
from router.worker import Worker
from services.router.placement.placer import Rules

COST = Cost()
PAGES = 4096
MAX_BATCH = 128
WINDOW_S = 10.0
WARM_S = 60.0
HOP_S = 0.002


@dataclass(slots=True)
class Outcome:
    """What one run came to."""

    computed: npt.NDArray[np.float64]
    """[window, worker] tokens to compute."""
    tokens: npt.NDArray[np.float64]
    ttft: npt.NDArray[np.float64]
    hit: float
    ideal: float
    busy: float
    seconds: float
    decision_us: float

    @property
    def hits_of_ideal(self) -> float:
        return self.hit / max(1.0, self.ideal)


def spread(load: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(99th percentile, highest) of a worker's load over its window's mean."""
    relative = load / np.maximum(load.mean(1, keepdims=True), 1.0)
    return float(np.percentile(relative, 99)), float(relative.max())


@dataclass(slots=True)
class Fleet:
    """A run: the heap of what happens next, over the workers."""

    workers: list[Worker]
    heap: list[tuple[float, int, int, int]] = field(default_factory=list)

    def reschedule(self, worker: Worker) -> None:
        """The worker's next end has changed."""
        worker.version += 1
        at = worker.next_event()
        if at is not None:
            heapq.heappush(self.heap, (at, 1, worker.number, worker.version))


def run(
    requests: Sequence[Request],
    workers: int,
    make_policy: Callable[[Clock], Policy],
    *,
    cost: Cost = COST,
    block: int = 64,
    pages: int = PAGES,
    warm_s: float = WARM_S,
) -> Outcome:
    """One policy over the trace."""
    begun = time.perf_counter()
    clock = Clock()
    policy = make_policy(clock)
    where = [0] * len(requests)
    ttft = np.zeros(len(requests))
    hits = np.zeros(len(requests), np.int64)

    def told(number: int) -> Callable[[str, list[int], int], None] | None:
        if not policy.reports:
            return None
        return lambda kind, blocks, depth: policy.changed(number, kind, blocks, depth)

    def first_token(request: Request, at: float, hit: int) -> None:
        ttft[request.number] = at + HOP_S - request.at
        hits[request.number] = hit

    fleet = Fleet([Worker(number, pages, block, cost, MAX_BATCH, told(number)) for number in range(workers)])
    for worker in fleet.workers:
        worker.first_token = first_token
        worker.ended = lambda request: policy.ended(request, where[request.number])
        if policy.reports:
            policy.report(worker)
            heapq.heappush(fleet.heap, (REPORT_S * (1 + worker.number / workers), 0, worker.number, 0))
    deciding = 0.0
    heap, last = fleet.heap, requests[-1].at
    for request in requests:
        while heap and heap[0][0] <= request.at:
            _event(fleet, clock, policy, last)
        clock.now = request.at
        at = time.perf_counter()
        number = policy.choose(request)
        deciding += time.perf_counter() - at
        where[request.number] = number
        worker = fleet.workers[number]
        worker.advance(clock.now)
        worker.submit(request, clock.now)
        fleet.reschedule(worker)
    while heap:
        _event(fleet, clock, policy, last)
    return _outcome(requests, where, ttft, hits, workers, cost, warm_s, begun, deciding)


def _event(fleet: Fleet, clock: Clock, policy: Policy, last: float) -> None:
    at, kind, number, version = heapq.heappop(fleet.heap)
    worker = fleet.workers[number]
    if kind == 1:
        if version == worker.version:
            clock.now = at
            worker.advance(at + 1e-9)
            fleet.reschedule(worker)
        return
    clock.now = at
    worker.advance(at)
    fleet.reschedule(worker)
    policy.report(worker)
    if at < last:
        heapq.heappush(fleet.heap, (at + REPORT_S, 0, number, 0))


def _outcome(
    requests: Sequence[Request],
    where: list[int],
    ttft: npt.NDArray[np.float64],
    hits: npt.NDArray[np.int64],
    workers: int,
    cost: Cost,
    warm_s: float,
    begun: float,
    deciding: float,
) -> Outcome:
    at = np.array([r.at for r in requests])
    prompt, output = np.array([r.prompt for r in requests]), np.array([r.output for r in requests])
    ideal = np.array([r.ideal for r in requests])
    end = requests[-1].at
    windows = max(1, int((end - warm_s) / WINDOW_S))
    # Whole windows, counted from the end of the trace.
    index = np.floor((at - (end - windows * WINDOW_S)) / WINDOW_S).astype(np.int64)
    counted = (index >= 0) & (at >= warm_s)
    index = np.minimum(index, windows - 1)
    computed, tokens = np.zeros((windows, workers)), np.zeros((windows, workers))
    place = np.array(where)
    np.add.at(computed, (index[counted], place[counted]), (prompt - hits + output)[counted])
    np.add.at(tokens, (index[counted], place[counted]), (prompt + output)[counted])
    work = sum(cost.work(float(p - h), float(o)) for p, h, o in zip(prompt, hits, output, strict=True))
    return Outcome(
        computed,
        tokens,
        ttft[counted],
        float(hits[counted].sum()),
        float(ideal[counted].sum()),
        work / (workers * end),
        time.perf_counter() - begun,
        deciding / len(requests) * 1e6,
    )


def policies(workers: int, *, replicas: Sequence[int] = (1, 3)) -> dict[str, Callable[[Clock], Policy]]:
    """Name → maker."""

    def mesh(count: int) -> Callable[[Clock], Policy]:
        return lambda clock: Mesh(workers, random.Random(7), pages=PAGES, block=64, clock=clock, replicas=count)

    made: dict[str, Callable[[Clock], Policy]] = {f"kvmesh, {count} router(s)": mesh(count) for count in replicas}
    made["round robin"] = lambda clock: RoundRobin(workers, random.Random(7))
    made["random"] = lambda clock: Random(workers, random.Random(7))
    made["power of two"] = lambda clock: PowerOfTwo(workers, random.Random(7))
    made["cache-aware, as published"] = lambda clock: CacheAware(workers, random.Random(7))
    made["cache-aware, tuned"] = lambda clock: CacheAware(workers, random.Random(7), absolute=4)
    return made


def line(name: str, outcome: Outcome) -> str:
    p99, worst = spread(outcome.computed)
    all_p99, _ = spread(outcome.tokens)
    p50_ttft, p99_ttft = np.percentile(outcome.ttft, [50, 99])
    return (
        f"{name:<28}{p99:8.2f}{worst:8.2f}{all_p99:10.2f}{100 * outcome.hits_of_ideal:10.1f}%"
        f"{1000 * p50_ttft:10.0f}{1000 * p99_ttft:10.0f}{outcome.busy:8.2f}"
        f"{outcome.decision_us:8.0f}{outcome.seconds:8.1f}"
    )


HEAD = (
    f"{'policy':<28}{'p99/mean':>8}{'worst':>8}{'all tok.':>10}{'of ideal':>11}"
    f"{'TTFT p50':>10}{'p99 ms':>10}{'busy':>8}{'us/dec':>8}{'s':>8}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet, its trace, and what is asked of it."""

    workers: int
    seconds: float
    warm_s: float
    most_uneven: float
    least_hits: float


SIZES = (
    Size(8, 360.0, 60.0, 1.5, 0.8),
    Size(16, 240.0, 60.0, 1.5, 0.8),
    Size(32, 180.0, 60.0, 1.5, 0.8),
    Size(64, 150.0, 60.0, 1.5, 0.8),
    Size(512, 80.0, 40.0, 2.0, 0.7),
)
QUICK = Size(8, 120.0, 60.0, 1.5, 0.8)


def verdict(size: Size, outcomes: dict[str, Outcome]) -> str:
    """What was asked, and whether it came true, in one line."""
    ours = [outcome for name, outcome in outcomes.items() if name.startswith("kvmesh")]
    others = [outcome for name, outcome in outcomes.items() if not name.startswith("kvmesh")]
    uneven = max(spread(outcome.computed)[0] for outcome in ours)
    hits = min(outcome.hits_of_ideal for outcome in ours)
    ttft = max(float(np.percentile(outcome.ttft, 99)) for outcome in ours)
    best = min((float(np.percentile(outcome.ttft, 99)) for outcome in others), default=float("inf"))
    met = uneven <= size.most_uneven and hits >= size.least_hits and ttft < best
    return (
        f"{'met' if met else 'NOT MET'}: p99/mean {uneven:.2f} <= {size.most_uneven:g}, hits {100 * hits:.0f} % >= "
        f"{100 * size.least_hits:.0f} %, TTFT p99 {1000 * ttft:.0f} ms < {1000 * best:.0f} ms (best of the others)"
    )


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="router.py simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(str(size.workers) for size in SIZES))
    parser.add_argument("--quick", action="store_true", help="8 workers, a short trace")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    wanted = [int(size) for size in options.sizes.split(",")]
    sizes = [QUICK] if options.quick else [size for size in SIZES if size.workers in wanted]
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    say(f"trace seed {trace.SEED}, {trace.Shape()}")
    say(f"{COST}, {PAGES} pages, batch {MAX_BATCH}, load reports every {REPORT_S:g} s, 1 % of messages lost")
    say(f"{Rules().weights}")
    for size in sizes:
        requests = trace.make(size.workers, size.seconds)
        prompts, ideal = sum(r.prompt for r in requests), sum(r.ideal for r in requests)
        say(
            f"\n{size.workers} workers, {len(requests)} decisions in {size.seconds:g} s, the first {size.warm_s:g} s "
            f"not counted; an infinite cache holds {100 * ideal / prompts:.0f} % of the prompts\n{HEAD}"
        )
        outcomes: dict[str, Outcome] = {}
        for name, maker in policies(size.workers).items():
            outcomes[name] = run(requests, size.workers, maker, warm_s=size.warm_s)
            say(line(name, outcomes[name]))
        if not options.quick:
            say(verdict(size, outcomes))
    return 0
