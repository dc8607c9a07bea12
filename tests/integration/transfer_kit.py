"""Two real sidecar processes and in-test engines for the transfer tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import psutil

from kvmesh.cli.ports import free_port
from kvmesh.kv.layout import KvGroup, KvLayout, group_view
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord, StepRing
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes
from kvmesh.transfer.handles import SlotHandle, TransferHandle

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
WAIT_S = 90.0


def make_layout(num_pages: int = 64, layers: int = 4, page_size: int = 16, heads: int = 2, dim: int = 64) -> KvLayout:
    group = KvGroup("main", "full", tuple(range(layers)), kv_heads=heads, head_dim=dim)
    return KvLayout(version=1, dtype="bf16", page_size=page_size, groups=(group,), num_pages=num_pages)


class SidecarProcess:
    """`python -m services.kvtransfer` under test."""

    def __init__(self, name: str, folder: Path, *flags: str) -> None:
        self.name = name
        self.folder = folder
        self.socket = folder / f"{name}.sock"
        self.flags = flags
        # Not one that the kernel names: while this process is down, a connection that is tried to it might take it.
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    async def start(self) -> None:
        """Start (or start a successor on the same addresses) and wait until it listens."""
        await asyncio.to_thread(self.start_now)

    def start_now(self) -> None:
        """See `start`."""
        self.starts += 1
        ready = self.folder / f"{self.name}.{self.starts}.json"
        log = (self.folder / f"{self.name}.log").open("ab")
        command = [
            sys.executable,
            "-m",
            "services.kvtransfer",
            f"--engine-socket={self.socket}",
            f"--listen=127.0.0.1:{self.port}",
            f"--ready-file={ready}",
            f"--instance={self.name}",
            "--drain-timeout-s=10",
            *self.flags,
        ]
        # What the caller has beside them (pyverbs, in the RDMA VM) is kept.
        path = f"{ROOT / 'libs'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        env = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=ROOT)
        log.close()
        deadline = time.monotonic() + START_S
        while not ready.exists():
            assert self.process.poll() is None, f"{self.name} ended: {self.log()}"
            assert time.monotonic() < deadline, f"{self.name} is not up: {self.log()}"
            time.sleep(0.02)
        self.port = int(json.loads(ready.read_text())["address"].rpartition(":")[2])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait(self) -> int:
        """Exit status, once it has ended by itself."""
        assert self.process is not None
        return self.process.wait(60)

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            assert self.process is not None
            self.process.wait(60)

    def fds(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def rss(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    async def status(self) -> pb.GetStatusResponse:
        async with grpc.aio.insecure_channel(self.address) as channel:
            return await kvtransfer_pb2_grpc.KvTransferStub(channel).GetStatus(pb.GetStatusRequest(), timeout=60)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process is None or self.process.poll() is not None:
            return 0 if self.process is None else int(self.process.returncode)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            raise


class Engine:
    """An engine in the test process: memory, doorbell, ring, client."""

    def __init__(self, name: str, sidecar: SidecarProcess, layout: KvLayout, incarnation: int = 1) -> None:
        self.name = name
        self.sidecar = sidecar
        self.layout = layout
        self.incarnation = incarnation
        self.regions = {g.name: Region.create(f"{name}-{g.name}", layout.region_bytes(g)) for g in layout.groups}
        self.doorbell_region = Region.create("doorbell", 4096)
        self.ring_region = Region.create("ring", 1 << 16)
        self.doorbell = Doorbell(self.doorbell_region.buf)
        self.ring = StepRing(self.ring_region.buf)
        self.pages = group_view(self.regions["main"].buf, layout, "main")
        self.lost = asyncio.Event()
        self.client: SidecarClient

    async def connect(self) -> Engine:
        self.client = await SidecarClient.connect(
            self.sidecar.socket,
            engine_id=self.name,
            incarnation=self.incarnation,
            layout=self.layout,
            regions=self.regions,
            doorbell=self.doorbell_region,
            ring=self.ring_region,
            timeout_s=60,
            on_lost=self.lost.set,
        )
        return self

    def fill(self, seed: int) -> None:
        """Every page and layer gets bytes of its own."""
        self.pages[:] = np.random.default_rng(seed).integers(0, 256, self.pages.shape, dtype=np.uint8)

    def expected(self, pages: Sequence[int]) -> int:
        return slot_bytes(self.layout, {"main": pages})

    async def open(self, pages: Sequence[int], ttl_s: float = 30.0, request_id: str = "r") -> SlotHandle:
        return await self.client.open_slot(
            expected_bytes=self.expected(pages), groups={"main": pages}, request_id=request_id, ttl_s=ttl_s
        )

    def describe(self, slot: SlotHandle, pages: Sequence[int], first_block: int = 0) -> pb.Descriptor:
        return build_descriptor(
            self.client,
            slot,
            groups={"main": pages},
            first_block=first_block,
            num_tokens=(first_block + len(pages)) * self.layout.page_size,
        )

    def publish(self, transfer: TransferHandle, first: int, count: int) -> None:
        """Announce a step that fills pages [first, first + count) of the transfer."""
        record = StepRecord(
            self.doorbell.value + 1, self.layout.num_layers, (StepEntry(transfer.transfer_id, first, count),)
        )
        assert self.ring.publish(record)
        self.client.notify_ring()

    def step(self, transfer: TransferHandle, first: int, count: int) -> None:
        """A whole step: announced, then every layer rung."""
        self.publish(transfer, first, count)
        for _ in range(self.layout.num_layers):
            self.doorbell.ring()

    async def close(self) -> None:
        if hasattr(self, "client"):
            await self.client.close()
        del self.pages
        self.doorbell.close()
        self.ring.close()
        for region in (*self.regions.values(), self.doorbell_region, self.ring_region):
            region.close()


@contextlib.asynccontextmanager
async def sidecars(
    folder: Path, *flags: str, names: Sequence[str] = ("src", "dst")
) -> AsyncIterator[list[SidecarProcess]]:
    """Running sidecars, stopped at the end."""
    processes = [SidecarProcess(name, folder, *flags) for name in names]
    try:
        await asyncio.gather(*(process.start() for process in processes))
        yield processes
    finally:
        for process in processes:
            process.stop()


async def soon(awaitable: object, timeout_s: float = WAIT_S) -> object:
    """Await with a limit that fails the test."""
    async with asyncio.timeout(timeout_s):
        return await awaitable  # type: ignore[misc]
