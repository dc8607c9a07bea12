"""Clients that nobody here wrote run one list of calls against a mesh: streaming, tools, JSON schema, logprobs, errors,
usage. OpenAI's and LangChain's over HTTP, `buf curl` over gRPC.

The scripted engine answers with letters that mean nothing, and keeps to a grammar: tools and schemas are forced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import langchain_openai
import openai
import pytest
import pytest_asyncio

from mesh_kit import Mesh, mesh_up
from test_foreign_client import buf_curl, documents

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather of some days.", "parameters": SCHEMA}
QUESTION = "How is the weather?"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with mesh_up(cache=False, http_port=0) as made:
        yield made


async def test_openai(mesh: Mesh) -> None:
    client = openai.AsyncOpenAI(base_url=f"{mesh.state.http}/v1", api_key="none", max_retries=0, timeout=60)
    messages: Any = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", "function": TOOL}]
    async with client:
        # Tools, whole and streamed.
        asked: Any = {"model": mesh.model, "messages": messages, "tools": tools, "tool_choice": "required", "seed": 5}
        asked |= {"parallel_tool_calls": False, "max_tokens": 400}
        whole = await client.chat.completions.create(**asked)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert calls
        for call in calls:
            assert call.type == "function"
            assert call.function.name == "weather"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        parts: dict[int, list[str]] = {}
        names: list[str] = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                assert part.function is not None
                if part.function.name:
                    names.append(part.function.name)
                parts.setdefault(part.index, []).append(part.function.arguments or "")
        assert names == [call.function.name for call in calls if call.type == "function"]
        assert ["".join(pieces) for pieces in parts.values()] == [
            call.function.arguments for call in calls if call.type == "function"
        ]
        # The answer goes back, and the talk goes on.
        messages += [
            choice.message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls),
        ]
        again = await client.chat.completions.create(model=mesh.model, messages=messages, tools=tools, max_tokens=4)
        assert again.choices[0].finish_reason == "length"
        assert again.usage is not None
        assert again.usage.completion_tokens == 4
        assert again.usage.total_tokens == again.usage.prompt_tokens + 4
        # A JSON schema.
        form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
        formed = await client.chat.completions.create(
            model=mesh.model, messages=[{"role": "user", "content": QUESTION}], response_format=form, temperature=1
        )
        assert formed.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(formed.choices[0].message.content or ""), SCHEMA)
        # Log-probabilities.
        scored = await client.chat.completions.create(
            model=mesh.model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=3,
            logprobs=True,
            top_logprobs=2,
        )
        found = scored.choices[0].logprobs
        assert found is not None
        assert [len(entry.top_logprobs) for entry in found.content or []] == [2, 2, 2]
        assert "".join(entry.token for entry in found.content or []) == scored.choices[0].message.content
        # Errors.
        for field, value in (("temperature", -1), ("max_tokens", -1), ("n", 0), ("tool_choice", "none of these")):
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(**{"model": mesh.model, "messages": messages[:1], field: value})
            assert field in str(bad.value)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="none", messages=messages[:1])


async def test_langchain(mesh: Mesh) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{mesh.state.http}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=mesh.model,
        max_retries=0,
        timeout=60,
        max_tokens=200,  # type: ignore[call-arg]
        stream_usage=True,
    )
    answer = await chat.ainvoke(QUESTION, max_tokens=6)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 6
    whole = None
    async for chunk in chat.astream(QUESTION, max_tokens=6, seed=3):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 6
    bound = chat.bind_tools([{"type": "function", "function": TOOL}], tool_choice="weather", parallel_tool_calls=False)
    called = await bound.ainvoke(QUESTION)
    assert called.tool_calls
    for call in called.tool_calls:
        assert call["name"] == "weather"
        jsonschema.validate(call["args"], SCHEMA)
    formed = chat.with_structured_output(SCHEMA | {"title": "trip"}, method="json_schema", strict=True)
    jsonschema.validate(await formed.ainvoke(QUESTION), SCHEMA)
    scored = await chat.bind(logprobs=True, top_logprobs=1, max_tokens=2).ainvoke(QUESTION)
    assert len(scored.response_metadata["logprobs"]["content"]) == 2
    with pytest.raises(openai.BadRequestError):
        await chat.ainvoke(QUESTION, temperature=-1)


async def test_buf_curl(mesh: Mesh) -> None:
    url = f"http://{mesh.gateway}/kvmesh.v1.Inference"
    base: dict[str, Any] = {"model": mesh.model, "messages": [{"role": "user", "content": QUESTION}]}

    async def chat(**more: Any) -> list[dict[str, Any]]:
        code, out, err = await buf_curl(mesh, "-d", json.dumps(base | more), f"{url}/Chat")
        assert code == 0, err
        events = [document["event"] for document in documents(out)]
        assert "finished" in events[-1], events[-1]
        return events

    tool = {**TOOL, "parameters": json.dumps(SCHEMA)}
    called, formed, scored = await asyncio.gather(
        chat(
            tools=[tool],
            toolChoice={"mode": "MODE_REQUIRED"},
            parallelToolCalls=False,
            sampling={"seed": "5", "maxTokens": 400},
        ),
        chat(sampling={"grammar": {"jsonSchema": json.dumps(SCHEMA)}}),
        chat(sampling={"maxTokens": 3, "logprobs": 2}),
    )
    deltas = [event["delta"] for event in called if "delta" in event]
    parts = [part for delta in deltas for part in delta.get("toolCalls", [])]
    assert parts[0]["name"] == "weather"
    first = "".join(part.get("arguments", "") for part in parts if not part.get("index"))
    jsonschema.validate(json.loads(first), SCHEMA)
    assert deltas[-1]["finishReason"] == "FINISH_REASON_TOOL_CALLS"
    text = "".join(event["delta"].get("text", "") for event in formed if "delta" in event)
    jsonschema.validate(json.loads(text), SCHEMA)
    entries = [entry for event in scored if "delta" in event for entry in event["delta"].get("logprobs", [])]
    assert [len(entry["top"]) for entry in entries] == [2, 2, 2]
    assert scored[-1]["finished"]["usage"]["completionTokens"] == 3
    code, _, err = await buf_curl(mesh, "-d", json.dumps(base | {"sampling": {"temperature": 900}}), f"{url}/Chat")
    assert code != 0
    assert "invalid_argument" in err
    code, out, err = await buf_curl(mesh, "-d", json.dumps({"model": mesh.model, "text": "hello"}), f"{url}/Tokenize")
    assert code == 0, err
    assert len(documents(out)[0]["tokenIds"]) == len("hello")
