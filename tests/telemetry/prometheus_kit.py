"""A real Prometheus that scrapes a mesh under test, with the configuration and the rules that are shipped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvmesh.cli.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
RULES = DEPLOY / "rules"
START_S = 60.0


@dataclass(frozen=True)
class Sample:
    """One series of an answer, with its newest value."""

    labels: Mapping[str, str]
    value: float

    @property
    def told(self) -> bool:
        """False for NaN: a panel shows nothing there."""
        return not math.isnan(self.value)


class Prometheus:
    """The server's HTTP API."""

    def __init__(self, url: str, targets: Path) -> None:
        self.url = url
        self._targets = targets

    async def get(self, path: str, **query: str) -> Any:
        """The `data` of an API answer. AssertionError with the server's words for an error."""
        return await asyncio.to_thread(self._get, path, query)

    def _get(self, path: str, query: dict[str, str]) -> Any:
        body = urllib.parse.urlencode(query).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=body if query else None)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode(errors='replace')}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expression: str) -> list[Sample]:
        """The instant value of an expression."""
        data = await self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(each["metric"], float(each["value"][1])) for each in data["result"]]

    async def value(self, expression: str) -> float:
        """The sum of the series of an instant value; 0.0 where there is none."""
        return sum(sample.value for sample in await self.query(expression) if sample.told)

    def follow(self, targets: Mapping[str, list[str]]) -> None:
        """Scrape these addresses by job from now on."""
        for path in self._targets.glob("*.json"):
            addresses = targets.get(path.stem, [])
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps([{"targets": addresses}] if addresses else []))
            fresh.replace(path)

    async def ready(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, AssertionError):
                await self.get("status/buildinfo")
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"Prometheus does not serve within {START_S:g} s")


def configuration(folder: Path, rules: Path, interval: str) -> Path:
    """The shipped configuration, scraping often, with addresses from files: there is no DNS of compose here. `rules`:
    where its folder of rules lies."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(rules / pattern) for pattern in config["rule_files"]]
    jobs = []
    for job in config["scrape_configs"]:
        if not job["job_name"].startswith("kvmesh-"):
            continue
        del job["dns_sd_configs"]
        path = folder / f"{job['job_name']}.json"
        path.write_text("[]")
        job["file_sd_configs"] = [{"files": [str(path)], "refresh_interval": "5s"}]
        jobs.append(job)
    config["scrape_configs"] = jobs
    written = folder / "prometheus.yml"
    written.write_text(yaml.safe_dump(config))
    return written


@contextlib.asynccontextmanager
async def prometheus(folder: Path, rules: Path = DEPLOY, interval: str = "2s") -> AsyncIterator[Prometheus]:
    """A running server whose data is gone afterwards. `rules`: see `configuration`. A scrape gets an `interval`: one
    that takes longer has found nothing."""
    binary = shutil.which("prometheus")
    assert binary, "no prometheus: `make test-telemetry` installs it"
    targets = folder / "targets"
    targets.mkdir()
    config = configuration(targets, rules, interval)
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"http://127.0.0.1:{port}", targets)
    try:
        await server.ready()
        yield server
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()
