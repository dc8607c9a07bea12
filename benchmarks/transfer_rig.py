"""What the transfer benchmarks move pages with: two sidecar processes, floors, and peers in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT)]

from transfer_kit import Engine, SidecarProcess, sidecars, soon  # noqa: E402

POOL_BYTES = 128 << 20
LAYER_S = 0.001
WAIT_S = 60.0

RAW_RECEIVER = """
import socket, sys
page, pages = int(sys.argv[1]), int(sys.argv[2])
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sock, _ = server.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
pool = memoryview(bytearray(b"1") * (pages * page))
while True:
    head = sock.recv(8)
    if not head:
        break
    for index in range(int.from_bytes(head, "little")):
        view = pool[(index * 7 % pages) * page :][:page]
        while view:
            view = view[sock.recv_into(view, 0, socket.MSG_WAITALL) :]
    sock.sendall(b"1")
"""


def bench_layout(page_bytes: int = 64 << 10) -> KvLayout:
    """One layer, pages of that size, a pool of POOL_BYTES."""
    group = KvGroup("main", "full", (0,), kv_heads=4, head_dim=64)
    layout = KvLayout(
        version=1, dtype="bf16", page_size=page_bytes >> 10, groups=(group,), num_pages=POOL_BYTES // page_bytes
    )
    assert layout.page_bytes("main") == page_bytes
    return layout


def scattered(rng: np.random.Generator, count: int, page_bytes: int = 64 << 10) -> list[int]:
    """Page numbers in random order: next to nothing merges."""
    return [int(page) for page in rng.permutation(POOL_BYTES // page_bytes)[:count]]


class Mesh:
    """Two sidecars and an engine at each, one transport between them."""

    def __init__(self, processes: list[SidecarProcess], source: Engine, target: Engine) -> None:
        self.processes, self.source, self.target = processes, source, target

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, transport: str, page_bytes: int, streams: int = 0) -> AsyncIterator[Mesh]:
        flags = [f"--transports={transport}", "--log-level=warning", f"--tcp-streams={streams}"]
        with tempfile.TemporaryDirectory() as folder:
            async with sidecars(Path(folder), *flags) as processes:
                source = await Engine("p", processes[0], bench_layout(page_bytes)).connect()
                target = await Engine("d", processes[1], bench_layout(page_bytes)).connect()
                source.fill(1)
                target.fill(2)
                try:
                    yield cls(processes, source, target)
                finally:
                    await source.close()
                    await target.close()

    async def move(self, src: list[int], dst: list[int], *, check: bool = False) -> float:
        """Seconds from the ring to the wake-up of the destination engine's client."""
        source, target = self.source, self.target
        slot = await target.open(dst, ttl_s=WAIT_S)
        start = source.client.start_transfer(target.describe(slot, dst), {"main": src}, ready_pages=0)
        transfer = await soon(start, WAIT_S)
        woken = 0.0

        def wake(_: object) -> None:
            nonlocal woken
            woken = time.perf_counter()

        slot.completed.add_done_callback(wake)
        source.publish(transfer, 0, len(src))
        # The engine computes a layer: the watcher waits for its end, as it would.
        await asyncio.sleep(LAYER_S)
        begin = time.perf_counter()
        source.doorbell.ring()
        await soon(slot.completed, WAIT_S)
        await soon(transfer.done, WAIT_S)
        await asyncio.sleep(0)
        assert woken
        if check:
            assert (target.pages[:, dst] == source.pages[:, src]).all(), "bytes differ"
        return woken - begin


class Memcpy:
    """The shm floor: the same pages, one memmove each."""

    def __init__(self, mesh: Mesh, page_bytes: int) -> None:
        self.src, self.dst = (
            int(engine.regions["main"].view().__array_interface__["data"][0]) for engine in (mesh.source, mesh.target)
        )
        self.page_bytes = page_bytes

    def run(self, src: list[int], dst: list[int]) -> float:
        move, size = ctypes.memmove, self.page_bytes
        begin = time.perf_counter()
        for a, b in zip(src, dst, strict=True):
            move(self.dst + b * size, self.src + a * size, size)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Nothing is held."""


class RawLoopback:
    """A tcp floor: the same pages through one loopback connection, answered by a byte when all have been read."""

    def __init__(self, mesh: Mesh, page_bytes: int) -> None:
        self.view = mesh.source.regions["main"].buf
        self.page_bytes = page_bytes
        self.process = subprocess.Popen(
            [sys.executable, "-c", RAW_RECEIVER, str(page_bytes), str(POOL_BYTES // page_bytes)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.sock = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, src: list[int], dst: list[int]) -> float:
        begin = time.perf_counter()
        self.sock.sendall(len(src).to_bytes(8, "little"))
        for page in src:
            self.sock.sendall(self.view[page * self.page_bytes : (page + 1) * self.page_bytes])
        assert self.sock.recv(1) == b"1"
        return time.perf_counter() - begin

    def close(self) -> None:
        self.sock.close()
        self.process.wait(20)
        self.view.release()


class Iperf:
    """iperf3 over loopback for a second a round; GB/s that the server received."""

    def __init__(self, streams: int) -> None:
        self.streams = max(1, streams)
        self.usable = shutil.which("iperf3") is not None
        if self.usable:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self.port = probe.getsockname()[1]
            self.server = subprocess.Popen(
                ["iperf3", "-s", "-B", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL
            )
            time.sleep(0.5)

    def run(self) -> float:
        """GB/s."""
        command = ["iperf3", "-c", "127.0.0.1", "-p", str(self.port), "-t", "1", "-P", str(self.streams), "-J"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9

    def close(self) -> None:
        if self.usable:
            self.server.terminate()
            self.server.wait(10)


class Peer:
    """Another engine's pair of processes (`peers/*_pair.py`) under its own Python."""

    MARK = "@json "

    def __init__(self, python: Path, program: str, transport: str, page_bytes: int) -> None:
        self.name = program
        path = ROOT / "benchmarks" / "peers" / f"{program}_pair.py"
        flags = [f"--page-bytes={page_bytes}", f"--pages={POOL_BYTES // page_bytes}", f"--transport={transport}"]
        self.process = subprocess.Popen(
            [str(python), str(path), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._hear()

    def _hear(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(self.MARK):
                message: dict[str, float] = json.loads(line[len(self.MARK) :])
                return message
        raise RuntimeError(f"{self.name} has ended with {self.process.wait(20)}")

    def run(self, src: list[int], dst: list[int], *, check: bool = False) -> float:
        """Seconds, by the peer's own clock."""
        assert self.process.stdin is not None
        self.process.stdin.write(self.MARK + json.dumps({"src": src, "dst": dst, "check": check}) + "\n")
        self.process.stdin.flush()
        return self._hear()["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
