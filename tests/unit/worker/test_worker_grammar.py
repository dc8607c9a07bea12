"""Grammars on a worker: outputs match, heal and abort as any other does. Real gRPC, scripted runner."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import grpc
import jsonschema
import pytest

from kvmesh.engine.events import EngineRequest
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import EOS, scripted_output
from kvmesh.grammar.match import Match
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import version
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import inference_pb2
from kvmesh.proto.v1.inference_pb2 import Grammar
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.status import from_rpc_error
from worker_harness import WAIT_S, Answer, Gateway, Running, prompt, running, until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a", "b", "long one"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SCHEMA_GRAMMAR = Grammar(json_schema=json.dumps(SCHEMA))
STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH


def sampling(grammar: Grammar, max_tokens: int = 200, seed: int = 1, **values: Any) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, grammar=grammar, **values)


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


async def alone(worker: Running, tokens: list[int], grammar: Grammar, choice: int = 0, **values: Any) -> list[int]:
    """What the scripted model says to it without an engine around."""
    compiler = worker.worker.ctx.grammars  # type: ignore[union-attr]
    assert compiler is not None
    params = SamplingParams(**({"max_tokens": 200, "seed": 1} | values))
    match = await compiler.begin(GrammarSource.of(grammar), (), params.stop_token_ids, params.ignore_eos)
    return scripted_output(tokens, params, choice, grammar=match)[0]


async def refusal(gateway: Gateway, request: pb.SubmitRequest) -> Any:
    """The error of a request: at once, for what the text alone tells, or as its terminal."""
    try:
        answer = await gateway.submit(request)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return (await answer.wait()).error


async def test_outputs_match_and_do_not_depend_on_who_runs_beside_them() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        assert worker.worker._info().grammars == version() != ""
        lark = 'start: ("ab" | "cd")+ "!"'
        grammars = [SCHEMA_GRAMMAR, Grammar(json_object=True), Grammar(regex=r"[a-c]{3}-\d+x?"), Grammar(lark=lark)]
        asks = [(prompt(9 + 11 * i, i), grammars[i % 5] if i % 5 < 4 else None, i) for i in range(20)]
        answers = await asyncio.gather(
            *[
                gateway.ask(
                    p, sampling=sampling(g, seed=s) if g else inference_pb2.SamplingParams(max_tokens=60, seed=s)
                )
                for p, g, s in asks
            ]
        )
        for (tokens, grammar, seed), answer in zip(asks, answers, strict=True):
            output = answer.tokens[0]
            if grammar is None:
                assert output == scripted_output(tokens, SamplingParams(max_tokens=60, seed=seed))[0]
                continue
            assert output == await alone(worker, tokens, grammar, seed=seed)
            if answer.reasons[0] != STOP:
                continue
            said = text(output)
            if grammar.HasField("json_schema"):
                jsonschema.validate(json.loads(said), SCHEMA)
            elif grammar.HasField("json_object"):
                assert isinstance(json.loads(said), dict)
            elif grammar.HasField("regex"):
                assert re.fullmatch(grammar.regex, said), said
            else:
                assert re.fullmatch("(ab|cd)+!", said), said
        assert sum(answer.reasons[0] == STOP for answer in answers) >= 12
        # Once for each grammar, however many asked.
        assert worker.worker.ctx.grammars.compiled == 4  # type: ignore[union-attr]
        await worker.pages_are_back()


async def test_each_choice_has_a_match_of_its_own() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        tokens = prompt(40)
        answer = await gateway.ask(tokens, sampling=sampling(SCHEMA_GRAMMAR, n=2, best_of=4))
        assert answer.tokens == {c: await alone(worker, tokens, SCHEMA_GRAMMAR, c) for c in range(4)}
        assert len({tuple(output) for output in answer.tokens.values()}) > 1
        for output in answer.tokens.values():
            jsonschema.validate(json.loads(text(output)), SCHEMA)


async def test_a_healed_request_goes_on_in_its_grammar() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        tokens = prompt(40)
        whole = await alone(worker, tokens, SCHEMA_GRAMMAR)
        for done in (1, 7, len(whole) - 1, len(whole)):
            request = gateway.request(
                tokens + whole[:done], prompt_len=40, sampling=sampling(SCHEMA_GRAMMAR), attempt=done
            )
            answer = gateway.answers[request.request_id, done] = Answer(tokens={0: whole[:done]})
            await (await gateway.submit(request)).wait()
            assert answer.tokens == {0: whole}
            assert answer.reasons == {0: STOP}
            assert answer.gaps == 0


async def test_a_preempted_request_goes_on_in_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(num_pages=16, prefix_cache=False, max_batch=8, token_budget=64) as worker:
        async with Gateway(worker) as gateway:
            grammar = Grammar(regex="(ab|cd|ef){40}")
            prompts = [prompt(20, i) for i in range(6)]
            # The core begins when it has them all.
            here, go = threading.Semaphore(0), threading.Event()
            worker.core._post(lambda: go.wait(WAIT_S))
            submit = worker.core.submit
            monkeypatch.setattr(worker.core, "submit", lambda request: (submit(request), here.release())[0])
            asked = [await gateway.submit(gateway.request(p, sampling=sampling(grammar, 100))) for p in prompts]
            for _ in prompts:
                assert await asyncio.to_thread(here.acquire, timeout=WAIT_S)
            go.set()
            answers = [await answer.wait() for answer in asked]
            assert worker.core.counters.preemptions > 0
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer.tokens == {0: await alone(worker, tokens, grammar, max_tokens=100)}
                assert answer.reasons == {0: STOP}


async def test_output_that_does_not_fit_ends_with_an_error() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        request = gateway.request([1, 2, 3, 97, 120], prompt_len=3, sampling=sampling(Grammar(regex="abc")), attempt=1)
        answer = await (await gateway.submit(request)).wait()
        assert answer.error is not None
        assert answer.error.reason == "INVALID_ARGUMENT"
        assert not answer.error.retryable
        assert answer.error.message == "grammar: the output so far does not match it"
        assert len(answer.ends) == 1
        assert len(worker.worker.requests) == 0
        await worker.pages_are_back()


@pytest.mark.parametrize(
    ("values", "output", "reason"),
    [
        # The grammar wins over min_tokens and ignore_eos; what can follow is drawn, where the end is banned.
        ({"min_tokens": 50}, "abc", STOP),
        ({"ignore_eos": True}, "abc", STOP),
        ({"min_tokens": 50, "stop_token_ids": [ord("z")]}, "abc", STOP),
        # No bias is an allowance.
        ({"logit_bias": {ord("z"): 100.0}}, "abc", STOP),
        # A stop token inside the grammar is one of its tokens, and stops as always.
        ({"stop_token_ids": [ord("b")]}, "ab", STOP),
        ({"max_tokens": 2}, "ab", LENGTH),
    ],
)
async def test_the_end_of_a_match(values: dict[str, Any], output: str, reason: int) -> None:
    async with running() as worker, Gateway(worker) as gateway:
        answer = await gateway.ask(prompt(20), sampling=sampling(Grammar(regex="abc?"), **values))
        if not values.get("min_tokens") and not values.get("ignore_eos") and "stop_token_ids" not in values:
            output = "ab"  # the scripted model ends where it may
        assert text(answer.tokens[0]) == output
        assert answer.reasons == {0: reason}
        assert len(answer.ends) == 1


async def test_an_end_is_drawn_only_where_the_match_is_whole() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        answer = await gateway.ask(prompt(20), sampling=sampling(Grammar(regex="a{5}b*")))
        assert answer.tokens[0] == [97] * 5 + [EOS]
        answer = await gateway.ask(prompt(20), sampling=sampling(Grammar(regex="a{5}b*"), 9, ignore_eos=True))
        assert answer.tokens[0] == [97] * 5 + [98] * 4
        assert answer.reasons == {0: LENGTH}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(regex="(a"), Grammar(json_schema="{"), Grammar(json_schema='{"not": {}}'), Grammar(lark="start: x"),
        Grammar(regex="a" * 9000), Grammar(json_schema='{"$ref":"#"}'), Grammar(),
    ],
)  # fmt: skip
async def test_one_that_does_not_compile_is_the_requests_own_error(grammar: Grammar) -> None:
    async with running() as worker, Gateway(worker) as gateway:
        request = gateway.request(prompt(20), sampling=sampling(grammar))
        error = await refusal(gateway, request)
        assert error.reason == "INVALID_ARGUMENT"
        assert error.message.startswith("grammar: ")
        assert len(worker.worker.requests) == 0
        assert (await gateway.ask(prompt(20), sampling=sampling(Grammar(regex="ok")))).reasons == {0: STOP}
        await worker.pages_are_back()


async def test_abort_while_the_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as worker, Gateway(worker) as gateway:
        compiler = worker.worker.ctx.grammars  # type: ignore[union-attr]
        assert compiler is not None
        entered, go = threading.Event(), threading.Event()
        compile_ = compiler.vocabulary.compile

        def slow(source: GrammarSource) -> Any:
            entered.set()
            assert go.wait(WAIT_S)
            return compile_(source)

        monkeypatch.setattr(compiler.vocabulary, "compile", slow)
        submitted: list[EngineRequest] = []
        submit = worker.core.submit
        monkeypatch.setattr(worker.core, "submit", lambda request: (submitted.append(request), submit(request))[1])
        first = gateway.request(prompt(20), sampling=sampling(Grammar(regex="a+"), n=2))
        second = gateway.request(prompt(20), sampling=sampling(Grammar(regex="a+"), n=2))
        answer, other = await gateway.submit(first), await gateway.submit(second)
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        # Others run meanwhile.
        await gateway.ask(prompt(30), sampling=inference_pb2.SamplingParams(max_tokens=5, seed=1))
        assert await gateway.abort(first.request_id) == 1
        await answer.wait()
        assert answer.error is not None
        assert answer.error.reason == "CANCELLED"
        assert await gateway.abort(second.request_id, choices=(1,)) == 1
        go.set()
        await other.wait()
        assert set(other.reasons) == {0}
        assert [request.key.request_id for request in submitted][1:] == [second.request_id]
        await until(lambda: len(worker.worker.requests) == 0)
        assert len(answer.ends) == len(other.ends) == 1
        await worker.pages_are_back()


async def held(worker: Running, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, go: threading.Event) -> list[Answer]:
    """Two requests whose grammars are being compiled, or wait for that."""
    compiler = worker.worker.ctx.grammars  # type: ignore[union-attr]
    assert compiler is not None
    entered = threading.Event()
    compile_ = compiler.vocabulary.compile

    def slow(source: GrammarSource) -> Any:
        entered.set()
        assert go.wait(WAIT_S)
        return compile_(source)

    monkeypatch.setattr(compiler.vocabulary, "compile", slow)
    answers = [
        await gateway.submit(gateway.request(prompt(20), sampling=sampling(Grammar(regex=pattern))))
        for pattern in ("a+", "b+")
    ]
    assert await asyncio.to_thread(entered.wait, WAIT_S)
    return answers


async def test_a_worker_that_stops_ends_what_waits_for_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    async with running() as worker, Gateway(worker) as gateway:
        try:
            answers = await held(worker, gateway, monkeypatch, go)
            await worker.worker.finish_work(Deadline.after(0.05))
            for answer in answers:
                await answer.wait()
                assert answer.error is not None
                assert answer.error.reason == "UNAVAILABLE"
                assert len(answer.ends) == 1
            assert len(worker.worker.requests) == 0
        finally:
            go.set()


async def test_a_compiler_that_closes_or_panics_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    async with running() as worker, Gateway(worker) as gateway:
        compiler = worker.worker.ctx.grammars  # type: ignore[union-attr]
        assert compiler is not None
        try:
            first, second = await held(worker, gateway, monkeypatch, go)

            def panic(self: Match, *_: Any) -> Match:
                raise BaseException("a panic")

            monkeypatch.setattr(Match, "begin", panic)
            compiler.close()
            await second.wait()
            assert second.error is not None
            assert second.error.reason == "UNAVAILABLE"
        finally:
            go.set()
        await first.wait()
        assert first.error is not None
        assert first.error.reason == "INTERNAL"
        assert len(first.ends) == len(second.ends) == 1
        await until(lambda: len(worker.worker.requests) == 0)
        await worker.pages_are_back()
