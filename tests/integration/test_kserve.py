"""Clients that nobody here wrote speak the open inference protocol: `tritonclient` (its own stubs and streams), and
`buf curl` by reflection."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from test_foreign_client import BUF
from test_gateway_process import Process, wait_health

LIMIT_S = 90.0
# A process of its own: its stubs and ours describe the same messages, and one process holds one description of each.
TRITON = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

client = grpcclient.InferenceServerClient(sys.argv[1])
out = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model": client.is_model_ready("scripted"),
    "nobody": client.is_model_ready("nobody"),
    "server": client.get_server_metadata().name,
    "inputs": [t.name for t in client.get_model_metadata("scripted").inputs],
}

def inputs(text, stream=None, **sampling):
    made = [grpcclient.InferInput("text_input", [1], "BYTES")]
    made[0].set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    if stream is not None:
        made.append(grpcclient.InferInput("stream", [1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([stream], dtype=bool))
    if sampling:
        made.append(grpcclient.InferInput("sampling_parameters", [1], "BYTES"))
        made[-1].set_data_from_numpy(np.array([json.dumps(sampling).encode()], dtype=np.object_))
    return made

def text(result):
    return result.as_numpy("text_output")[0].decode()

greedy = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "seed": 7}
whole = client.infer("scripted", inputs("hello"), request_id="w", client_timeout=60, parameters={
    "max_tokens": 12, "ignore_eos": True, "temperature": "0.0", "seed": 7})
out["whole"], out["id"] = text(whole), whole.get_response().id

try:
    client.infer("nobody", inputs("hello"), client_timeout=60)
except InferenceServerException as error:
    out["error"] = error.status()
try:
    client.infer("scripted", inputs("hello", max_tokens=-1), client_timeout=60)
except InferenceServerException as error:
    out["bad"] = [error.status(), error.message()]

answers = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer("scripted", inputs("hello", True, **greedy), request_id="s",
                          enable_empty_final_response=True)
parts, count = [], 0
while True:
    result, error = answers.get(timeout=60)
    assert error is None, error
    response = result.get_response()
    assert response.id == "s"
    if response.parameters["triton_final_response"].bool_param:
        break
    parts.append(text(result))
    count += 1
out["streamed"], out["parts"] = "".join(parts), count
client.async_stream_infer("nobody", inputs("hello", True), request_id="e")
result, error = answers.get(timeout=60)
out["stream_error"] = str(error)
client.async_stream_infer("scripted", inputs("hello", False, **greedy), request_id="t")
result, error = answers.get(timeout=60)
out["after"] = text(result)
client.stop_stream()
print(json.dumps(out))
"""


async def run(*argv: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Process]:
    processes: list[Process] = []
    try:
        worker = Process("decode", tmp_path, role="unified", runner="scripted", model="scripted", num_pages=256)
        processes.append(worker)
        await worker.start()
        made = Process("gateway", tmp_path, model="scripted", workers=worker.address, heartbeat_s=2)
        processes.append(made)
        await made.start()
        await wait_health(made.address, True)
        yield made
    finally:
        for process in reversed(processes):
            if hasattr(process, "process"):
                await process.end(9)


async def test_foreign_clients(gateway: Process) -> None:
    pytest.importorskip("tritonclient", reason="make dev-env installs it")
    code, printed, err = await run(sys.executable, "-c", TRITON, gateway.address)
    assert code == 0, err
    out: dict[str, Any] = json.loads(printed)
    assert (out["live"], out["ready"], out["model"], out["nobody"], out["server"]) == (
        True,
        True,
        True,
        False,
        "kvmesh",
    )
    assert "text_input" in out["inputs"]
    assert out["id"] == "w"
    assert out["whole"]
    assert out["whole"] == out["streamed"] == out["after"]
    assert out["parts"] > 1
    assert out["error"] == "StatusCode.NOT_FOUND"
    assert out["bad"][0] == "StatusCode.INVALID_ARGUMENT"
    assert "sampling_parameters.max_tokens" in out["bad"][1]
    assert "[NOT_FOUND]" in out["stream_error"]

    request = {
        "modelName": "scripted",
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": ["1"], "contents": {"bytesContents": ["aGVsbG8="]}}
        ],
        "parameters": {
            "max_tokens": {"int64Param": "12"},
            "ignore_eos": {"boolParam": True},
            "temperature": {"doubleParam": 0},
            "seed": {"int64Param": "7"},
        },
    }
    code, printed, err = await run(
        *(BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request)),
        f"http://{gateway.address}/inference.GRPCInferenceService/ModelInfer",
    )
    assert code == 0, err
    (data,) = json.loads(printed)["outputs"][0]["contents"]["bytesContents"]
    assert base64.b64decode(data).decode() == out["whole"]
