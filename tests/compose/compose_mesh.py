"""The compose file's mesh under test: commands, containers, kills, metrics and questions."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.client import SyncClient
from kvmesh.client.retry import Retry

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0
SERVICES = ("gateway", "router", "prefill", "decode", "kvtransfer-prefill", "kvtransfer-decode")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
_READ = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/metrics', timeout=20).read().decode())"


def run(*command: str, env: Mapping[str, str] | None = None, check: bool = True, timeout_s: float = 600) -> str:
    """Standard output. Raises AssertionError with all output where it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S, every_s: float = 0.25) -> Any:
    """The first true value of `condition`; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)
    return value


@dataclass(frozen=True)
class Container:
    """One, as `docker inspect` tells."""

    id: str
    service: str
    state: str
    health: str
    pid: int
    starts: int
    address: str

    @property
    def short(self) -> str:
        """Its host name, and how workers are called."""
        return self.id[:12]


@dataclass
class Mesh:
    """docker-compose.yml as a project of its own."""

    project: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "COMPOSE_PROJECT_NAME": self.project, "COMPOSE_PROGRESS": "plain", **self.settings}

    def compose(self, *arguments: str, check: bool = True, timeout_s: float = 600) -> str:
        return run("docker", "compose", *arguments, env=self.env, check=check, timeout_s=timeout_s)

    def docker(self, *arguments: str, check: bool = True, timeout_s: float = 120) -> str:
        return run("docker", *arguments, env=self.env, check=check, timeout_s=timeout_s)

    def succeeds(self, *arguments: str) -> bool:
        """Whether a docker command ends with status 0."""
        command = ["docker", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, timeout=120, check=False)
        return done.returncode == 0

    def up(self, *services: str, **settings: str) -> float:
        """`up --wait` with these settings from now on; seconds."""
        self.settings.update(settings)
        started = time.monotonic()
        try:
            self.compose(
                "up", "-d", "--wait", "--wait-timeout", str(int(WAIT_S)), "--no-build", "--remove-orphans", *services
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs(20)}") from None
        return time.monotonic() - started

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "-t", "40")

    def logs(self, lines: int = 50) -> str:
        """The end of every container's log."""
        return self.compose("logs", "--no-color", "--tail", str(lines), check=False)[-20000:]

    def left(self) -> list[str]:
        """Containers, volumes and networks of this project."""
        mine = f"label=com.docker.compose.project={self.project}"
        containers = self.docker("ps", "-aq", "--filter", mine).split()
        volumes = self.docker("volume", "ls", "-q", "--filter", mine).split()
        return containers + volumes + self.docker("network", "ls", "-q", "--filter", mine).split()

    def containers(self, *services: str) -> list[Container]:
        """Of these services (all: also those that have ended), oldest first."""
        mine = f"label=com.docker.compose.project={self.project}"
        ids = self.docker("ps", "-aq", "--no-trunc", "--filter", mine).split()
        found = []
        for item in json.loads(self.docker("inspect", *ids)) if ids else []:
            state, service = item["State"], item["Config"]["Labels"]["com.docker.compose.service"]
            if not services or service in services:
                health = state.get("Health", {}).get("Status", "")
                networks = item["NetworkSettings"]["Networks"].values()
                address = next((network["IPAddress"] for network in networks), "")
                found.append(
                    (
                        item["Created"],
                        Container(
                            item["Id"], service, state["Status"], health, state["Pid"], item["RestartCount"], address
                        ),
                    )
                )
        return [container for _, container in sorted(found, key=lambda pair: pair[0])]

    def container(self, service: str, short: str = "") -> Container:
        """The one of that service, or that whose host name begins the name of a worker."""
        return next(c for c in self.containers(service) if not short or short.startswith(c.short))

    def wait_healthy(self, *services: str, count: int = 0, timeout_s: float = WAIT_S) -> list[Container]:
        """All containers of these services, running and healthy; `count` of them."""

        def healthy() -> list[Container]:
            found = self.containers(*(services or SERVICES))
            fine = [c for c in found if c.state == "running" and c.health == "healthy"]
            return fine if len(fine) == len(found) and (not count or len(fine) == count) else []

        try:
            healthy_ones: list[Container] = until(healthy, f"{services or 'all'} healthy", timeout_s, 0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.containers(*services)}\n{self.logs()}") from None
        return healthy_ones

    def kill(self, container: Container) -> None:
        """SIGKILL as a crash is, so that the engine starts it again. Where the container's processes are out of our
        reach (a virtual machine, no root) the engine kills it, which it takes for our wish, and it is started by hand.
        """
        try:
            here = container.id in Path(f"/proc/{container.pid}/cgroup").read_text()
            if here:
                os.kill(container.pid, signal.SIGKILL)
                return
        except (OSError, PermissionError):
            pass
        self.docker("kill", "-s", "KILL", container.id)
        self.docker("start", container.id)

    def metrics(self, container: Container) -> list[tuple[str, dict[str, str], float]]:
        """What it exports now."""
        samples = []
        for line in self._exported(container).splitlines():
            if match := _SAMPLE.match(line):
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match["labels"] or ""))
                samples.append((match["name"], labels, float(match["value"])))
        return samples

    def _exported(self, container: Container) -> str:
        try:
            # An engine of this machine has its networks here.
            with urllib.request.urlopen(f"http://{container.address}:9090/metrics", timeout=10) as response:
                text: str = response.read().decode()
                return text
        except OSError:
            return self.docker("exec", container.id, "python3", "-c", _READ)

    def value(self, container: Container, name: str, **labels: str) -> float:
        """Sum over the samples of one container that have these labels."""
        samples = self.metrics(container)
        return sum(value for found, has, value in samples if found == name and labels.items() <= has.items())

    def metric(self, service: str, name: str, **labels: str) -> float:
        """Sum over the service's containers that run and the samples that have these labels."""
        running = [container for container in self.containers(service) if container.state == "running"]
        return sum(self.value(container, name, **labels) for container in running)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.settings['KVMESH_HTTP_PORT']}"

    def client(self, attempts: int = 4) -> SyncClient:
        return SyncClient(f"127.0.0.1:{self.settings['KVMESH_GRPC_PORT']}", retry=Retry(attempts=attempts))


@dataclass
class Answer:
    """A question's text, and how it was served."""

    text: str
    served: Any


def ask(
    client: SyncClient, question: str, *, max_tokens: int = 24, pieces: Callable[[int], None] | None = None
) -> Answer:
    """Greedy, and from no cache. pieces(n) is called after the n-th piece of text."""
    stream = client.chat(
        [("user", question)],
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=max_tokens if pieces is not None or max_tokens > 100 else 0,
        cache_control={"no_cache": True, "no_store": True},
        timeout_s=WAIT_S,
        ttft_ms=120_000,
    )
    text = []
    for number, piece in enumerate(stream.texts(), 1):
        text.append(piece)
        if pieces is not None:
            pieces(number)
    return Answer("".join(text), stream.finished.served)


def long_question(subject: str, lines: int = 12) -> str:
    """A prompt of some hundred tokens that no other begins like: its KV is computed by prefill and moved."""
    facts = " ".join(f"Fact {n} about {subject}: number {n * 7 % 11}, then number {n * 5 % 13}." for n in range(lines))
    return f"{subject}. {facts} Tell a long story about {subject}."


def pages() -> Iterator[str]:
    """Subjects, each of which is used once."""
    number = 0
    while True:
        number += 1
        yield f"Lighthouse {number}"


def project_settings(http_port: int, grpc_port: int, extra: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Settings of the tests: fp32, so that a text is the same whoever computes it; small, and quick to be seen."""
    return {
        "COMPOSE_PROFILES": "cpu",
        "KVMESH_HTTP_PORT": str(http_port),
        "KVMESH_GRPC_PORT": str(grpc_port),
        "KVMESH_DTYPE": "fp32",
        "KVMESH_ENGINE_THREADS": "1",
        "KVMESH_KV_MEMORY_BYTES": str(128 << 20),
        # A busy machine is not a sick mesh.
        "KVMESH_HEALTH_INTERVAL": "2s",
        "KVMESH_HEALTH_RETRIES": "30",
        "KVMESH_HEAL_WAIT_S": "90",
        "KVMESH_DECODE_PREFILL_TIMEOUT_S": "10",
        "KVMESH_LOG_FORMAT": "text",
        **dict(extra),
    }
