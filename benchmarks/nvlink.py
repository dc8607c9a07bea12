"""KV pages over NVLink between two processes on two GPUs: scatter against one copy, alone and beside a prefill.

    python benchmarks/nvlink.py [--out benchmarks/results/nvlink.json]

1. Random pages of 64 KiB into another process's memory by the poster's kernel, counter included, against ONE
   cuMemcpyDtoDAsync of the same bytes between the same two processes; the floor is the link's best copy of 1 GiB.
2. Beside a synthetic prefill of an 8B model (32 layers; per layer the four GEMMs at 4,000 tokens, then the event):
   what is exposed after the last layer, how much the prefill slows down, at what rate the pages go. The poster, its
   steps and its thread are the real ones; only the sidecars' messages are made here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "libs"))

import numpy as np
import torch

from kvmesh.engine.nvlink.backend import Batch, GroupRows
from kvmesh.engine.nvlink.cuda import BLOCKS, CudaBackend
from kvmesh.engine.nvlink.cuda_region import CudaRegion
from kvmesh.engine.nvlink.driver import load
from kvmesh.engine.nvlink.poster import NvlinkPoster
from kvmesh.kv.fds import recv_with_fds, send_with_fds
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.immediate import MAX_SLOTS
from kvmesh.transfer.posting import BYTES_MASK

PAGE = 64 << 10
SIZES = (256, 1024, 8192)
TOKENS, LAYERS = 4000, 32
GEMMS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
# 64 tokens a page: 256 KiB a layer.
LAYOUT = KvLayout(
    version=1,
    dtype="bf16",
    page_size=64,
    groups=(KvGroup("main", "full", tuple(range(LAYERS)), kv_heads=8, head_dim=128),),
    num_pages=256,
)
REGION_BYTES = LAYOUT.region_bytes("main")
COUNTER_BYTES = MAX_SLOTS * 8


def child(fd: int) -> None:
    """The destination: gives its memory away, answers with sums of it."""
    sock = socket.socket(fileno=fd)
    sock.settimeout(600)
    torch.cuda.set_device(1)
    region = CudaRegion("kv", REGION_BYTES, 1)
    pages = torch.as_tensor(region, device="cuda:1")
    pages.zero_()
    torch.cuda.synchronize()
    counters = Region.create("counters", COUNTER_BYTES)
    send_with_fds(sock, b"x", [region.fd, counters.fd])
    while sock.recv(16):
        sums = pages.view(torch.int64).view(-1, 8192).sum(1).cpu().numpy()
        torch.cuda.synchronize()
        sock.send(str(int(np.bitwise_xor.reduce(sums * np.arange(1, len(sums) + 1)))).encode())


class Timed(CudaBackend):
    """Events around each launch, when asked for."""

    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def launch(self, prepared: object, group: int, first_layer: int, layers: int, launch: int) -> None:
        if self.spans is None:
            super().launch(prepared, group, first_layer, layers, launch)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(self.stream)
        super().launch(prepared, group, first_layer, layers, launch)
        after.record(self.stream)
        self.spans.append((before, after))


class Bench:
    """Source's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, "--child", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.sock = ours
        ours.settimeout(300)
        torch.cuda.set_device(0)
        self.region = CudaRegion("kv", REGION_BYTES, 0)
        self.pages = torch.as_tensor(self.region, device="cuda:0")
        self.pages.view(torch.int32).random_()
        self.backend = Timed({("main", 0): self.region}, 0)
        self.driver = load()
        _, self.fds = recv_with_fds(ours, 16, 2)
        self.infos = [
            pb.RegionInfo(group="main", nbytes=REGION_BYTES, memory="cuda", device=self.driver.device_uuid(1))
        ]
        self.rng = np.random.default_rng(0)
        self.sums = self.pages.view(torch.int64).view(-1, 8192).sum(1).cpu().numpy()
        self.state = np.zeros_like(self.sums)

    def theirs(self) -> int:
        self.sock.send(b"sum")
        return int(self.sock.recv(64))

    def moved(self, there: np.ndarray, here: np.ndarray) -> None:
        """Units of 64 KiB that have been copied, so that the destination's sums are known."""
        self.state[there] = self.sums[here]

    def exact(self) -> bool:
        """Whether the whole of the destination's memory is what was copied."""
        return self.theirs() == int(np.bitwise_xor.reduce(self.state * np.arange(1, len(self.state) + 1)))

    # --- 1 ---------------------------------------------------------------------------------------------------------

    def timed(self, queue: Any, count: int = 1) -> float:
        """Microseconds on the side stream; the host is ahead, so that no launch is waited for."""
        stream = self.backend.stream
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000)
        start.record(stream)
        for _ in range(count):
            queue()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    def scatter(self, repeat: int) -> list[dict[str, Any]]:
        peer = self.backend.open_peer(self.infos, self.fds, COUNTER_BYTES)
        total = REGION_BYTES // PAGE
        results = []
        whole = 1 << 30

        def copy(nbytes: int) -> None:
            self.driver.copy_async(peer.bases[0], self.region.address, nbytes, self.backend.stream.cuda_stream)

        for _ in range(5):
            self.timed(lambda: copy(whole))
        self.moved(np.arange(whole // PAGE), np.arange(whole // PAGE))
        best = whole / min(self.timed(lambda: copy(whole)) for _ in range(10)) / 1e3
        print(f"one copy of 1 GiB: {best:.1f} GB/s (the floor's rate)")
        self.link = best
        for blocks in (BLOCKS, 132):
            self.backend._blocks = blocks
            for pages in SIZES:
                here, there = self.rng.permutation(total)[:pages], self.rng.permutation(total)[:pages]
                rows = GroupRows(
                    self.region.address + here.astype(np.int64) * PAGE,
                    peer.bases[0] + there.astype(np.int64) * PAGE,
                    np.full(pages, PAGE, dtype=np.int64),
                    np.zeros(pages, dtype=np.int64),
                    0,
                )
                batch = Batch([rows], np.array([peer.counters], dtype=np.int64), np.array([[pages * PAGE]]))
                prepared = self.backend.prepare(batch)
                nbytes = pages * PAGE
                copies, scatters = [], []
                for number in range(repeat + 5):
                    a = self.timed(lambda n=nbytes: copy(n))
                    b = self.timed(lambda p=prepared: self.backend.launch(p, 0, 0, 1, 0))
                    if number >= 5:
                        copies.append(a)
                        scatters.append(b)
                one, many = statistics.median(copies), statistics.median(scatters)
                # The copies went to the start of the region; then the pages.
                self.timed(lambda p=prepared: self.backend.launch(p, 0, 0, 1, 0))
                self.moved(np.arange(pages), np.arange(pages))
                self.moved(there, here)
                exact = self.exact()
                result = {
                    "pages": pages,
                    "blocks": blocks,
                    "copy_us": round(one, 1),
                    "scatter_us": round(many, 1),
                    "copy_gbps": round(nbytes / one / 1e3, 1),
                    "scatter_gbps": round(nbytes / many / 1e3, 1),
                    "ratio": round(one / many, 3),
                    "floor_us": round(nbytes / best / 1e3, 1),
                    "byte_exact": exact,
                }
                results.append(result)
                print(
                    f"{pages:5d} pages, {blocks:3d} blocks: scatter {many:7.1f} us {result['scatter_gbps']:6.1f} GB/s, "
                    f"one copy {one:7.1f} us {result['copy_gbps']:6.1f} GB/s, ratio {result['ratio']:.3f} "
                    f"(floor {result['floor_us']:.1f} us), byte exact: {exact}",
                    flush=True,
                )
                assert exact
        self.backend.stream.synchronize()
        self.backend.close_peer(peer)
        return results

    # --- 2 ---------------------------------------------------------------------------------------------------------

    async def prefill(self, rounds: int) -> list[dict[str, Any]]:
        weights = [[torch.randn(k, n, device="cuda:0", dtype=torch.bfloat16) for k, n in GEMMS] for _ in range(4)]
        inputs = {k: torch.randn(TOKENS, k, device="cuda:0", dtype=torch.bfloat16) for k in (4096, 14336)}
        outputs = [torch.empty(TOKENS, n, device="cuda:0", dtype=torch.bfloat16) for _, n in GEMMS]

        def layer(number: int) -> None:
            for i, (k, _) in enumerate(GEMMS):
                torch.mm(inputs[k], weights[number % 4][i], out=outputs[i])

        self.poster = NvlinkPoster(LAYOUT, self.backend)
        said: asyncio.Queue[pb.EngineMessage] = asyncio.Queue()
        self.poster.connected(said.put_nowait)
        layout = layout_to_proto(LAYOUT)
        memory = pb.PeerMemory(link_id=1, engine_id="d", layout=layout, regions=self.infos, counter_bytes=COUNTER_BYTES)
        self.poster.take(pb.SidecarMessage(peer_memory=memory), lambda count: self.fds)
        mapped = await asyncio.wait_for(said.get(), 30)
        assert mapped.peer_mapped.ok, mapped.peer_mapped.reason
        counters = self.poster._peers[1].mapping.handle.counters.view(np.uint64)  # type: ignore[attr-defined]
        pages = -(-TOKENS // LAYOUT.page_size)
        per_layer = pages * LAYOUT.page_bytes("main")
        total = per_layer * LAYERS
        flops = 2 * TOKENS * sum(k * n for k, n in GEMMS) * LAYERS
        numbers = iter(range(1, 1 << 20))

        async def once(send: bool) -> tuple[float, float, float, float, float]:
            """(prefill ms, exposed us on the GPU, us from the host's seeing the end to its seeing the last byte, us of
            a layer's pages, host us of a layer's posting)"""
            step = None
            if send:
                number = next(numbers)
                src, dst = self.rng.permutation(256)[:pages], self.rng.permutation(256)[:pages]
                descriptor = pb.Descriptor(slot=number % 64, generation=number, layout=layout, expected_bytes=total)
                descriptor.groups.add(group="main", pages=dst.tolist())
                request = pb.StartTransfer(descriptor=descriptor)
                request.pages.add(group="main", pages=src.tolist())
                counters[number % 64] = 0
                post = pb.PostTransfer(transfer_id=number, link_id=1, request=request)
                self.poster.take(pb.SidecarMessage(post_transfer=post), lambda count: [])
                step = self.poster.step(StepRecord(1, LAYERS, (StepEntry(number, 0, pages),)))
                assert step is not None
                self.backend.spans = []
                units = np.arange(LAYERS)[:, None, None] * 1024 + np.arange(4)
                self.moved((units + dst[:, None] * 4).ravel(), (units + src[:, None] * 4).ravel())
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            posting = 0.0
            torch.cuda._sleep(2_000_000)
            start.record()
            for number_ in range(LAYERS):
                layer(number_)
                if step is not None:
                    began = time.perf_counter()
                    step.layer(number_)
                    posting += time.perf_counter() - began
            end.record()
            last.record(self.backend.stream)
            end.synchronize()
            ended = time.perf_counter()
            seen = 0.0
            if step is not None:
                while int(counters[number % 64]) & BYTES_MASK < total:
                    if time.perf_counter() - ended > 5:
                        raise RuntimeError("the counter does not get there")
                seen = (time.perf_counter() - ended) * 1e6
            torch.cuda.synchronize()
            spans, self.backend.spans = self.backend.spans or [], None
            copying = statistics.median(a.elapsed_time(b) for a, b in spans) * 1e3 if spans else 0.0
            if send:
                over = (await asyncio.wait_for(said.get(), 30)).post_ended
                assert (over.bytes, over.reason) == (total, ""), over
            return start.elapsed_time(end), end.elapsed_time(last) * 1e3, seen, copying, posting / LAYERS * 1e6

        results = []
        for blocks in (16, 33, BLOCKS, 132):
            self.backend._blocks = blocks
            for _ in range(3):
                await once(False)
                await once(True)
            alone, beside = [], []
            for _ in range(rounds):
                alone.append(await once(False))
                beside.append(await once(True))
            exact = self.exact()
            base = statistics.median(x[0] for x in alone)
            slow = statistics.median(b[0] / a[0] for a, b in zip(alone, beside, strict=True)) - 1
            quarters = statistics.quantiles([b[0] / a[0] - 1 for a, b in zip(alone, beside, strict=True)], n=4)
            result = {
                "blocks": blocks,
                "rounds": rounds,
                "prefill_ms": round(base, 2),
                "prefill_tflops": round(flops / base / 1e9, 0),
                "beside_ms": round(statistics.median(x[0] for x in beside), 2),
                "slow_down_percent": round(slow * 100, 2),
                "slow_down_quartiles_percent": [round(x * 100, 2) for x in quarters],
                "exposed_us": round(statistics.median(x[1] for x in beside), 1),
                "exposed_seen_by_host_us": round(statistics.median(x[2] for x in beside), 1),
                "layer_us": round(statistics.median(x[3] for x in beside), 1),
                "layer_gbps": round(per_layer / statistics.median(x[3] for x in beside) / 1e3, 1),
                "floor_us": round(per_layer / self.link / 1e3, 1),
                "posting_us_a_layer_host": round(statistics.median(x[4] for x in beside), 1),
                "bytes": total,
                "byte_exact": exact,
            }
            results.append(result)
            print(
                f"beside a prefill, {blocks:3d} blocks: {result['prefill_ms']:.2f} ms alone "
                f"({result['prefill_tflops']:.0f} TFLOP/s), {result['beside_ms']:.2f} beside; slow-down "
                f"{result['slow_down_percent']:.2f} % (quartiles {result['slow_down_quartiles_percent']})\n"
                f"  exposed {result['exposed_us']:.1f} us on the GPU (floor {result['floor_us']:.1f}); the host sees "
                f"the last byte {result['exposed_seen_by_host_us']:.1f} us after it sees the prefill's end\n"
                f"  a layer's {per_layer / 1e6:.1f} MB in {result['layer_us']:.1f} us, {result['layer_gbps']:.0f} GB/s"
                f"; posting {result['posting_us_a_layer_host']} us of host time a layer; byte exact: {exact}",
                flush=True,
            )
            assert exact
        await self.poster.leave(10)
        self.poster.close()
        return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=int)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child)
        return
    bench = Bench()
    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peer_access": bench.driver.can_access_peer(0, 1),
    }
    print(machine)
    try:
        scatter = bench.scatter(arguments.repeat)
        prefill = asyncio.run(bench.prefill(arguments.rounds))
    finally:
        bench.sock.close()
        bench.process.wait(30)
    figures = {
        "command": "python benchmarks/nvlink.py",
        "machine": machine,
        "copy_1gib_gbps": round(bench.link, 1),
        "scatter": scatter,
        "prefill": prefill,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
