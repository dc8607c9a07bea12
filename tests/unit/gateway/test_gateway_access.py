"""One line a request: what it tells, and that texts are in it only where they are asked for, and bounded."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gateway_fakes import MODEL
from gateway_world import World, end_of, next_event
from kvmesh.errors import Internal
from kvmesh.proto.v1 import engine_pb2
from kvmesh.telemetry import setup_logs

CANARY = "CANARYcanary8372"


@pytest.fixture
def logged() -> Iterator[Any]:
    """Call it for all lines so far, at level debug."""
    stream = io.StringIO()
    handler = setup_logs("gateway", fmt="json", level="debug", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.getLogger().removeHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)


def access(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["logger"] == "kvmesh.access"]


async def started(world: World, **settings: Any) -> Any:
    worker = await world.worker()
    await world.router()
    await world.start(max_attempts=1, **settings)
    return worker


async def test_a_request_is_one_line_without_its_words(world: World, logged: Any) -> None:
    await started(world)
    await world.ask(CANARY, request_id="mine")
    await world.until(lambda: access(logged()))
    (line,) = access(logged())
    assert line["request_id"] == "mine"
    assert (line["outcome"], line["operation"], line["model"], line["tenant"]) == ("ok", "chat", MODEL, "local")
    assert line["completion_tokens"] == 6
    assert line["prompt_tokens"] > 0
    assert line["worker"] == "decode-0"
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    assert line["inner_id"] != "mine"
    assert not [one for one in logged() if CANARY in json.dumps(one) or "hello" in json.dumps(one)]


async def test_prompts_are_there_where_they_are_asked_for_and_bounded(world: World, logged: Any) -> None:
    await started(world, log_prompts=True, log_prompts_chars=24)
    await world.ask(CANARY + "x" * 500)
    await world.until(lambda: access(logged()))
    (line,) = access(logged())
    assert line["prompt"] == f"user: {CANARY}xx…"
    assert line["output"] == "hello"
    assert len([one for one in logged() if CANARY in json.dumps(one)]) == 1


async def test_every_end_has_its_line(world: World, logged: Any) -> None:
    worker = await started(world)

    async def fails(request: engine_pb2.SubmitRequest) -> None:
        worker.end(request, Internal("it broke"))

    worker.on_submit = fails
    await world.ask(request_id="breaks")
    assert (await end_of(world.chat(model="nobody's", request_id="wrong"))).code() is grpc.StatusCode.NOT_FOUND
    worker.on_submit, worker.text = None, None
    call = world.chat(request_id="left")
    request = (await worker.submits.wait(2))[1]
    worker.tokens(request, [65])
    await next_event(call)
    call.cancel()
    await world.until(lambda: len(access(logged())) == 3)
    told = {line["request_id"]: (line["outcome"], line.get("reason", "")) for line in access(logged())}
    assert told == {
        "breaks": ("failed", "INTERNAL"),
        "wrong": ("refused", "NOT_FOUND"),
        "left": ("cancelled", "CANCELLED"),
    }


async def test_a_refused_request_makes_no_long_line(world: World, logged: Any) -> None:
    await started(world)
    ended = await end_of(world.chat(model="m" * 100_000, request_id="r" * 100_000))
    assert ended.code() is grpc.StatusCode.INVALID_ARGUMENT
    await world.until(lambda: access(logged()))
    (line,) = access(logged())
    assert line["model"].startswith("mmm")
    assert line["reason"] == "INVALID_ARGUMENT"
    assert len(json.dumps(line)) < 1500


async def test_it_can_be_off(world: World, logged: Any) -> None:
    await started(world, access_log=False)
    await world.ask()
    await world.until(world.idle)
    assert access(logged()) == []
