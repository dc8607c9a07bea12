"""Calls and reasoning over the wire: fresh, from the cache, healed, under an alias; nothing shared that differs."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from grpc.aio import AioRpcError

from gateway_fakes import EOS, MODEL
from gateway_world import World, rest, text_of
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.request import Request
from services.gateway.speech.formats import Hermes, Mistral
from services.gateway.speech.reader import Reading
from services.gateway.speech.shape import shape
from services.gateway.tokenizers import INLINE_CHARS, _chars
from services.router.cache.fingerprint import cache_key

TOOLS = [pb.Tool(name="weather", parameters='{"properties": {"city": {"type": "string"}}}'), pb.Tool(name="now")]
SAID = (
    'Let me look 🎉.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLS = [("weather", '{"city": "Zürich"}'), ("now", "{}")]


def calls_of(events: list[pb.GenerateEvent]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call of choice 0."""
    calls: list[tuple[str, str, str]] = []
    for event in events:
        for part in event.delta.tool_calls:
            if part.index == len(calls):
                calls.append((part.id, part.name, part.arguments))
            else:
                call_id, name, arguments = calls[part.index]
                calls[part.index] = (call_id, name, arguments + part.arguments)
    return calls


def told(events: list[pb.GenerateEvent]) -> list[tuple[str, str]]:
    return [(name, arguments) for _, name, arguments in calls_of(events)]


def finish_of(events: list[pb.GenerateEvent]) -> int:
    (reason,) = [event.delta.finish_reason for event in events if event.delta.finish_reason]
    return reason


async def test_calls_of_a_stream(world: World) -> None:
    await world.worker(text=SAID)
    await world.start(static=True)
    events = await world.ask(tools=TOOLS)
    assert told(events) == CALLS
    assert text_of(events) == "Let me look 🎉."
    assert finish_of(events) == pb.FINISH_REASON_TOOL_CALLS
    ids = [token for event in events for token in event.delta.token_ids]
    assert bytes(ids[:-1]).decode() == SAID
    assert events[-1].finished.usage.completion_tokens == len(ids)
    # Without tools, or where they may not be called, the same is text.
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    for plain in (await world.ask(), await world.ask(tools=TOOLS, tool_choice=none)):
        assert (text_of(plain), told(plain), finish_of(plain)) == (SAID, [], pb.FINISH_REASON_STOP)


async def test_what_must_be_called_travels_as_a_grammar(world: World) -> None:
    worker = await world.worker(text=SAID)
    await world.start(static=True)
    await world.ask(tools=TOOLS, tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED))
    await world.ask(tools=TOOLS)
    forced, free = await worker.submits.wait(2)
    assert "weather" in forced.sampling.grammar.lark
    assert not free.sampling.HasField("grammar")


async def test_a_stop_string_inside_a_call_ends_it_there(world: World) -> None:
    await world.worker(text=SAID)
    await world.start(static=True)
    events = await world.ask(tools=TOOLS, sampling={"stop": ["rich"]})
    assert told(events) == [("weather", '{"city": "Zü')]
    # No whole call: nobody must take it for one.
    assert finish_of(events) == pb.FINISH_REASON_STOP


async def test_an_answer_from_the_cache_is_read_the_same(world: World) -> None:
    await world.worker(text=SAID)
    router = await world.router()
    await world.start()
    fresh = await world.ask(tools=TOOLS)
    answer = router_pb2.CachedAnswer(
        revision="rev-1",
        choices=[
            router_pb2.CachedChoice(text=SAID, token_ids=[*SAID.encode(), EOS], finish_reason=pb.FINISH_REASON_STOP)
        ],
    )

    async def remembered(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        return router_pb2.RouteResponse(answer=answer, model=MODEL, cache="exact")

    router.decide = remembered
    hit = await world.ask(tools=TOOLS)
    assert hit[-1].finished.served.cache == "exact"
    assert calls_of(hit) == calls_of(fresh) != []
    assert text_of(hit) == text_of(fresh)
    assert finish_of(hit) == pb.FINISH_REASON_TOOL_CALLS


async def test_a_call_goes_on_where_a_worker_was_lost_in_its_middle(world: World) -> None:
    first, second = await world.worker("first"), await world.worker("second")
    ids = [*SAID.encode(), EOS]
    half = SAID.encode().index(b"rich")

    lost: list[asyncio.Task[None]] = []

    async def break_after(worker: Any) -> None:
        """Once the gateway has counted what was sent: what is lost before Submit has answered was never there."""
        (request,) = world.gateway.registry._running.values()
        await world.until(lambda: request._running.usage.completion_tokens >= half)
        worker.break_stream()

    def lose(worker: Any) -> Any:
        async def submitted(request: engine_pb2.SubmitRequest) -> None:
            if len(request.token_ids) == request.prompt_len:
                worker.tokens(request, ids[:half])
                lost.append(asyncio.create_task(break_after(worker)))
            else:
                assert list(request.token_ids[request.prompt_len :]) == ids[:half]
                worker.tokens(request, ids[half:], half, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=EOS)
                worker.end(request, completion_tokens=len(ids))

        return submitted

    first.on_submit, second.on_submit = lose(first), lose(second)
    await world.router()
    await world.start()
    events = await world.ask(tools=TOOLS)
    assert events[-1].HasField("finished")
    assert told(events) == CALLS
    assert (text_of(events), finish_of(events)) == ("Let me look 🎉.", pb.FINISH_REASON_TOOL_CALLS)


async def test_whatever_shapes_an_answer_is_part_of_its_key(world: World) -> None:
    """Requests that differ in anything that shapes prompt or reading share no answer, near or exact."""
    await world.worker(text="x")
    router = await world.router()
    await world.start()
    choice = pb.ToolChoice
    requests: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS[:1]},
        {"tools": [pb.Tool(name="weather", parameters=TOOLS[0].parameters, strict=True), TOOLS[1]]},
        {"tools": [pb.Tool(name="weather", parameters=TOOLS[0].parameters, description="x"), TOOLS[1]]},
        {"tools": TOOLS, "tool_choice": choice(mode=choice.MODE_NONE)},
        {"tools": TOOLS, "tool_choice": choice(mode=choice.MODE_REQUIRED)},
        {"tools": TOOLS, "tool_choice": choice(mode=choice.MODE_NAMED, name="now")},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"template_variables": '{"enable_thinking": true}'},
        {"template_variables": '{"enable_thinking": false}'},
        {"messages": [pb.ChatMessage(role="user", content="hi", name="ann")]},
        {"messages": [pb.ChatMessage(role="assistant", content="hi")]},
        {"messages": [pb.ChatMessage(role="assistant", content="hi")], "continue_final_message": True},
        {"messages": [pb.ChatMessage(role="assistant", content="hi", reasoning="hm")]},
    ]
    for fields in requests:
        for _ in range(2):
            await world.ask(**fields)
    routes = await router.routes.wait(2 * len(requests))
    for alias in (False, True):
        keys = [cache_key(route, ["tenant"], alias=alias) for route in routes]
        # The same request has the same key, also where its grammar is the gateway's own.
        assert [key.exact for key in keys[::2]] == [key.exact for key in keys[1::2]]
        assert len({key.exact for key in keys}) == len(requests)
        near = [key.partition for key in keys[::2] if key.partition]
        assert len(near) == len(set(near)) == 12


async def test_an_answer_under_an_alias_is_read_with_the_marks_of_the_model_that_gave_it() -> None:
    """The cache, or a shared generation, may have another model behind the name than this request was made for."""
    sent: list[pb.GenerateEvent] = []

    async def send(event: pb.GenerateEvent) -> None:
        sent.append(event)

    def reading(form: Any) -> Reading:
        return Reading(None, False, form, frozenset({"f"}), True, b"")

    async def remake(model: str) -> Any:
        return SimpleNamespace(reader=reading({"a": Hermes, "b": Mistral}[model]))

    for model, text in [
        ("a", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("b", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
    ]:
        request = Request(
            SimpleNamespace(),  # type: ignore[arg-type]
            placer=SimpleNamespace(),  # type: ignore[arg-type]
            routers=SimpleNamespace(),  # type: ignore[arg-type]
            heals=SimpleNamespace(),  # type: ignore[arg-type]
            send=send,
            send_metadata=lambda: asyncio.sleep(0),
        )
        request._job = SimpleNamespace(  # type: ignore[assignment]
            served="a", messages=[pb.ChatMessage()], remake=remake, reader=reading(Hermes)
        )
        await request.accepted(pb.Accepted(model=model))
        await request.delta(pb.Delta(text=text, finish_reason=pb.FINISH_REASON_STOP))
        assert [part.name for part in sent[-1].delta.tool_calls] == ["f"]
        assert sent[-1].delta.text == ""


async def test_reasoning_of_a_stream(world: World) -> None:
    """The gateway's own description of tools is no reasoning: a model without marks has none."""
    await world.worker(text="<think>a</think>b")
    await world.start(static=True)
    events = await world.ask(tools=TOOLS)
    assert text_of(events) == "<think>a</think>b"
    assert not any(event.delta.reasoning for event in events)


async def test_bad_tools_are_refused_before_anything_is_placed(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    from gateway_world import end_of

    error = await end_of(world.chat(tools=[pb.Tool(name="a b")]))
    assert "tools[0].name" in (error.details() or "")
    error = await end_of(world.chat(template_variables=json.dumps({"messages": []})))
    assert "template_variables" in (error.details() or "")
    assert not worker.submits.items
    assert await rest(world.chat())


async def test_large_arguments_of_earlier_calls_are_read_off_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of JSON from one client must not hold up the tokens of all others."""
    await world.worker()
    await world.start(static=True)
    here: list[bool] = []

    def seen(*args: Any) -> Any:
        here.append(threading.current_thread() is threading.main_thread())
        return shape(*args)

    monkeypatch.setattr("services.gateway.prepare.shape", seen)
    for size in (1, 40_000):
        call = pb.ToolCall(id="c", name="weather", arguments=json.dumps({"city": "x" * size}))
        messages = [pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant", tool_calls=[call])]
        with suppress(AioRpcError):
            await world.ask(messages=messages)
    assert here == [True, False]


def test_how_much_text_there_is_is_counted_up_to_what_matters() -> None:
    assert _chars([{"content": "abc", "tool_calls": [{"id": 7}]}]) < 100
    assert _chars([{"content": "x" * 5000}]) > INLINE_CHARS
    assert _chars({"a": [[]] * 10**6}) > INLINE_CHARS
    assert _chars([{"x": [{"y": "z" * 2000}]}]) > INLINE_CHARS
