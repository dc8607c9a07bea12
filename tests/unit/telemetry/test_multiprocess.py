"""Metrics of several processes as one: sums that never fall, gauges of the living only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import generate_latest

from kvmesh.telemetry.multiprocess import VARIABLE, Together

# Real processes: prometheus_client decides at its import where values are kept, and knows them by their pid.
SCRIPT = """
import os, signal, sys
from kvmesh.telemetry import metrics, names
count, state, end = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
metrics.counter(names.AUTH_FAILURES).labels("mesh").inc(count)
for _ in range(count):
    metrics.histogram(names.RPC_DURATION).labels("M", "OK").observe(0.003)
metrics.gauge(names.GATEWAY_ACTIVE).set(count)
metrics.gauge(names.GATEWAY_WORKERS).labels("open").set(count)
metrics.gauge(names.READY).labels("gateway").set(state)
print(metrics.value(names.AUTH_FAILURES, cause="mesh"), flush=True)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


class Child:
    def __init__(self, folder: Path, count: int, ready: int = 1, end: str = "wait") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(count), str(ready), end],
            env={**os.environ, VARIABLE: str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert float(self.process.stdout.readline()) == count, "a process still knows its own values"

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.pid


def values(together: Together) -> dict[str, float]:
    lines = generate_latest(together.registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


FAILURES = 'kvmesh:auth_failures_total{cause="mesh"}'
OBSERVED = 'kvmesh:rpc_duration_seconds_count{code="OK",method="M"}'
BUCKET = 'kvmesh:rpc_duration_seconds_bucket{code="OK",le="+Inf",method="M"}'
READY = 'kvmesh:ready{service="gateway"}'
WORKERS = 'kvmesh:gateway_workers{state="open"}'
ACTIVE = "kvmesh:gateway_requests_active"


def test_processes_count_together_and_nothing_is_lost_with_one(tmp_path: Path) -> None:
    live: list[int] = []
    together = Together(tmp_path, lambda: live)
    assert FAILURES not in values(together)
    one, two = Child(tmp_path, 2), Child(tmp_path, 3, ready=0)
    live += [one.pid, two.pid]
    seen = values(together)
    assert (seen[FAILURES], seen[OBSERVED], seen[BUCKET]) == (5, 5, 5)
    assert (seen[ACTIVE], seen[WORKERS], seen[READY]) == (5, 3, 0)
    assert seen["process_resident_memory_bytes"] > 0
    start = seen["process_start_time_seconds"]

    # Ends well: its counts stay, its gauges go.
    live.remove(two.pid)
    together.retire(two.end())
    seen = values(together)
    assert (seen[FAILURES], seen[OBSERVED], seen[BUCKET]) == (5, 5, 5)
    assert (seen[ACTIVE], seen[WORKERS], seen[READY]) == (2, 2, 1)

    # Killed: the same. And twice is once.
    three = Child(tmp_path, 4, end="kill")
    three.process.wait(timeout=60)
    for _ in range(2):
        together.retire(three.pid)
        assert values(together)[FAILURES] == 9
    assert values(together)[ACTIVE] == 2
    assert values(together)["process_start_time_seconds"] == start

    together.retire(one.end())
    live.clear()
    seen = values(together)
    assert (seen[FAILURES], seen[OBSERVED]) == (9, 9)
    assert ACTIVE not in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter_retired.db", "histogram_retired.db"]
