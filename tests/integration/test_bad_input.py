"""Bad input to the whole mesh: each a clear status, and nothing is lost or leaked by any of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from mesh_kit import answer, mesh_up, settled


def chat(model: str, text: str = "hello", **sampling: object) -> pb.ChatRequest:
    sampling.setdefault("max_tokens", 4)
    return pb.ChatRequest(
        model=model,
        messages=[pb.ChatMessage(role="user", content=text)],
        sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
    )


async def refused(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        pytest.fail(f"a refused request sent {[event async for event in call]}")
    return caught.value


def reason(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None, f"no google.rpc details in {error}"
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    raise AssertionError("no ErrorInfo")


async def test_every_bad_input_is_named_and_leaves_nothing() -> None:
    settings = {"gateway.max_message_bytes": str(1 << 20), "decode.prefix_cache": "false"}
    async with mesh_up(cache=False, settings=settings) as mesh:
        options = [("grpc.max_send_message_length", 64 << 20)]
        async with grpc.aio.insecure_channel(mesh.gateway, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            context = 1 << 21
            bad = {
                "no message": (pb.ChatRequest(model=mesh.model), "INVALID_ARGUMENT"),
                "unknown model": (chat("no-such-model"), "NOT_FOUND"),
                "temperature": (chat(mesh.model, temperature=-1.0), "INVALID_ARGUMENT"),
                "nan": (chat(mesh.model, temperature=float("nan")), "INVALID_ARGUMENT"),
                "top_p": (chat(mesh.model, top_p=0.0), "INVALID_ARGUMENT"),
                "n": (chat(mesh.model, n=0), "INVALID_ARGUMENT"),
                "empty stop": (chat(mesh.model, stop=[""]), "INVALID_ARGUMENT"),
                "too long": (chat(mesh.model, "x " * (context // 8)), "INVALID_ARGUMENT"),
            }
            for name, (request, code) in bad.items():
                error = await refused(stub.Chat(request, timeout=60))
                assert error.code().name == code, f"{name}: {error}"
                assert reason(error), name
                assert "Traceback" not in (error.details() or "")

            error = await refused(stub.Generate(pb.GenerateRequest(model=mesh.model, text=""), timeout=60))
            assert error.code().name == "INVALID_ARGUMENT"
            error = await refused(stub.Chat(chat(mesh.model, "y" * (2 << 20)), timeout=60))
            assert error.code().name == "RESOURCE_EXHAUSTED"

            # Bad UTF-8 in a string field: 0xff 0xfe where `model` belongs.
            raw = channel.unary_stream("/kvmesh.v1.Inference/Chat")
            error = await refused(raw(b"\x0a\x02\xff\xfe", timeout=60))
            assert error.code().name in ("INVALID_ARGUMENT", "INTERNAL")

            error = await refused(stub.Chat(chat(mesh.model, "late " * 20, max_tokens=64), timeout=0.0001))
            assert error.code().name == "DEADLINE_EXCEEDED"
            call = stub.Chat(chat(mesh.model, "leaves " * 20, max_tokens=64), timeout=60)
            await call.read()
            call.cancel()

        _, finished = await answer(mesh, "all well?")
        assert finished.usage.completion_tokens == 16
        await settled(mesh, "decode-0")


async def run_up(*args: str, timeout_s: float = 120.0) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvmesh.cli.main",
        "up",
        "--no-cache",
        "--port=0",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace")


async def test_a_truncated_model_file_is_said_so(tmp_path: Path) -> None:
    from kvmesh.loading.source import resolve

    whole = Path(resolve("smollm2").path)
    short = tmp_path / "short.gguf"
    await asyncio.to_thread(shutil.copyfile, whole, short)
    os.truncate(short, 60 << 20)
    code, out = await run_up(f"--model={short}")
    assert code == 1
    assert "short.gguf" in out.replace("\n", "")  # A long path is broken over lines.
    assert "truncated" in out.lower()
    assert "Traceback" not in out


async def test_a_missing_model_is_said_so() -> None:
    code, out = await run_up("--model=/no/such/model.gguf")
    assert code == 1
    assert "/no/such/model.gguf" in out
    assert "Traceback" not in out
