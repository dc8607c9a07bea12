"""The gateway's check of grammars: its limits, its memory, and who gets a request with one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gateway_fakes import WAIT_S
from gateway_world import World, kinds, rest
from kvmesh.errors import InvalidArgument
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary, version
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1.inference_pb2 import Grammar
from kvmesh.rpc.status import from_rpc_error
from services.gateway.grammars import Grammars
from services.gateway.tokenizers import ModelTokenizer

TOKENIZER = ModelTokenizer(scripted_tokenizer())


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(timeout_s=WAIT_S)
    yield made
    made.close()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts, as they are compiled."""
    texts: list[str] = []
    compile_ = Vocabulary.compile

    def noted(self: Vocabulary, source: GrammarSource) -> Any:
        texts.append(source.text)
        return compile_(self, source)

    monkeypatch.setattr(Vocabulary, "compile", noted)
    return texts


async def test_verdicts_are_remembered(grammars: Grammars, compiled: list[str]) -> None:
    good, bad = Grammar(regex="a+"), Grammar(regex="(a")
    await asyncio.gather(*[grammars.check(good, TOKENIZER) for _ in range(8)])
    for _ in range(3):
        with pytest.raises(InvalidArgument) as raised:
            await grammars.check(bad, TOKENIZER)
        assert raised.value.details["field"] == "grammar"
        assert "unclosed group" in raised.value.message
        assert len(raised.value.message) <= 320
    assert compiled == ["a+", "(a"]
    # The kind counts: what is a regular expression may be a grammar too.
    with pytest.raises(InvalidArgument):
        await grammars.check(Grammar(lark="a+"), TOKENIZER)
    assert len(compiled) == 3


async def test_one_that_takes_too_long_stops_nobody(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = Grammar(regex="quick"), Grammar(regex="slow")
    entered, go, over = threading.Event(), threading.Event(), threading.Event()
    compile_ = Vocabulary.compile

    def hold(self: Vocabulary, source: GrammarSource) -> Any:
        if source.text == "slow":
            entered.set()
            assert go.wait(WAIT_S)
            over.set()
        return compile_(self, source)

    monkeypatch.setattr(Vocabulary, "compile", hold)
    await grammars.check(quick, TOKENIZER)
    impatient = Grammars(timeout_s=0.001)
    try:
        with pytest.raises(InvalidArgument, match="took longer than 1 ms"):
            await impatient.check(slow, TOKENIZER)
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        assert not over.is_set()
        # It is still being compiled: nobody begins with it anew, and others have a thread.
        with pytest.raises(InvalidArgument, match="took longer"):
            await impatient.check(slow, TOKENIZER)
        assert len(impatient._running) == 1
        impatient._timeout_s = WAIT_S
        await impatient.check(quick, TOKENIZER)
        waiting = asyncio.create_task(impatient.check(slow, TOKENIZER))
        go.set()
        await waiting
        assert not impatient._running
    finally:
        go.set()
        impatient.close()


async def test_too_slow_once_is_too_slow_ever_after(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()
    compile_ = Vocabulary.compile

    def burn(self: Vocabulary, source: GrammarSource) -> Any:
        entered.set()
        assert go.wait(WAIT_S)
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return compile_(self, source)

    monkeypatch.setattr(Vocabulary, "compile", burn)
    grammars._timeout_s = 0.01
    first = asyncio.create_task(grammars.check(Grammar(regex="a+"), TOKENIZER))
    assert await asyncio.to_thread(entered.wait, WAIT_S)
    (running,) = grammars._running.values()
    go.set()
    with pytest.raises(InvalidArgument, match="took longer than 10 ms"):
        await first
    await asyncio.wait_for(running.over.wait(), WAIT_S)
    with pytest.raises(InvalidArgument, match="took longer than 10 ms"):
        await grammars.check(Grammar(regex="a+"), TOKENIZER)


def twice(number: int) -> dict[str, Any]:
    return {"allOf": 2 * [{"$ref": f"#/$defs/d{number}"}]}


LAST: dict[str, Any] = {"d60": {}}
BOMBS = {
    "repeats": Grammar(regex="((a{1,1000}){1,1000}){1,1000}"),
    "options": Grammar(regex="a?" * 4000),
    "nested": Grammar(regex="(" * 4000 + "a" + ")" * 4000),
    "classes": Grammar(regex="[^a]{0,60000}" * 20),
    "large regex": Grammar(regex="a" * 20_000),
    "chain of rules": Grammar(lark="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(7000)) + 'r7000: "a"'),
    "parentheses": Grammar(lark="start: " + "(" * 7000 + '"a"' + ")" * 7000),
    "ambiguous": Grammar(lark="start: " + '"a"? ' * 2500),
    "alternatives": Grammar(lark="start: " + " | ".join(f'"{i}"' for i in range(1500))),
    "left recursion": Grammar(lark='start: a\na: a a | "x" | '),
    "deep schema": Grammar(json_schema='{"items":' * 5000 + "{}" + "}" * 5000),
    "exponential schema": Grammar(
        json_schema=json.dumps(
            {"$ref": "#/$defs/d0", "$defs": {"d60": {}} | {f"d{i}": twice(i + 1) for i in range(60)}}
        )
    ),
    "pattern": Grammar(json_schema='{"type":"string","pattern":"' + "a?" * 5000 + '"}'),
    "pattern in lark": Grammar(lark='start: %json {"type":"string","pattern":"' + "a?" * 5000 + '"}'),
    "common multiple": Grammar(json_schema='{"allOf":[{"type":"integer","multipleOf":9973},{"multipleOf":9967}]}'),
    "spacing": Grammar(lark='start: %json {"x-guidance":{"whitespace_pattern":"' + "[^a]{0,60000}" * 900 + '"}}'),
    "half a pair": Grammar(json_schema='{"type":"string","pattern":"\\ud800"}'),
    "endless reference": Grammar(json_schema='{"$ref":"#"}'),
    "foreign reference": Grammar(json_schema='{"$ref":"http://example.com/schema.json"}'),
    "not": Grammar(json_schema='{"not":{"type":"string"}}'),
    "no json": Grammar(json_schema="{"),
    "no schema": Grammar(json_schema="7"),
    "zero byte": Grammar(regex="a\0b"),
    "nothing": Grammar(),
    "look-around": Grammar(regex="(?=a)b"),
    "unknown rule": Grammar(lark="start: x"),
}
# What compiles all the same, for its text is small.
HARMLESS = {"repeats", "options", "left recursion", "exponential schema", "classes"}


@pytest.mark.parametrize("name", BOMBS)
async def test_bombs_end_by_themselves(grammars: Grammars, name: str) -> None:
    try:
        await grammars.check(BOMBS[name], TOKENIZER)
    except InvalidArgument as error:
        assert error.message.startswith("grammar: ")  # noqa: PT017
        assert error.details["field"] == "grammar"  # noqa: PT017
        assert len(error.message) <= 320  # noqa: PT017
        assert "\n" not in error.message  # noqa: PT017
    else:
        assert name in HARMLESS
    assert not grammars._running
    await grammars.check(Grammar(regex="ok"), TOKENIZER)


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(call)
    return from_rpc_error(raised.value)


async def test_a_request_takes_its_grammar_to_the_worker(world: World) -> None:
    worker = await world.worker()
    await world.router()
    await world.start()
    events = await world.ask(sampling={"grammar": Grammar(regex="hello")})
    assert kinds(events)[-1] == "finished"
    assert worker.submits.items[0].sampling.grammar.regex == "hello"
    error = await refused(world.chat(sampling={"grammar": Grammar(regex="(")}))
    assert error.reason == "INVALID_ARGUMENT"
    assert error.details["field"] == "grammar"
    assert len(worker.submits.items) == 1


@pytest.mark.parametrize("routed", [True, False])
async def test_only_workers_with_the_same_grammars_get_one(world: World, routed: bool) -> None:
    old, none = await world.worker("old"), await world.worker("none")
    old.info.grammars, none.info.grammars = "llguidance-0.1.0", ""
    if routed:
        await world.router()
    await world.start(static=not routed)
    error = await refused(world.chat(sampling={"grammar": Grammar(regex="hello")}))
    assert error.reason == "FAILED_PRECONDITION"
    assert version() in error.message
    assert not old.submits.items
    assert not none.submits.items
    # Everything else is theirs as ever.
    assert kinds(await world.ask())[-1] == "finished"


async def test_the_worker_with_grammars_is_found_among_others(world: World) -> None:
    plain, able = await world.worker("plain"), await world.worker("able")
    plain.info.grammars = ""
    await world.start(static=True)
    await asyncio.gather(*[world.ask(sampling={"grammar": Grammar(regex="hello"), "seed": i}) for i in range(6)])
    assert len(able.submits.items) == 6
    assert not plain.submits.items


async def test_a_router_that_prefers_another_version_is_overruled(world: World) -> None:
    """During an upgrade: the router only knows that a worker serves grammars."""
    old = [await world.worker(f"old{i}") for i in range(6)]
    for worker in old:
        worker.info.grammars = "llguidance-0.1.0"
    able = await world.worker("able")
    await world.router()
    await world.start()
    for seed in range(6):
        events = await world.ask(sampling={"grammar": Grammar(regex="hello"), "seed": seed})
        assert kinds(events)[-1] == "finished"
    assert len(able.submits.items) == 6
    assert not any(worker.submits.items for worker in old)
