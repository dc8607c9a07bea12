"""OpenAI's own Python client against a whole mesh on the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from mesh_kit import Mesh, mesh_up, settled, until

MESSAGES: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]


def client_of(mesh: Mesh, **kwargs: Any) -> openai.AsyncOpenAI:
    assert mesh.state.http
    return openai.AsyncOpenAI(base_url=f"{mesh.state.http}/v1", api_key="none", max_retries=0, timeout=60, **kwargs)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """One for all: it takes seconds to start. The model ends by itself, but not soon."""
    program = Path(tmp_path_factory.mktemp("mesh")) / "program.json"
    program.write_text('{"eos_after": 2000}')
    settings = {"decode.scripted_faults": str(program), "decode.prefix_cache": "false"}
    async with mesh_up(cache=False, http_port=0, settings=settings) as made:
        yield made


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_models(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        models = [model.id async for model in client.models.list()]
        assert models == ["scripted"]
        assert (await client.models.retrieve(mesh.model)).id == "scripted"
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("none")
        assert raised.value.code == "model_not_found"


async def test_streamed_is_whole(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        asked: dict[str, Any] = {"model": mesh.model, "messages": MESSAGES, "max_completion_tokens": 24, "seed": 3}
        whole = await client.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 24
        text, usages, reasons = "", [], []
        async for chunk in await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usages.append(chunk.usage)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert text == whole.choices[0].message.content
        assert reasons == ["length"]
        assert usages[:-1] == [None] * (len(usages) - 1)
        assert usages[-1] is not None
        assert usages[-1].completion_tokens == 24
        # The client's own reader of streams puts the same together; it takes "length" for a failure.
        mark = text[6:8]
        async with client.chat.completions.stream(**asked, stop=[mark]) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == text[: text.index(mark)]


async def test_choices_scores_and_stops(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        found = await client.chat.completions.create(
            model=mesh.model, messages=MESSAGES, max_tokens=6, n=3, seed=1, logprobs=True, top_logprobs=2
        )
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert found.usage is not None
        assert found.usage.completion_tokens == 18
        for choice in found.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert len(choice.logprobs.content) == 6
            spoken = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
            assert spoken.decode("utf-8", "replace") == choice.message.content
        text = found.choices[0].message.content or ""
        middle = text[2:4]
        cut = await client.chat.completions.create(
            model=mesh.model, messages=MESSAGES, max_tokens=6, n=1, seed=1, stop=[middle]
        )
        assert cut.choices[0].message.content == text[: text.index(middle)]
        assert cut.choices[0].finish_reason == "stop"


async def test_completions(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        found = await client.completions.create(
            model=mesh.model, prompt=["one", "two"], max_tokens=5, seed=2, echo=True
        )
        assert [choice.index for choice in found.choices] == [0, 1]
        assert [choice.text[:3] for choice in found.choices] == ["one", "two"]
        texts = ["", ""]
        stream = await client.completions.create(
            model=mesh.model, prompt=["one", "two"], max_tokens=5, seed=2, echo=True, stream=True
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in found.choices]
        scored = await client.completions.create(model=mesh.model, prompt="one", max_tokens=5, seed=2, logprobs=2)
        scores = scored.choices[0].logprobs
        assert scores is not None
        assert scores.tokens is not None
        assert len(scores.tokens) == 5


async def test_errors_have_their_classes(mesh: Mesh) -> None:
    async with client_of(mesh) as client:
        ask = client.chat.completions.create
        with pytest.raises(openai.NotFoundError):
            await ask(model="none", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(model=mesh.model, messages=MESSAGES, temperature=-1)
        assert raised.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(model=mesh.model, messages=[{"role": "user", "content": "x" * 100_000}])
        assert raised.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(model=mesh.model, messages=MESSAGES, extra_body={"no_such": 1})
        assert raised.value.code == "unknown_parameter"
        # Its own extensions pass through `extra_body`.
        found = await ask(model=mesh.model, messages=MESSAGES, max_tokens=2, extra_body={"top_k": 5, "cache": "off"})
        assert found.choices[0].message.content is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_workers(mesh: Mesh, stream: bool) -> None:
    async with client_of(mesh) as client:
        ask = client.chat.completions.create(model=mesh.model, messages=MESSAGES, max_tokens=900, stream=stream, n=2)
        asked = asyncio.create_task(ask)

        async def runs() -> bool:
            load = await mesh.load("decode-0")
            return bool(load.running + load.waiting + load.transferring)

        await until(runs, "the request to run")
        if stream:
            chunks: Any = await asked
            await anext(aiter(chunks))
            await chunks.close()
        else:
            asked.cancel()
        await settled(mesh, "decode-0", "prefill-0")
    # And the next one is served.
    async with client_of(mesh) as client:
        found = await client.chat.completions.create(model=mesh.model, messages=MESSAGES, max_tokens=2)
        assert found.choices[0].finish_reason == "length"
