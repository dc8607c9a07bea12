"""Worker processes: ready file, SIGTERM while streams run, unusable settings and models. Scripted runner, no torch."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2
from kvmesh.rpc import open_channel
from worker_kit import WAIT_S, process, ready


@pytest.mark.parametrize("module", ["services.decode", "services.prefill"])
async def test_sigterm_finishes_running_streams_and_refuses_new_ones(module: str, tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    flags = ["--role", "unified", "--runner", "scripted", "--scripted-step-ms", "20", "--ready-file", str(path)]
    async with process(module, *flags, "--instance", "w0") as child:
        info = await ready(path, child)
        assert (info["worker_id"], info["role"], info["model"]) == ("w0", "unified", "scripted")
        async with open_channel(info["address"]) as channel:
            stub = engine_pb2_grpc.DecodeStub(channel)
            call = stub.Frames(pb.FramesRequest(gateway_id="g"))
            frames = aiter(call)
            first = await anext(frames)
            assert first.incarnation == info["incarnation"]
            request = pb.SubmitRequest(
                gateway_id="g", request_id="r", model="scripted", token_ids=[1, 2, 3], prompt_len=3, ttft_ms=10_000,
                total_ms=20_000, sampling=inference_pb2.SamplingParams(max_tokens=50, seed=1, ignore_eos=True),
            )  # fmt: skip
            await stub.Submit(request, timeout=60)
            tokens: list[int] = []
            ends: list[pb.RequestEnd] = []
            async with asyncio.timeout(WAIT_S):
                async for frame in frames:
                    for delta in frame.deltas:
                        if not tokens:
                            child.send_signal(signal.SIGTERM)
                        tokens.extend(delta.token_ids)
                    ends.extend(frame.ends)
        assert len(tokens) == 50
        assert [end.WhichOneof("end") for end in ends] == ["finished"]
        async with asyncio.timeout(WAIT_S):
            log = (await child.stderr.read()).decode()
            assert await child.wait() == 0, log
        assert not path.exists()
        assert "Traceback" not in log
        assert "never retrieved" not in log


async def test_a_model_file_that_is_cut_short_is_a_clear_message(tmp_path: Path) -> None:
    model = tmp_path / "cut.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    async with process("services.decode", "--model", str(model)) as child:
        async with asyncio.timeout(WAIT_S * 2):
            log = (await child.stderr.read()).decode()
            assert await child.wait() == 1
        assert "cut.gguf" in log
        assert "Traceback" not in log


async def test_unusable_settings_name_the_setting() -> None:
    async with process("services.decode", "--runner", "scripted", "--kv-memory-bytes", "4096") as child:
        async with asyncio.timeout(WAIT_S):
            log = (await child.stderr.read()).decode()
            assert await child.wait() == 1
        assert "kv_memory_bytes" in log


async def test_a_scripted_worker_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    flags = ["--runner", "scripted", "--ready-file", str(path)]
    async with process("services.prefill", *flags, "--role", "unified") as child:
        info = await ready(path, child)
        maps = Path(f"/proc/{info['pid']}/maps").read_text()  # noqa: ASYNC240
        assert "libtorch" not in maps
