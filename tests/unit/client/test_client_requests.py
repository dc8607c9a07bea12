"""What becomes of the arguments of a call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from client_kit import Gateway
from kvmesh.client import Client, SyncClient
from kvmesh.client import requests as made
from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import inference_pb2 as pb

WEATHER = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}, "strict": True}


async def test_a_chat_carries_everything(gateway: Gateway) -> None:
    messages: list[Any] = [
        ("system", "Be brief."),
        {"role": "user", "content": "Weather?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ä"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    async with Client(gateway.address, api_key="kvm-secret") as client:
        await client.chat(
            messages,
            model="m",
            tools=[{"type": "function", "function": WEATHER}, WEATHER, pb.Tool(name="other")],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            parallel_tool_calls=False,
            template_variables={"enable_thinking": True},
            json_schema={"type": "object"},
            stop="\n",
            temperature=0.5,
            seed=None,
            cache="exact",
            cache_control={"max_age_s": 5},
            user="u",
            session_id="s",
            request_id="mine",
            ttft_ms=100,
        ).result()
    (request,) = gateway.requests
    assert [each.role for each in request.messages] == ["system", "user", "assistant", "tool"]
    assert request.messages[1].name == "ann"
    (called,) = request.messages[2].tool_calls
    assert (called.id, called.name, json.loads(called.arguments)) == ("1", "weather", {"city": "Ä"})
    assert request.messages[3].tool_call_id == "1"
    assert [each.name for each in request.tools] == ["weather", "weather", "other"]
    assert request.tools[0] == request.tools[1]
    assert request.tools[0].strict
    assert json.loads(request.tools[0].parameters) == {"type": "object"}
    assert (request.tool_choice.mode, request.tool_choice.name) == (pb.ToolChoice.MODE_NAMED, "weather")
    assert request.HasField("parallel_tool_calls")
    assert json.loads(request.template_variables) == {"enable_thinking": True}
    assert json.loads(request.sampling.grammar.json_schema) == {"type": "object"}
    assert list(request.sampling.stop) == ["\n"]
    assert not request.sampling.HasField("seed")
    assert request.cache == pb.CACHE_MODE_EXACT
    assert request.cache_control.max_age_s == 5
    assert (request.user, request.session_id, request.request_id, request.limits.ttft_ms) == ("u", "s", "mine", 100)
    assert gateway.metadata[0]["authorization"] == "Bearer kvm-secret"


async def test_what_is_not_given_is_not_sent(gateway: Gateway) -> None:
    async with Client(gateway.address) as client:
        await client.chat([("user", "x")]).result()
        await client.generate([1, 2]).result()
    chat, generate = gateway.requests
    assert not chat.HasField("tool_choice")
    assert not chat.HasField("parallel_tool_calls")
    assert not chat.HasField("cache_control")
    assert not chat.sampling.HasField("grammar")
    assert list(generate.tokens.ids) == [1, 2]
    assert "authorization" not in gateway.metadata[0]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"regex": "a+"}, pb.Grammar(regex="a+")),
        ({"lark": "start: /a/"}, pb.Grammar(lark="start: /a/")),
        ({"json_object": True}, pb.Grammar(json_object=True)),
        ({"json_schema": '{"type":"null"}'}, pb.Grammar(json_schema='{"type":"null"}')),
        ({"grammar": pb.Grammar(regex="b")}, pb.Grammar(regex="b")),
    ],
)
async def test_grammars(gateway: Gateway, given: dict[str, Any], wanted: pb.Grammar) -> None:
    async with Client(gateway.address) as client:
        await client.generate("x", **given).result()
        assert gateway.requests[0].sampling.grammar == wanted


def test_a_class_may_be_the_schema() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Answer", city=(str, ...))
    assert json.loads(made.schema_text("json_schema", model))["required"] == ["city"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [("user", "x", "y")]}, "messages"),
    ({"messages": [{"role": "user", "text": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"tools": [{"name": 5}]}, "tools"),
    ({"tools": [{"name": "a", "parameters": {"x": object()}}]}, "tools"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"regex": "a", "json_object": True}, "grammar"),
    ({"json_schema": int}, "json_schema"),
    ({"grammar": {}}, "grammar"),
    ({"cache": "maybe"}, "cache"),
    ({"cache_control": {"tau_": 1}}, "cache_control"),
    ({"ttft_ms": -1}, "limits"),
    ({"topp": 1}, "topp"),
]


@pytest.mark.parametrize(("given", "field"), WRONG)
async def test_what_cannot_be_sent_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument) as raised:
            client.chat(**{"messages": [("user", "x")], **given})
        assert raised.value.details["field"] == field


async def test_the_key_comes_from_the_environment_and_is_never_shown(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_API_KEY", "kvm-from-env")
    async with Client(gateway.address) as client, Client(gateway.address, api_key="") as without:
        await client.models()
        await without.models()
        assert "kvm-from-env" not in repr(client) + repr(vars(client._channel))
    assert gateway.metadata[0]["authorization"] == "Bearer kvm-from-env"
    assert "authorization" not in gateway.metadata[1]


@pytest.mark.parametrize("address", ["", "a:1,b:2", []])
async def test_an_address_that_is_none(address: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        Client(address)
    assert raised.value.details["field"] == "address"
    with pytest.raises(InvalidArgument):
        SyncClient(address)


async def test_embeddings_tokens_and_models(gateway: Gateway) -> None:
    async with Client(gateway.address) as client:
        assert await client.embed("one") == [[1.0, 0.0]]
        assert gateway.requests[-1].model == "vectors"
        assert await client.embed(["a", "b"], model="minilm", user="u") == [[1.0, 0.0]] * 2
        assert list(gateway.requests[-1].input) == ["a", "b"]
        assert list((await client.tokenize("ab")).token_ids) == [1, 2]
        await client.tokenize([("user", "x")], tools=[WEATHER])
        assert gateway.requests[-1].chat.tools[0].name == "weather"
        assert (await client.model("x")).name == "x"
        assert [each.name for each in await client.models()] == ["m", "vectors"]
        assert await client.abort("r")
