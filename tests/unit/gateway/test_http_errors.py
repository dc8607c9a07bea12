"""What is wrong is said once, in OpenAI's form, with the right status, and costs nobody else anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway_fakes import MODEL
from gateway_world import World
from http_world import CHAT, Wire, chat, client, get, post, start_http
from kvmesh.errors import Unavailable
from kvmesh.rpc.credentials import hash_key, new_key

COMPLETIONS = "/v1/completions"
OK = [{"role": "user", "content": "hi"}]


def raw(text: str | bytes) -> dict[str, Any]:
    return {"content": text.encode() if isinstance(text, str) else text}


# (body, param, code, a part of the message)
CHATS: list[tuple[dict[str, Any], str | None, str | None, str]] = [
    ({"model": MODEL}, "messages", "missing_required_parameter", "Missing required parameter"),
    ({"messages": OK}, "model", "missing_required_parameter", "model"),
    (chat(foo=1), "foo", "unknown_parameter", "Unrecognized request argument supplied: foo"),
    (chat(messages=[]), "messages", "array_below_min_length", "at least 1"),
    (chat(messages="hi"), "messages", "invalid_type", "expected an array, but got a string"),
    (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role", "invalid_value", "robot"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "invalid_type", "an integer"),
    (chat(messages=[{"role": "user", "content": "x", "zz": 1}]), "messages[0].zz", "unknown_parameter", "zz"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "missing_required_parameter", ""),
    (chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", "missing_required_parameter", ""),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
        "messages[0].content[0].type",
        "unsupported_parameter",
        "takes text only",
    ),
    (chat(temperature="hot"), "temperature", "invalid_type", "expected a number, but got a string"),
    (chat(temperature=101), "temperature", "above_max_value", "100"),
    (chat(temperature=-1), "temperature", "below_min_value", "0"),
    (chat(max_tokens=-1), "max_tokens", "below_min_value", ""),
    (chat(max_tokens=1.5), "max_tokens", "invalid_type", "a decimal"),
    (chat(max_completion_tokens=True), "max_completion_tokens", "invalid_type", "a boolean"),
    (chat(n=17), "n", "above_max_value", "16"),
    (chat(n=10**30), "n", "above_max_value", ""),
    (chat(stream="yes"), "stream", "invalid_type", "a boolean"),
    (chat(stop=["x"] * 17), "stop", "array_above_max_length", "at most 16"),
    (chat(stop=["x"] * 100_000), "stop", "array_above_max_length", "at most 16"),
    (chat(stop=[""]), "stop", None, "empty string"),
    (chat(stop=["x" * 300]), "stop", None, "longer than 256"),
    (chat(logit_bias={"x": 1}), "logit_bias", "invalid_value", "no token id"),
    (chat(logit_bias={"9999": 1}), "logit_bias", None, "outside the vocabulary"),
    (chat(top_logprobs=3), "top_logprobs", "invalid_value", "needs logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "above_max_value", "20"),
    (chat(stream_options={"include_usage": True}), "stream_options", "unsupported_parameter", "only allowed when"),
    (chat(functions=[]), "functions", "unsupported_parameter", "use 'tools'"),
    (chat(function_call="auto"), "function_call", "unsupported_parameter", "use 'tool_choice'"),
    (chat(modalities=["text", "audio"]), "modalities", "invalid_value", "text only"),
    (chat(audio={"voice": "x", "format": "wav"}), "audio", "unsupported_parameter", "not supported"),
    (chat(web_search_options={}), "web_search_options", "unsupported_parameter", "not supported"),
    (chat(prediction={"type": "content"}), "prediction", "unsupported_parameter", "not supported"),
    (chat(tool_choice="required"), "tool_choice", "invalid_value", "only allowed when 'tools'"),
    (chat(tools=[{"type": "web_search"}]), "tools[0].type", "invalid_value", "web_search"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema", "missing_required_parameter", ""),
    (chat(response_format={"type": "yaml"}), "response_format.type", "invalid_value", "yaml"),
    (chat(regex="a", guided_regex="b"), "guided_regex", "invalid_value", "cannot go with regex"),
    (chat(request_id="a b"), "request_id", "invalid_value", ""),
    (chat(request_id="a\r\nx: y"), "request_id", "invalid_value", ""),
    (chat(user="x" * 129), "user", "string_above_max_length", "128"),
    (chat(cache="always"), "cache", "invalid_value", "always"),
    (chat(cache_control={"only_if_cached": True, "no_cache": True}), "cache_control.only_if_cached", None, "no_cache"),
    (chat(min_tokens=9, max_tokens=5), "min_tokens", None, ""),
    (chat("x" * 2000), "messages", "context_length_exceeded", "maximum context length is 1024 tokens"),
]


async def test_chats_that_are_wrong(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    for body, param, code, part in CHATS:
        wire.post(CHAT, body)
        reply = await wire.reply()
        shown = f"{json.dumps(body)[:200]}: {reply.body!r}"
        assert reply.status == 400, shown
        error = reply.error
        assert set(error) == {"message", "type", "param", "code"}, shown
        assert error["type"] == "invalid_request_error", shown
        assert (error["param"], error["code"]) == (param, code), shown
        assert part in error["message"], shown
        assert len(error["message"]) < 400, shown
    # The connection is as good as new.
    wire.post(CHAT, chat())
    assert (await wire.reply()).status == 200
    wire.close()
    await world.until(world.idle)


BODIES: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"{", "not valid JSON"),
    (b'{"model": "m", }', "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b"{\xff}", "not valid UTF-8"),
    (b'{"a": NaN}', "NaN is no number"),
    (b'{"a": -Infinity}', "is no number"),
    (b'{"a": 1, "a": 2}', "'a' twice"),
    (b'{"a": "\\ud800"}', "surrogate"),
    (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
    (b"[" * 100_000, "nested too deeply"),
    (json.dumps({str(index): 1 for index in range(5000)}).encode(), "more than 4096 names"),
    (b'{"a": [' + b"{}," * 17_000 + b"{}]}", "more than 16384 objects"),
    (json.dumps(chat(messages=OK * 1025)).encode(), "at most 1024"),
    (json.dumps(chat(messages=[1] * 1000)).encode(), "'messages[0]': expected an object"),
    (json.dumps(chat(tools=[{"type": "function", "function": {"name": "f", "zz": 1}}])).encode(), "function.zz"),
    (json.dumps(chat(guided_json={"enum": list(range(70_000))})).encode(), "too large"),
    (b'{"a":' * 50_000, "nested too deeply"),
    (json.dumps(chat(temperature=1)).encode().replace(b'"temperature": 1', b'"temperature": 1e999'), "finite"),
]


async def test_bodies_that_are_no_json(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    wire = await Wire.to(url)
    for body, part in BODIES:
        wire.post(CHAT, body)
        reply = await wire.reply()
        assert reply.status == 400, (body[:80], reply.body)
        assert part in reply.error["message"], (body[:80], reply.error)
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"properties": {"x": deep}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    wire.post(CHAT, chat(response_format=schema))
    reply = await wire.reply()
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    wire.close()


async def test_other_faults_have_their_status(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    for kwargs, status, code in (
        ({"headers": {"content-type": "text/plain"}}, 415, "unsupported_content_type"),
        ({"headers": {}}, 415, "unsupported_content_type"),
        ({"headers": {"content-type": "application/json", "content-encoding": "gzip"}}, 415, "unsupported_encoding"),
    ):
        reply = await post(url, CHAT, content=b"{}", **kwargs)
        assert (reply.status, reply.error["code"]) == (status, code), reply.body
    reply = await get(url, CHAT)
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_supported", "POST")
    reply = await post(url, "/v1/models", {})
    assert (reply.status, set(reply.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    reply = await get(url, "/v1/<script>")
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")
    assert reply.headers["content-type"] == "application/json"
    reply = await post(url, CHAT, chat(model="nope"))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    reply = await post(url, CHAT, chat("x" * ((4 << 20) + 1)))
    assert (reply.status, reply.error["code"]) == (413, "too_large")
    assert reply.headers["x-should-retry"] == "false"
    for body, param in (
        ({"model": MODEL, "prompt": "x", "suffix": "y"}, "suffix"),
        ({"model": MODEL, "prompt": []}, "prompt"),
        ({"model": MODEL, "prompt": [[]]}, "prompt"),
        ({"model": MODEL, "prompt": [1, "x"]}, "prompt[1]"),
        ({"model": MODEL, "prompt": ["x"] * 129}, "prompt"),
        ({"model": MODEL, "prompt": {"a": 1}}, "prompt"),
        ({"model": MODEL, "prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"model": MODEL, "prompt": "x", "n": 2, "best_of": 1}, "best_of"),
    ):
        reply = await post(url, COMPLETIONS, body)
        assert (reply.status, reply.error["param"]) == (400, param), (body, reply.body)
    for body in (
        {"model": "m", "input": [[1, 2]]},
        {"model": "m", "input": "x", "dimensions": 3},
        {"model": "m", "input": 3},
    ):
        assert (await post(url, "/v1/embeddings", body)).status == 400


async def test_errors_before_the_first_token_have_their_status_also_in_a_stream(world: World) -> None:
    worker = await world.worker()
    url = await start_http(world, max_waiting_requests=0)
    worker.fill()
    for stream in (False, True):
        reply = await post(url, CHAT, chat(stream=stream))
        assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "server_error", "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert int(reply.headers["retry-after-ms"]) >= 1
    worker.empty()

    async def refuse(request: Any) -> None:
        worker.end(request, Unavailable("gone"))

    worker.on_submit = refuse
    for stream in (False, True):
        reply = await post(url, CHAT, chat(stream=stream))
        # Accepted by a worker, but nothing of an answer was sent.
        assert reply.status == 503, reply.body
        assert reply.error["type"] == "server_error"


async def test_an_error_in_the_middle_ends_the_stream_without_done(world: World) -> None:
    worker = await world.worker()
    url = await start_http(world, max_attempts=1)

    async def half(request: Any) -> None:
        worker.tokens(request, list(b"half"))

    worker.on_submit = half
    body = b""
    async with client(url) as http, http.stream("POST", CHAT, json=chat(stream=True)) as reply:
        assert reply.status_code == 200
        async for piece in reply.aiter_bytes():
            body += piece
            # Only once the client has it: what is lost before Submit has answered is an error from the start.
            if b"half" in piece:
                worker.break_stream()
    assert b"half" in body
    assert b"[DONE]" not in body
    last = body.removesuffix(b"\n\n").rsplit(b"\n\n", 1)[-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}

    async def breaks(request: Any) -> None:
        await half(request)
        worker.break_stream()

    # In one body the same is an error and nothing else.
    worker.on_submit = breaks
    reply = await post(url, CHAT, chat())
    assert reply.status == 503
    await world.until(world.idle)


async def test_keys(world: World, tmp_path: Path) -> None:
    key = new_key()
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"sha256": hash_key(key), "tenant": "acme"}]}))
    token = tmp_path / "token"
    token.write_text("0" * 40)
    await world.worker(text="ok")
    world_settings: dict[str, Any] = {"credentials_file": file, "mesh_token_file": token}
    url = await start_http(world, ready=False, **world_settings)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eA=="}, {"authorization": key}):
        for reply in (
            await post(url, CHAT, chat(), headers=headers),
            await get(url, "/v1/models", headers=headers),
            await post(url, "/v1/abort", {"request_id": "x"}, headers=headers),
            await post(url, "/tokenize", {"model": MODEL, "prompt": "x"}, headers=headers),
        ):
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), reply.body
            assert reply.headers["www-authenticate"] == "Bearer"
            assert key.encode() not in reply.body
    assert (await get(url, "/v1/models", headers={"authorization": f"Bearer {key}"})).status == 200
    assert (await get(url, "/livez")).status == 200


async def test_the_document_tells_every_body(world: World) -> None:
    await world.worker()
    url = await start_http(world)
    document = (await get(url, "/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    for path in (CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/v1/abort"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][body.rsplit("/", 1)[-1]]
        assert schema["additionalProperties"] is False
        reply = await post(url, path, {})
        assert reply.status == 400
        assert reply.error["param"] in schema["required"]
