"""A mesh and a load that touches everything that is measured: both faces, caches, flights, tenants, refusals, aborts, a
decode worker that is killed and healed. It goes on until it is stopped, so rates have something to show."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from kvmesh.cli.main import app
from kvmesh.client import Client, Retry
from kvmesh.errors import KvmeshError
from mesh_kit import PATIENT, SCRIPTED, Mesh, mesh_up, until

Part = Callable[[], Awaitable[None]]

DECODE = ("decode-0", "decode-1")
TENANTS = ("acme", "batch", "tiny")
POLICIES = """
[tenants.acme]
cache = "semantic"
priority = 5
budget = { amount = 100_000_000, period = "month", unit = "tokens" }
[tenants.batch]
cache = "exact"
priority = -5
max_concurrent = 64
[tenants.tiny]
requests_per_minute = 1
"""
SETTINGS = {
    **SCRIPTED.settings,
    **PATIENT,
    "decode.scripted_step_ms": "4",
    # Few places (a worker is given one and a half batches), so that a line forms at the gateway.
    "decode.max_batch": "2",
    "decode.max_queue": "4",
    "decode.num_pages": "192",
    # Waiting for a processor is no absence.
    "router.redis_timeout_ms": "5000",
    "router.embed_timeout_ms": "5000",
    "router.semantic_threshold": "0.85",
    "router.shadow_rate": "0.01",
    "router.shadow_per_minute": "600",
    # What runs in production; `kvmesh up` keeps every trace.
    **{f"{service}.trace_sample_ratio": "0.05" for service in ("gateway", "router", "prefill", "decode", "kvtransfer")},
    "gateway.heartbeats_missed": "30",
    "gateway.heal_wait_s": "60",
}


def make_keys(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file of policies and keys, and the key of each tenant."""
    path = folder / "keys.toml"
    path.write_text(POLICIES)
    made = {}
    for tenant in TENANTS:
        done = CliRunner().invoke(app, ["keys", "create", "--tenant", tenant, "--name", tenant, "--file", str(path)])
        assert done.exit_code == 0, done.output
        made[tenant] = done.stdout.strip()
    return path, made


@dataclass
class Loaded:
    """A mesh, and the keys of its tenants."""

    mesh: Mesh
    keys: dict[str, str]

    def targets(self) -> dict[str, list[str]]:
        """Addresses of /metrics by job, of the processes that are up."""
        found: dict[str, list[str]] = {}
        for name, process in self.mesh.supervisor.processes.items():
            ready = process.read_ready()
            if ready is not None and ready.metrics:
                found.setdefault(f"kvmesh-{name.split('-')[0]}", []).append(ready.metrics)
        return found

    def client(self, tenant: str) -> Client:
        return self.mesh.client(api_key=self.keys[tenant], retry=Retry(attempts=1))


@contextlib.asynccontextmanager
async def loaded_mesh(folder: Path, otlp_endpoint: str = "") -> AsyncIterator[Loaded]:
    """A mesh of real processes with tenants, and everything switched on that is measured."""
    # On a thread: the command has an event loop of its own.
    credentials, keys = await asyncio.to_thread(make_keys, folder)
    program = folder / "program.json"
    program.write_text(json.dumps({"eos_after": 40}))
    options: dict[str, Any] = {
        "decode": 2,
        "embedder": "minilm",
        "http_port": 0,
        "playground": False,
        "credentials_file": str(credentials),
        "otlp_endpoint": otlp_endpoint,
        "settings": {**SETTINGS, "decode.scripted_faults": str(program)},
    }
    async with mesh_up(SCRIPTED, **options) as mesh:
        yield Loaded(mesh, keys)


class Load:
    """Runs every part of the load, each over and over. `errors`: what a part could not do last.
    `kinds`: how identical requests were answered."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._mesh = loaded.mesh
        self._numbers = itertools.count()
        self.rounds: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.kinds: set[str] = set()

    def __repr__(self) -> str:
        return f"rounds {self.rounds}, errors {self.errors}"

    async def once(self) -> None:
        """Every part, one after the other."""
        async with self._parts() as parts:
            for name, part in parts.items():
                await self._try(name, part)

    async def run(self) -> None:
        """All parts at the same time, until cancelled."""
        async with self._parts() as parts, asyncio.TaskGroup() as group:
            for name, part in parts.items():
                group.create_task(self._repeat(name, part))

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncIterator[dict[str, Part]]:
        async with contextlib.AsyncExitStack() as stack:
            acme, batch, tiny = [
                await stack.enter_async_context(self._loaded.client(tenant)) for tenant in self._loaded.keys
            ]
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=self._mesh.state.http, trust_env=False, timeout=60)
            )
            yield {
                "prompts": lambda: self._prompts(acme, batch),
                "similar": lambda: self._similar(acme),
                "flight": lambda: self._flight(acme),
                "http": lambda: self._http(http),
                "abort": lambda: self._abort(batch),
                "refused": lambda: self._refused(tiny),
                "stranger": self._stranger,
            }

    async def _repeat(self, name: str, part: Part) -> None:
        while True:
            await self._try(name, part)
            await asyncio.sleep(0.2)

    async def _try(self, name: str, part: Part) -> None:
        try:
            await part()
            self.rounds[name] = self.rounds.get(name, 0) + 1
        except* (KvmeshError, httpx.HTTPError) as errors:
            # Of those that a part asks at the same time, too.
            self.errors[name] = repr(errors.exceptions[0])

    async def _ask(self, client: Client, text: str, **fields: Any) -> str:
        fields = {"max_tokens": 48, "temperature": 0.0, "seed": 7, **fields}
        return await client.chat([("user", text)], **fields).result()

    async def _prompts(self, acme: Client, batch: Client) -> None:
        """More at a time than workers have places: a line forms, of two priorities, and prompts share a beginning."""
        number = next(self._numbers)
        shared = "a long beginning that many prompts share, so that prefixes are found again. " * 3
        async with asyncio.TaskGroup() as group:
            for index in range(16):
                for client in (acme, batch):
                    text = f"{shared} {number} {index} " + "word " * (6 * index)
                    group.create_task(self._ask(client, text, cache="off", max_tokens=24 + index))

    async def _similar(self, acme: Client) -> None:
        """A question, the same again, and one that means the same."""
        number = next(self._numbers)
        for text in (
            "What is the capital of France?",
            "What is the capital of France?",
            f"Tell me, what is the capital of France{', please' * (1 + number % 3)}",
        ):
            await self._ask(acme, text, max_tokens=None, seed=None)

    async def followed(self) -> None:
        """Until one of some identical requests has followed another: on a busy machine the first may be over before the
        second comes."""
        async with self._parts() as parts, asyncio.timeout(60):
            while "follow" not in self.kinds:
                await self._try("flight", parts["flight"])

    async def _flight(self, acme: Client) -> None:
        """Identical requests at the same time."""
        text = f"identical {next(self._numbers)}"
        streams = [acme.chat([("user", text)], temperature=0.0, seed=7, cache="exact") for _ in range(4)]
        await asyncio.gather(*(stream.result() for stream in streams))
        self.kinds.update(stream.finished.served.cache for stream in streams if stream.finished is not None)

    async def _http(self, http: httpx.AsyncClient) -> None:
        """The other face of the gateway: a stream, and what it has to refuse."""
        body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        bearer = {"authorization": f"Bearer {self._loaded.keys['acme']}"}
        await http.post("/v1/chat/completions", json={**body, "stream": True}, headers=bearer)
        await http.post("/v1/chat/completions", json={**body, "max_tokens": -1}, headers=bearer)

    async def _abort(self, batch: Client) -> None:
        """A client that leaves in the middle: of a stream too long to be over before it has left."""
        stream = batch.generate("leave " * 30, max_tokens=1000, ignore_eos=True, cache="off")
        async for event in stream:
            if event.HasField("delta"):
                break
        await stream.aclose()

    async def _refused(self, tiny: Client) -> None:
        """A tenant over its limit."""
        with contextlib.suppress(KvmeshError):
            await self._ask(tiny, "too often", cache="off")

    async def _stranger(self) -> None:
        """Somebody whose key is nobody's."""
        async with self._mesh.client(api_key="kvm_nobody", retry=Retry(attempts=1)) as stranger:
            with contextlib.suppress(KvmeshError):
                await self._ask(stranger, "who am I")


async def kill_and_heal(mesh: Mesh, client: Client) -> None:
    """SIGKILL the decode worker with the most streams in their middle; every stream comes to its end. Until one of them
    was healed: on a slow machine they may all be over when the signal comes."""

    async def back() -> list[Any]:
        return await asyncio.gather(*map(mesh.load, DECODE))

    async with asyncio.timeout(120):
        while not any(await _kill_once(mesh, client)):
            await until(back, "the killed worker is back")


async def _kill_once(mesh: Mesh, client: Client) -> list[int]:
    """Heals by stream."""
    begun = asyncio.Semaphore(0)

    async def one(index: int) -> int:
        stream = client.generate([65 + index] * 20, max_tokens=200, ignore_eos=True, seed=index, cache="off")
        told = False
        async for event in stream:
            if event.HasField("delta") and not told:
                told = True
                begun.release()
        assert stream.finished is not None, "a stream ended without its end"
        return int(stream.finished.served.heals)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(6)]
        for _ in range(4):
            await begun.acquire()
        running = {name: (await mesh.load(name)).running for name in DECODE}
        mesh.kill(max(running, key=running.__getitem__))
    return [task.result() for task in tasks]
