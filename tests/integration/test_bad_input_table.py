"""Every malformed request we can think of, against both doors of one gateway: the right status, one clear sentence,
and nobody else notices. What a single field may hold is in the unit tests of its face."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from bad_input_kit import WAIT_S, Answer, Watch, check_sentence, good_streams, raw_http, request_bytes
from bad_input_rows import CHAT, HEAVY, MIB, MODEL, body, grpc_table, http_table
from kvmesh.proto.v1 import inference_pb2 as pb
from mesh_kit import Mesh, answer, mesh_up, settled

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One for both tables."""
    program = Path(tmp_path_factory.mktemp("mesh")) / "program.json"
    program.write_text('{"max_model_len": 512}')
    settings = {
        "decode.scripted_faults": str(program),
        "prefill.scripted_faults": str(program),
        "decode.prefix_cache": "false",
        "decode.scripted_step_ms": "10",
    }
    async with mesh_up(cache=False, http_port=0, settings=settings) as made:
        yield made


async def undisturbed(mesh: Mesh, rows: Any) -> None:
    """Run the rows while a good stream runs and a watch looks at the gateway."""

    async def good() -> str:
        text, finished = await answer(mesh, "all the while", max_tokens=48, ignore_eos=True)
        assert finished.usage.completion_tokens == 48
        return text

    whole = await good()
    watch = Watch(mesh.state.http, mesh.pid("gateway"))
    async with good_streams(good) as texts:
        with watch.running():
            await rows()
    assert texts
    assert set(texts) == {whole}
    watch.check()
    await settled(mesh, "decode-0")


def check_reply(name: str, reply: Answer | None, status: int, code: str | None, part: str) -> None:
    assert reply is not None, "no answer"
    assert reply.status == status, f"{reply.status} {reply.body[:500]!r}"
    assert reply.headers["content-type"] == "application/json"
    assert "set-cookie" not in reply.headers
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert code is None or error["code"] == code, error
    assert part in error["message"], error
    check_sentence(name, error["message"])


async def test_http(mesh: Mesh) -> None:
    wrong: list[str] = []

    async def rows() -> None:
        for name, (data, *wanted) in http_table().items():
            reply = await raw_http(mesh.state.http, data)
            try:
                check_reply(name, reply, *wanted)
            except AssertionError as error:
                wrong.append(f"{name}: {str(error)[:700]}")
        for regex in HEAVY:
            reply = await raw_http(mesh.state.http, request_bytes(CHAT, body(regex=regex)))
            assert reply is not None
            assert reply.status in (200, 400), (regex[:80], reply.body)

    await undisturbed(mesh, rows)
    assert not wrong, "\n".join(wrong)


async def test_a_request_id_of_the_header_is_taken_or_left(mesh: Mesh) -> None:
    """It only ever comes back as it was allowed."""
    for given in ("a b", "x" * 200, "é", "a\tb"):
        reply = await raw_http(mesh.state.http, request_bytes(CHAT, body(), f"x-request-id: {given}"))
        assert reply is not None
        assert reply.status == 200, reply.body
        assert reply.headers["x-request-id"] != given
    reply = await raw_http(mesh.state.http, request_bytes(CHAT, body(), "x-request-id: mine"))
    assert reply is not None
    assert reply.headers["x-request-id"] == "mine"


async def test_grpc(mesh: Mesh) -> None:
    options = [("grpc.max_send_message_length", 64 * MIB), ("grpc.max_metadata_size", MIB)]

    async def call(channel: Any, method: str, data: bytes, **more: Any) -> tuple[str, str]:
        """Status and sentence. A refused stream sends nothing before."""
        try:
            if method.rsplit("/", 1)[-1] in ("Embed", "Tokenize", "ModelInfer"):
                return "OK", str(await channel.unary_unary(f"/{method}")(data, timeout=WAIT_S, **more))
            async for event in channel.unary_stream(f"/{method}")(data, timeout=WAIT_S, **more):
                return "OK", str(event[:200])
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    wrong: list[str] = []

    async def rows() -> None:
        async with grpc.aio.insecure_channel(mesh.gateway, options=options) as channel:
            for name, (method, data, status, part) in grpc_table().items():
                found, sentence = await call(channel, method, data)
                try:
                    assert found == status, f"{found} {sentence[:500]}"
                    assert part in sentence, sentence
                    check_sentence(name, sentence)
                except AssertionError as error:
                    wrong.append(f"{name}: {str(error)[:700]}")
            hello = pb.GenerateRequest(model=MODEL, text="hi").SerializeToString()
            flood = tuple((f"x-{n}", "x" * 100) for n in range(1000))
            found, _ = await call(channel, "kvmesh.v1.Inference/Generate", hello, metadata=flood)
            assert found == "RESOURCE_EXHAUSTED"
            # A field of a later version of the protocol is no fault, as protobuf has it.
            found, sentence = await call(channel, "kvmesh.v1.Inference/Generate", hello + b"\xfa\x7f\x03abc")
            assert found == "OK", sentence

    await undisturbed(mesh, rows)
    assert not wrong, "\n".join(wrong)
