"""An engine with its KV in a GPU's memory, in a process of its own, driven by lines of JSON: see test_nvlink.py."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from typing import Any

import torch

from kvmesh.engine.nvlink.cuda import CudaBackend
from kvmesh.engine.nvlink.cuda_region import CudaRegion
from kvmesh.engine.nvlink.poster import NvlinkPoster
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes

# Of an 8B model, cut to a few layers: 256 KiB a page and layer.
LAYERS, PAGES = 8, 256
LAYOUT = KvLayout(
    version=1,
    dtype="bf16",
    page_size=64,
    groups=(KvGroup("main", "full", tuple(range(LAYERS)), kv_heads=8, head_dim=128),),
    num_pages=PAGES,
)


class Child:
    """The engine. Commands are methods."""

    def __init__(self, socket: str, device: int, name: str) -> None:
        self.socket = socket
        self.device = device
        self.name = name
        torch.cuda.set_device(device)
        self.region = CudaRegion("main", LAYOUT.region_bytes("main"), device)
        self.pages = torch.as_tensor(self.region, device=f"cuda:{device}").view(LAYERS, PAGES, -1)
        self.pages.zero_()
        self.backend = CudaBackend({("main", 0): self.region}, device)
        self.poster = NvlinkPoster(LAYOUT, self.backend)
        self.backend.warm()
        self.slot: Any = None
        self.transfer: Any = None

    async def connect(self) -> None:
        regions: Any = {"main": self.region}
        self.client = await SidecarClient.connect(
            self.socket,
            engine_id=self.name,
            incarnation=1,
            layout=LAYOUT,
            regions=regions,
            doorbell=Region.create("doorbell", 4096),
            ring=Region.create("ring", 1 << 16),
            timeout_s=30,
            on_lost=lambda: None,
            poster=self.poster,
        )

    async def fill(self, seed: int) -> None:
        generator = torch.Generator(device=f"cuda:{self.device}").manual_seed(seed)
        self.pages.view(torch.int32).random_(generator=generator)
        torch.cuda.synchronize()

    async def digests(self, pages: list[int]) -> list[str]:
        """Of these pages, per layer."""
        torch.cuda.synchronize()
        return [hashlib.sha256(layer[pages].cpu().numpy().tobytes()).hexdigest() for layer in self.pages]

    async def open(self, pages: list[int]) -> str:
        self.slot = await self.client.open_slot(
            expected_bytes=slot_bytes(LAYOUT, {"main": pages}), groups={"main": pages}, request_id="r", ttl_s=60
        )
        descriptor = build_descriptor(
            self.client, self.slot, groups={"main": pages}, first_block=0, num_tokens=len(pages) * 64
        )
        return descriptor.SerializeToString().hex()

    async def completed(self) -> list[Any]:
        result = await asyncio.wait_for(asyncio.shield(self.slot.completed), 30)
        return [result.bytes, result.transport, result.elapsed_ms]

    async def close_slot(self) -> None:
        await self.client.close_slot(self.slot, "not wanted")

    async def drained(self, limit_s: float) -> bool:
        done, _ = await asyncio.wait([self.slot.drained], timeout=limit_s)
        return bool(done)

    async def start(self, descriptor: str, pages: list[int], ready: int) -> str:
        self.transfer = await self.client.start_transfer(
            pb.Descriptor.FromString(bytes.fromhex(descriptor)), {"main": pages}, ready_pages=ready
        )
        return str(self.transfer.transport)

    async def step(self, first: int, count: int, layers: int, hold_ms: int = 0) -> None:
        """A step's first layers; hold_ms: the compute stream is busy for so long before the first."""
        if hold_ms:
            torch.cuda._sleep(hold_ms * 1_900_000)
        self.held = torch.cuda.Event()
        self.held.record()
        self.running = self.poster.step(StepRecord(1, LAYERS, (StepEntry(self.transfer.transfer_id, first, count),)))
        await self.layers(0, layers)

    async def layers(self, first: int, count: int) -> None:
        for layer in range(first, first + count):
            self.running.layer(layer)

    async def settle(self) -> None:
        """Everything launched has landed."""
        await asyncio.get_running_loop().run_in_executor(None, self.backend.stream.synchronize)

    async def sent(self) -> Any:
        try:
            return await asyncio.wait_for(asyncio.shield(self.transfer.done), 30)
        except Exception as error:
            return str(error)

    async def cancel(self) -> None:
        await self.client.cancel_transfer(self.transfer, "no time")

    async def outcome(self) -> bool:
        """Whether the slot completed, once it is drained."""
        await asyncio.wait_for(asyncio.shield(self.slot.drained), 30)
        return self.slot.completed.exception() is None

    async def own(self, pages: list[int], value: int) -> None:
        """Use pages for something else."""
        self.pages[:, pages] = value
        torch.cuda.synchronize()

    async def owned(self, pages: list[int], value: int) -> bool:
        """Whether they are as `own` left them."""
        torch.cuda.synchronize()
        return bool((self.pages[:, pages] == value).all())

    async def peers(self) -> int:
        return len(self.poster._peers)

    async def leave(self) -> None:
        await self.client.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    child = Child(arguments.socket, arguments.device, arguments.name)
    await child.connect()
    print(json.dumps({"ok": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ask = json.loads(line)
        result = await getattr(child, ask.pop("do"))(**ask)
        print(json.dumps({"result": result}), flush=True)
    child.poster.close()


if __name__ == "__main__":
    asyncio.run(main())
