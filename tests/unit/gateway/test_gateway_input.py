"""Bad input over the wire: each a clear status, nothing left behind."""

from __future__ import annotations

import sys
from subprocess import run
from typing import Any

import grpc
import pytest

from gateway_world import World, end_of, rest, text_of
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import from_rpc_error
from services.gateway.prepare import Preparer


@pytest.mark.parametrize(
    ("status", "field", "fields"),
    [
        ("INVALID_ARGUMENT", "sampling", {"sampling": pb.SamplingParams(top_p=float("nan"))}),
        ("INVALID_ARGUMENT", "messages", {"messages": [pb.ChatMessage(role="user", content="x" * 2000)]}),
        ("INVALID_ARGUMENT", "model", {"model": ""}),
        ("NOT_FOUND", "model", {"model": "unknown"}),
        ("INVALID_ARGUMENT", "request_id", {"request_id": "no spaces"}),
        ("INVALID_ARGUMENT", "limits.ttft_ms", {"limits": pb.Limits(ttft_ms=0)}),
        ("INVALID_ARGUMENT", "cache", {"cache": 9}),
        ("RESOURCE_EXHAUSTED", "messages", {"messages": [pb.ChatMessage(role="user", content="x" * 9000)]}),
    ],
)
async def test_each_a_clear_status(world: World, status: str, field: str, fields: dict[str, Any]) -> None:
    worker = await world.worker()
    await world.start(static=True, max_prompt_bytes=8000)
    error = await end_of(world.chat(**fields))
    assert error.code().name == status
    details = from_rpc_error(error)
    assert details.details["field"] in (field, "top_p")
    # A retry is pointless, so there is no RetryInfo.
    assert details.retry_after is None
    assert not worker.submits.items
    await world.until(world.idle)


async def test_no_message_and_no_prompt(world: World) -> None:
    await world.worker()
    await world.start(static=True)
    assert (
        await end_of(world.stub.Chat(pb.ChatRequest(model="scripted"), timeout=60))
    ).code().name == "INVALID_ARGUMENT"
    for request in (
        pb.GenerateRequest(model="scripted"),
        pb.GenerateRequest(model="scripted", text=""),
        pb.GenerateRequest(model="scripted", tokens=pb.TokenIds()),
        pb.GenerateRequest(model="scripted", tokens=pb.TokenIds(ids=[258])),
        pb.GenerateRequest(model="scripted", tokens=pb.TokenIds(ids=[1] * 1024)),
    ):
        error = await end_of(world.stub.Generate(request, timeout=60))
        assert error.code().name == "INVALID_ARGUMENT"
        assert from_rpc_error(error).details["field"] == "prompt"


async def raw(world: World, data: bytes) -> grpc.aio.AioRpcError:
    call = world.channel().unary_stream("/kvmesh.v1.Inference/Chat")(data, timeout=60)
    return await end_of(call)


async def test_bad_utf8_is_an_invalid_argument(world: World) -> None:
    await world.worker()
    await world.start(static=True)
    good = pb.ChatRequest(model="scripted", messages=[pb.ChatMessage(role="user", content="hello")])
    bad = good.SerializeToString().replace(b"hello", b"hel\xff\xfe")
    error = await raw(world, bad)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "parse" in str(error.details())
    assert (await raw(world, b"\xff\xff\xff")).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_size_limit(world: World) -> None:
    await world.worker()
    await world.start(static=True, max_message_bytes=4096)
    error = await end_of(world.chat("x" * 5000))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(error).retry_after is None
    assert text_of(await world.ask()) == "hello"


async def test_generate_takes_text_and_tokens(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    for request in (
        pb.GenerateRequest(model="scripted", text="hi<|im_end|>"),
        pb.GenerateRequest(model="auto", tokens=pb.TokenIds(ids=[104, 105, 257])),
    ):
        events = await rest(world.stub.Generate(request, timeout=60))
        assert text_of(events) == "hello"
        assert events[0].accepted.model == "scripted"
    # In a raw prompt, control tokens are what they say.
    assert [list(request.token_ids) for request in worker.submits.items] == [[104, 105, 257]] * 2


async def test_too_many_token_ids_are_refused_before_they_are_copied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message has room for millions of them; a list of so many costs a hundred megabytes and stops the loop."""
    await world.worker(max_model_len=1024)
    await world.start(static=True)
    monkeypatch.setattr(Preparer, "_tokenize", lambda *_: pytest.fail("copied"))
    for count in (0, 1024, 3_000_000):
        request = pb.GenerateRequest(model="scripted", tokens=pb.TokenIds(ids=[1] * count))
        error = await end_of(world.stub.Generate(request, timeout=60))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ("is empty" if not count else f"has {count} tokens; at most 1023") in from_rpc_error(error).message
    monkeypatch.undo()
    assert text_of(await world.ask()) == "hello"


async def test_control_tokens_in_a_message_are_text(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    await world.ask("a<|im_end|>b")
    (request,) = worker.submits.items
    ids = list(request.token_ids)
    assert ids.count(257) == 1
    assert b"a<|im_end|>b" in bytes(token for token in ids if token < 256)


async def test_long_prompts_are_tokenized_off_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    worker = await world.worker(max_model_len=100_000)
    worker.info.total_pages = 100_000
    await world.start(static=True)
    tokenizer = await world.gateway.tokenizers.get(worker.info)
    threads = []
    encode = tokenizer._encode_now
    monkeypatch.setattr(
        tokenizer, "_encode_now", lambda pieces: (threads.append(threading.current_thread()), encode(pieces))[1]
    )
    await world.ask("short")
    await world.ask("long " * 5000)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_models(world: World) -> None:
    await world.worker("a")
    await world.worker("b", max_model_len=500)
    await world.start(static=True)
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    (model,) = (await world.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.decode_workers, model.prefill_workers) == ("scripted", 2, 0)
    assert model.max_model_len == 500
    for name in ("scripted", "auto"):
        assert (await world.stub.GetModel(pb.GetModelRequest(name=name))).model == model
    for name, code in (("nope", "NOT_FOUND"), ("", "INVALID_ARGUMENT")):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await world.stub.GetModel(pb.GetModelRequest(name=name))
        assert raised.value.code().name == code


async def test_a_worker_with_another_tokenizer_is_not_used(world: World) -> None:
    worker = await world.worker()
    worker.info.tokenizer_fingerprint = "feedfacefeedface"
    await world.start(static=True)
    error = await end_of(world.chat())
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "tokenizer" in str(error.details())


def test_the_gateway_and_the_client_import_no_torch() -> None:
    code = (
        "import services.gateway.app, kvmesh.client, sys;"
        "bad = [m for m in ('torch', 'transformers') if m in sys.modules]; sys.exit(str(bad) if bad else 0)"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
