"""The open inference protocol over real gRPC: whole answers, streams of many requests, errors that end one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway_fakes import MODEL, WAIT_S
from gateway_world import World
from kvmesh.errors import InvalidArgument, NotFound, Overloaded, Unavailable
from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from kvmesh.proto.inference import grpc_predict_v2_pb2_grpc
from kvmesh.proto.v1 import engine_pb2
from kvmesh.rpc.credentials import hash_key
from kvmesh.rpc.status import from_rpc_error
from services.gateway.kserve import service
from services.gateway.kserve.service import SERVICE_NAME

Contents = kserve.InferTensorContents
Tensor = kserve.ModelInferRequest.InferInputTensor
Parameter = kserve.InferParameter


def infer(
    text: str = "hi", *, stream: bool = False, model: str = MODEL, request_id: str = "", **parameters: int
) -> kserve.ModelInferRequest:
    inputs = [Tensor(name="text_input", datatype="BYTES", shape=[1], contents=Contents(bytes_contents=[text.encode()]))]
    if stream:
        inputs.append(Tensor(name="stream", datatype="BOOL", shape=[1], contents=Contents(bool_contents=[True])))
    return kserve.ModelInferRequest(
        model_name=model,
        id=request_id,
        inputs=inputs,
        parameters={name: Parameter(int64_param=value) for name, value in parameters.items()},
    )


def text_of(response: kserve.ModelInferResponse) -> str:
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("text_output", "BYTES", [1])
    (data,) = output.contents.bytes_contents
    return data.decode()


def final(response: kserve.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param


@pytest_asyncio.fixture
async def served(world: World) -> AsyncIterator[World]:
    await world.worker(text="hello")
    await world.router()
    await world.start()
    world.kserve = grpc_predict_v2_pb2_grpc.GRPCInferenceServiceStub(world.channel())  # type: ignore[attr-defined]
    yield world


def stub(world: World) -> Any:
    return world.kserve  # type: ignore[attr-defined]


async def read(call: Any) -> kserve.ModelStreamInferResponse:
    async with asyncio.timeout(WAIT_S):
        response = await call.read()
    assert response is not grpc.aio.EOF
    return response


async def test_a_whole_answer(served: World) -> None:
    reply = await stub(served).ModelInfer(infer(request_id="r1", max_tokens=20), timeout=WAIT_S)
    assert text_of(reply) == "hello"
    assert (reply.model_name, reply.model_version, reply.id) == (MODEL, "rev-1", "r1")
    assert final(reply)
    assert reply.parameters["completion_tokens"].int64_param == 6
    assert reply.parameters["prompt_tokens"].int64_param == 2
    (submit,) = served.workers[0].submits.items
    assert submit.sampling.max_tokens == 20
    await served.until(served.idle)


async def test_raw_in_raw_out_and_more_outputs(served: World) -> None:
    request = kserve.ModelInferRequest(
        model_name=MODEL,
        inputs=[
            Tensor(name=name, datatype=kind, shape=[1])
            for name, kind in (("text_input", "BYTES"), ("exclude_input_in_output", "BOOL"))
        ],
        outputs=[
            kserve.ModelInferRequest.InferRequestedOutputTensor(name=name)
            for name in ("num_output_tokens", "text_output", "finish_reason")
        ],
        raw_input_contents=[b"\x02\0\0\0hi", b"\0"],
    )
    reply = await stub(served).ModelInfer(request, timeout=WAIT_S)
    assert [output.name for output in reply.outputs] == ["num_output_tokens", "text_output", "finish_reason"]
    assert list(reply.raw_output_contents) == [b"\x06\0\0\0", b"\x07\0\0\0hihello", b"\x04\0\0\0stop"]


async def test_a_stream_sends_what_comes_and_then_its_end(served: World) -> None:
    call = stub(served).ModelStreamInfer()
    await call.write(infer(stream=True, request_id="a"))
    parts, last = [], None
    while last is None:
        response = await read(call)
        assert not response.error_message
        assert response.infer_response.id == "a"
        if final(response.infer_response):
            last = response.infer_response
        else:
            parts.append(text_of(response.infer_response))
    assert "".join(parts) == "hello"
    assert text_of(last) == ""
    # The stream serves on, and answers whole where nobody asked to stream.
    await call.write(infer(request_id="b"))
    response = (await read(call)).infer_response
    assert (response.id, text_of(response), final(response)) == ("b", "hello", True)
    await call.done_writing()
    async with asyncio.timeout(WAIT_S):
        assert await call.read() is grpc.aio.EOF
    await served.until(served.idle)


async def test_an_empty_final_response_where_it_is_asked_for(served: World) -> None:
    request = infer(stream=True)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    call = stub(served).ModelStreamInfer()
    await call.write(request)
    await call.done_writing()
    responses = []
    async with asyncio.timeout(WAIT_S):
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response.infer_response)
    assert not responses[-1].outputs
    assert final(responses[-1])
    assert "".join(text_of(response) for response in responses[:-1]) == "hello"


async def test_a_stream_does_not_outlive_its_key(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("mesh-token-for-tests\n")
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(tmp_path / "token"))
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nsha256 = "{hash_key("secret")}"\ntenant = "acme"\n')
    await world.worker(text="hello")
    await world.start(static=True, credentials_file=keys)
    metadata = (("authorization", "Bearer secret"),)
    call = grpc_predict_v2_pb2_grpc.GRPCInferenceServiceStub(world.channel()).ModelStreamInfer(metadata=metadata)
    await call.write(infer(request_id="a"))
    assert text_of((await read(call)).infer_response) == "hello"
    keys.write_text("")
    credentials = world.gateway.front.credentials
    async with asyncio.timeout(WAIT_S):
        while credentials._file is not None and credentials._file.get().keys:
            await asyncio.sleep(0.05)
    await call.write(infer(request_id="b"))
    refused = await read(call)
    assert "API key" in refused.error_message
    assert refused.infer_response.id == "b"
    call.cancel()


async def test_requests_of_a_stream_run_side_by_side(served: World) -> None:
    """Each ends by itself, in any order, and an error of one is no error of the others."""
    worker = served.workers[0]

    async def hold(request: engine_pb2.SubmitRequest) -> None:
        pass

    worker.on_submit = hold
    call = stub(served).ModelStreamInfer()
    for name in ("a", "b"):
        await call.write(infer(request_id=name, stream=True))
    await worker.submits.wait(2)
    await call.write(infer(request_id="c", model="nobody"))
    response = await read(call)
    assert response.infer_response.id == "c"
    assert response.error_message.startswith("[NOT_FOUND] ")
    assert response.infer_response.parameters["error_code"].string_param == "NOT_FOUND"
    await call.write(infer(request_id="a"))
    assert (await read(call)).error_message.startswith("[ALREADY_EXISTS] ")
    first, second = worker.submits.items
    worker.answer(second, "two")
    got = ""
    while not final(response := (await read(call)).infer_response):
        assert response.id == "b"
        got += text_of(response)
    assert got == "two"
    worker.answer(first, "one")
    while not final(response := (await read(call)).infer_response):
        assert response.id == "a"
    await call.done_writing()
    async with asyncio.timeout(WAIT_S):
        assert await call.read() is grpc.aio.EOF


async def test_errors_have_their_status(served: World) -> None:
    for request, kind in (
        (infer(model="nobody"), NotFound),
        (infer(model=""), InvalidArgument),
        (infer(""), InvalidArgument),
        (infer(request_id="a b"), InvalidArgument),
        (infer(max_tokens=0), InvalidArgument),
        (infer(temperature=-1), InvalidArgument),
        (kserve.ModelInferRequest(model_name=MODEL), InvalidArgument),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(served).ModelInfer(request, timeout=WAIT_S)
        assert type(from_rpc_error(caught.value)) is kind
    versioned = infer()
    versioned.model_version = "rev-2"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(served).ModelInfer(versioned, timeout=WAIT_S)
    assert type(from_rpc_error(caught.value)) is NotFound
    versioned.model_version = "rev-1"
    assert text_of(await stub(served).ModelInfer(versioned, timeout=WAIT_S)) == "hello"


async def test_a_failure_after_acceptance_is_a_status(served: World) -> None:
    worker = served.workers[0]

    async def fail(request: engine_pb2.SubmitRequest) -> None:
        worker.end(request, InvalidArgument("the worker says no"))

    worker.on_submit = fail
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub(served).ModelInfer(infer(), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_server_and_model_tell_of_themselves(served: World) -> None:
    kind = stub(served)
    assert (await kind.ServerLive(kserve.ServerLiveRequest(), timeout=WAIT_S)).live
    assert (await kind.ServerReady(kserve.ServerReadyRequest(), timeout=WAIT_S)).ready
    assert (await kind.ServerMetadata(kserve.ServerMetadataRequest(), timeout=WAIT_S)).name == "kvmesh"
    assert (await kind.ModelReady(kserve.ModelReadyRequest(name=MODEL), timeout=WAIT_S)).ready
    assert not (await kind.ModelReady(kserve.ModelReadyRequest(name="nobody"), timeout=WAIT_S)).ready
    assert not (await kind.ModelReady(kserve.ModelReadyRequest(name=MODEL, version="9"), timeout=WAIT_S)).ready
    told = await kind.ModelMetadata(kserve.ModelMetadataRequest(name=MODEL), timeout=WAIT_S)
    assert (told.name, list(told.versions), told.platform) == (MODEL, ["rev-1"], "kvmesh")
    assert ("text_input", "BYTES", [1]) in [(t.name, t.datatype, list(t.shape)) for t in told.inputs]
    assert ("text_output", "BYTES", [1]) in [(t.name, t.datatype, list(t.shape)) for t in told.outputs]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kind.ModelMetadata(kserve.ModelMetadataRequest(name="nobody"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    health = health_pb2_grpc.HealthStub(served.channel())
    reply = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=WAIT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_that_leaves_its_stream_leaves_nothing(served: World) -> None:
    worker = served.workers[0]

    async def hold(request: engine_pb2.SubmitRequest) -> None:
        pass

    worker.on_submit = hold
    call = stub(served).ModelStreamInfer()
    for _ in range(3):
        await call.write(infer(stream=True))
    await worker.submits.wait(3)
    call.cancel()
    await worker.aborts.wait(3)
    await served.until(served.idle)


async def test_one_stream_runs_a_bounded_number_at_a_time(served: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CONCURRENT", 2)
    worker = served.workers[0]

    async def hold(request: engine_pb2.SubmitRequest) -> None:
        pass

    worker.on_submit = hold
    call = stub(served).ModelStreamInfer()
    for index in range(4):
        await call.write(infer(request_id=f"r{index}"))
    first, _ = await worker.submits.wait(2)
    assert len(served.gateway.registry) == 2
    worker.answer(first, "x")
    assert (await read(call)).infer_response.id == "r0"
    await worker.submits.wait(3)
    assert len(served.gateway.registry) == 2
    call.cancel()


async def test_a_message_that_does_not_parse_ends_the_stream(served: World) -> None:
    call = served.channel().stream_stream(f"/{SERVICE_NAME}/ModelStreamInfer")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(WAIT_S):
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stopping_gateway_lets_running_requests_of_a_stream_end(served: World) -> None:
    worker = served.workers[0]

    async def hold(request: engine_pb2.SubmitRequest) -> None:
        pass

    worker.on_submit = hold
    call = stub(served).ModelStreamInfer()
    await call.write(infer(request_id="a"))
    (running,) = await worker.submits.wait(1)
    served.gateway.kserve.stop()
    assert not (await stub(served).ServerReady(kserve.ServerReadyRequest(), timeout=WAIT_S)).ready
    worker.answer(running, "whole")
    response = (await read(call)).infer_response
    assert text_of(response) == "whole"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(WAIT_S):
            await call.read()
    assert type(from_rpc_error(caught.value)) is Unavailable


async def test_overload_says_so_in_a_stream(served: World) -> None:
    served.gateway.registry._max_requests = 0
    call = stub(served).ModelStreamInfer()
    await call.write(infer())
    response = await read(call)
    assert response.error_message.startswith("[RESOURCE_EXHAUSTED] ")
    assert response.infer_response.parameters["error_reason"].string_param == Overloaded.reason
    call.cancel()
