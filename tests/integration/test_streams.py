"""Bad neighbours: a reader that stops, a gateway that is stopped, a thousand clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from kvmesh.cli.health import wait_serving
from kvmesh.cli.process import Process
from kvmesh.proto.v1 import inference_pb2, inference_pb2_grpc
from mesh_kit import answer, mesh_up, settled, until

CANCELLED_STREAMS = 10_000 if os.environ.get("KVMESH_SOAK") else 1_000
PACE = {"decode.scripted_step_ms": "10", "decode.max_batch": "64", "decode.max_queue": "256"}


def chat_request(mesh_model: str, text: str, max_tokens: int) -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(
        model=mesh_model,
        messages=[inference_pb2.ChatMessage(role="user", content=text)],
        sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


async def test_a_stalled_reader_stops_nobody_else() -> None:
    async with mesh_up(cache=False, settings=PACE) as mesh:
        channel = grpc.aio.insecure_channel(mesh.gateway)
        stub = inference_pb2_grpc.InferenceStub(channel)
        # These clients read one event and never again.
        stalled = [stub.Chat(chat_request(mesh.model, f"stalled {i}", 400), timeout=120) for i in range(8)]
        for call in stalled:
            assert await call.read() is not grpc.aio.EOF
        results = await asyncio.gather(*(answer(mesh, f"reader {i}", max_tokens=64) for i in range(16)))
        assert all(finished.usage.completion_tokens == 64 for _, finished in results)
        for call in stalled:
            call.cancel()
        await channel.close()
        await settled_apart_from_cache(mesh)


async def test_a_stopped_gateway_loses_only_its_own_streams() -> None:
    """SIGSTOP of one gateway process: the worker aborts its sequences; streams of the other gateway end whole."""
    async with mesh_up(cache=False, settings={**PACE, "decode.write_timeout_s": "4"}) as mesh:
        spec = next(spec for spec in mesh.supervisor.plan.specs if spec.name == "gateway")
        ready = spec.ready_file.with_name("gateway-2.ready")
        argv = tuple(
            f"--ready-file={ready}"
            if arg.startswith("--ready-file=")
            else "--listen=127.0.0.1:0"
            if arg.startswith("--listen=")
            else "--instance=gateway-2"
            if arg.startswith("--instance=")
            else arg
            for arg in spec.argv
        )
        second = await Process.start(
            replace(spec, name="gateway-2", argv=argv, ready_file=ready), mesh.supervisor.log_dir
        )
        try:
            info = await until(second.read_ready, "the second gateway")
            assert await wait_serving(info.address, "kvmesh.v1.Inference", 30)
            async with grpc.aio.insecure_channel(info.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                calls = [
                    stub.Chat(chat_request(mesh.model, f"lost {i}", 2000), timeout=120, wait_for_ready=True)
                    for i in range(8)
                ]
                for call in calls:
                    assert await call.read() is not grpc.aio.EOF
                second.signal(signal.SIGSTOP)
                results = await asyncio.gather(*(answer(mesh, f"other {i}", max_tokens=200) for i in range(8)))
                assert all(finished.usage.completion_tokens == 200 for _, finished in results)

                async def only_free() -> bool:
                    load = await mesh.load("decode-0")
                    return load.running == 0 and load.waiting == 0

                await until(only_free, "the stopped gateway's sequences aborted", timeout_s=60)
                for call in calls:
                    call.cancel()
        finally:
            second.signal(signal.SIGCONT)
            second.signal(signal.SIGKILL)
            await second.stop()


@pytest.mark.timeout(300 + CANCELLED_STREAMS // 10)
async def test_cancelled_streams_leave_nothing_behind(record_property: Callable[[str, str], None]) -> None:
    settings = {**PACE, "decode.prefix_cache": "false", "prefill.prefix_cache": "false"}
    async with mesh_up(cache=False, settings=settings) as mesh:
        channel = grpc.aio.insecure_channel(mesh.gateway)
        stub = inference_pb2_grpc.InferenceStub(channel)
        gate = asyncio.Semaphore(16)

        async def one(index: int) -> None:
            async with gate:
                text = f"{index} " + "words and more words " * (index % 4)
                call = stub.Chat(chat_request(mesh.model, text, 500), timeout=60)
                # Leave at different points: before acceptance, at acceptance, after some tokens.
                for _ in range(index % 4):
                    with contextlib.suppress(asyncio.CancelledError):
                        if await call.read() is grpc.aio.EOF:
                            break
                call.cancel()

        async def round_of(count: int) -> None:
            await asyncio.gather(*(one(index) for index in range(count)))
            await settled(mesh, "decode-0", "prefill-0")

        names = ("gateway", "decode-0", "prefill-0", "kvtransfer-decode-0", "kvtransfer-prefill-0")
        await round_of(CANCELLED_STREAMS // 5)  # warm-up: pools, caches, arenas
        fds_before = {name: open_fds(mesh.pid(name)) for name in names}
        rss_before = {name: mesh.rss(name) for name in names}
        await round_of(CANCELLED_STREAMS // 2)
        half = {name: mesh.rss(name) for name in names}
        await round_of(CANCELLED_STREAMS // 2)
        grown = {name: mesh.rss(name) - rss_before[name] for name in names}
        # Arenas grow by steps, whenever it suits them; a leak grows in either half.
        both = {name: min(half[name] - rss_before[name], mesh.rss(name) - half[name]) for name in names}
        fds = {name: open_fds(mesh.pid(name)) - fds_before[name] for name in names}
        shown = ", ".join(f"{name} {grown[name] / 2**20:.1f} MiB {fds[name]:+d} descriptors" for name in names)
        record_property("measured", f"{CANCELLED_STREAMS} cancelled streams; grown: {shown}")
        assert all(bytes_ < 24 << 20 for bytes_ in grown.values()), f"memory grew: {grown}"
        assert all(bytes_ < 6 << 20 for bytes_ in both.values()), f"memory grows on and on: {both}"
        assert all(count <= 4 for count in fds.values()), f"descriptors grew: {fds}"
        _, finished = await answer(mesh, "still there? " * 10)
        assert finished.usage.completion_tokens == 16
        await channel.close()


def open_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def settled_apart_from_cache(mesh) -> None:  # type: ignore[no-untyped-def]
    async def idle() -> bool:
        load = await mesh.load("decode-0")
        return load.running == 0 and load.waiting == 0 and load.transferring == 0

    await until(idle, "nothing running on decode-0")
