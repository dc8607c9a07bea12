from __future__ import annotations

from gateway_world import World
from http_world import CHAT, chat, events, get, post, start_http, text_of


async def test_a_chat_is_answered_in_one_body(world: World) -> None:
    await world.worker(text="héllo 🎉")
    url = await start_http(world)
    reply = await post(url, CHAT, chat(seed=1), headers={"x-request-id": "mine"})
    assert reply.status == 200, reply.body
    body = reply.json()
    assert reply.headers["x-request-id"] == "mine"
    assert reply.headers["x-kvmesh-cache"] == "bypass"
    assert body["id"] == "chatcmpl-mine"
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "héllo 🎉", "refusal": None, "annotations": []},
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = body["usage"]
    assert usage["completion_tokens"] == len("héllo 🎉".encode()) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    await world.until(world.idle)


async def test_a_chat_streams(world: World) -> None:
    await world.worker(text="héllo 🎉")
    url = await start_http(world)
    reply = await post(url, CHAT, chat(stream=True, stream_options={"include_usage": True}))
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    chunks = events(reply.body)
    assert chunks.pop() == "[DONE]"
    assert text_of(chunks) == "héllo 🎉"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len("héllo 🎉".encode()) + 1
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert f"chatcmpl-{reply.headers['x-request-id']}" == chunks[0]["id"]


async def test_models_and_states(world: World) -> None:
    await world.worker()
    url = await start_http(world)
    listed = (await get(url, "/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    one = await get(url, "/v1/models/scripted")
    assert one.json() == listed["data"][0]
    none = await get(url, "/v1/models/no/such")
    assert (none.status, none.error["code"]) == (404, "model_not_found")
    for path in ("/health", "/livez", "/readyz"):
        assert (await get(url, path)).status == 200
