"""What a mesh costs that nobody asks anything: processor time of all its processes, of one core. Goal: at most 5 %.

The real model, five services and Redis, with what runs beside them in production: each service's /metrics is read every
15 s and its health asked every 10 s by the container probe, whose own processes count too. The floor is what the same
number of processes that only sleep would cost: 0 %.

    python benchmarks/idle.py [--seconds 120] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from kvmesh.cli import probe
from kvmesh.cli.plan import MeshOptions
from kvmesh.cli.up import running_mesh

GOAL = 5.0
SETTLE_S = 10.0
SCRAPE_S, PROBE_S = 15.0, 10.0


def processor_seconds(processes: list[psutil.Process]) -> dict[str, float]:
    """User and system time so far, by service."""
    out: dict[str, float] = {}
    for process in processes:
        words = process.cmdline()
        name = next((word for word in words if word.startswith("--instance=")), words[0]).rpartition("=")[2]
        times = process.cpu_times()
        out[Path(name).name] = times.user + times.system
    return out


def ready(folder: Path) -> list[dict[str, Any]]:
    """What each service wrote once it was up."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.ready")]
    assert found, folder
    return found


async def every(seconds: float, what: Any) -> None:
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(what)


async def measure(seconds: float) -> dict[str, Any]:
    """Share of one core (in %) by service over `seconds` of an idle mesh."""
    async with running_mesh(MeshOptions(), state=False) as (_, mesh):
        processes = psutil.Process().children(recursive=True)
        facts = ready(Path(mesh.run_dir))
        scraped = [fact["metrics"] for fact in facts if fact.get("metrics")]
        served = [fact["address"] for fact in facts if fact.get("address")]

        def scrape() -> None:
            for address in scraped:
                urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read()

        def check() -> None:
            for address in served:
                subprocess.run([sys.executable, "-IS", probe.__file__, address], check=True, stdout=subprocess.DEVNULL)

        await asyncio.sleep(SETTLE_S)
        before, probes = processor_seconds(processes), resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.monotonic()
        beside = [asyncio.create_task(every(SCRAPE_S, scrape)), asyncio.create_task(every(PROBE_S, check))]
        await asyncio.sleep(seconds)
        took = time.monotonic() - begun
        after, probed = processor_seconds(processes), resource.getrusage(resource.RUSAGE_CHILDREN)
        for task in beside:
            task.cancel()
        shares = {name: round(100 * (after[name] - before[name]) / took, 2) for name in before}
        spent = probed.ru_utime + probed.ru_stime - probes.ru_utime - probes.ru_stime
        shares["probes"] = round(100 * spent / took, 2)
        return {
            "percent_of_one_core": shares,
            "total": round(sum(shares.values()), 2),
            "goal": GOAL,
            "floor": 0.0,
            "seconds": round(took),
            "scraped": len(scraped),
            "probed": len(served),
            "cores": os.cpu_count(),
            "machine": platform.platform(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the measurement")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    given = parser.parse_args()
    result = asyncio.run(measure(given.seconds))
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["total"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
