"""Grammars without an engine: walks over allowed tokens end where jsonschema and `re` agree."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvmesh.errors import FailedPrecondition, InvalidArgument
from kvmesh.grammar.compiler import GrammarCompiler
from kvmesh.grammar.masks import MaskThread, threads
from kvmesh.grammar.match import Match, without
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary, version
from kvmesh.proto.v1.inference_pb2 import Grammar

WAIT_S = 60.0
# Tokens of several characters, some of which end and begin something at once.
LONG = ['{"', '":', '","', '"}', '":"', 'Ġ"', "true", "false", "null", "12", "00", "[[", "]]", "},", "ab", "abc", "Ã©"]


def _tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*letters, *LONG]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<other>", special=True)])
    return tokenizer


TOKENIZER = _tokenizer()
EOS = TOKENIZER.token_to_id("<eos>")
SIZE = TOKENIZER.get_vocab_size() + 37  # a model's embedding may be padded
VOCABULARY = Vocabulary(TOKENIZER.to_str(), SIZE, [EOS])


def compiled(grammar: Grammar) -> Match:
    return VOCABULARY.compile(GrammarSource.of(grammar))


def allowed(match: Match) -> list[int]:
    match.fill()
    return np.flatnonzero(np.unpackbits(match.mask().view(np.uint8), bitorder="little")).tolist()


def walk(match: Match, rng: random.Random, most: int = 600) -> list[int] | None:
    """A random output of a match, without its end; None where it did not come to one."""
    output: list[int] = []
    while len(output) < most:
        ids = allowed(match)
        assert ids
        assert max(ids) < TOKENIZER.get_vocab_size()
        # What closes things is chosen more often, or most walks would never end.
        closing = [i for i in ids if i == EOS or (TOKENIZER.id_to_token(i) or "")[:1] in '"}]']
        token = rng.choice(closing if closing and rng.random() < 0.6 else ids)
        match.take(token)
        assert match.error is None
        if token == EOS:
            assert match.over
            return output
        output.append(token)
        if match.over:
            return output
    return None


def text(output: Sequence[int]) -> str:
    return TOKENIZER.decode(list(output))


scalars = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 8)}
    ),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-300, 300),
        st.integers(0, 5000),
    ),
    st.builds(lambda low: {"type": "number", "minimum": low, "exclusiveMaximum": low + 10}, st.integers(-20, 20)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"const": "é"}]),
    st.lists(st.sampled_from(["a", "ab", 1, 2.5, None, True]), min_size=1, max_size=4).map(lambda v: {"enum": v}),
    st.sampled_from(["^[a-c]{2,4}$", "^(ab|abc)+$", "^x?[0-9]{3}$"]).map(lambda p: {"type": "string", "pattern": p}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name, must in zip(properties, required, strict=False) if must],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "ab", "b c", 'q"', "é"]), inner, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
        ),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: {"anyOf": parts}),
        inner.map(lambda part: {"$ref": "#/$defs/d", "$defs": {"d": part}} if "$ref" not in json.dumps(part) else part),
    )  # fmt: skip


schemas = st.recursive(scalars, containers, max_leaves=6)


def unreferred(schema: Any) -> Any:
    """Definitions belong to the document: a reference further in would not find them."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return unreferred(schema["$defs"]["d"])
        return {key: unreferred(value) for key, value in schema.items()}
    return [unreferred(part) for part in schema] if isinstance(schema, list) else schema


@settings(max_examples=400 if os.environ.get("KVMESH_SOAK") else 30)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_whatever_is_walked_is_an_instance_of_its_schema(schema: Any, seed: int) -> None:
    if "$ref" not in schema:
        schema = unreferred(schema)
    else:
        schema = schema | {"$defs": {"d": unreferred(schema["$defs"]["d"])}}
    match = compiled(Grammar(json_schema=json.dumps(schema)))
    for attempt in range(3):
        output = walk(match.copy(), random.Random(seed + attempt))
        if output is not None:
            said = text(output)
            jsonschema.validate(json.loads(said), schema, cls=jsonschema.Draft202012Validator)
            assert "  " not in re.sub(r'"([^"\\]|\\.)*"', "S", said), "white space without end"


@pytest.mark.parametrize("pattern", ["a+b?", r"[0-9]{2,}(\.[0-9]+)?", "(é|ab)*c", "[!-~]{1,9}", "", "(?i:yes|no)"])
def test_whatever_is_walked_is_matched(pattern: str) -> None:
    ended = 0
    for seed in range(40):
        output = walk(compiled(Grammar(regex=pattern)), random.Random(seed), 100)
        if output is not None:
            assert re.fullmatch(pattern, text(output)), text(output)
            ended += 1
    assert ended > 5


def test_a_grammar_is_followed() -> None:
    match = compiled(Grammar(lark='start: "(" start ")" | /[0-9]/ ("+" start)?'))
    ended = 0
    for seed in range(60):
        output = walk(match.copy(), random.Random(seed), 60)
        if output is not None:
            assert eval(text(output), {"__builtins__": {}}) >= 0
            ended += 1
    assert ended > 10


def test_the_mask_is_what_the_library_says_of_each_token() -> None:
    match = compiled(Grammar(json_schema='{"type":"object","properties":{"ab":{"enum":["abc",12,true]}}}'))
    rng = random.Random(5)
    for _ in range(12):
        ids = set(allowed(match))
        for token in range(TOKENIZER.get_vocab_size()):
            other = match.copy()
            other.take(token)
            assert (other.error is None) == (token in ids), token
        chosen = rng.choice(sorted(ids))
        match.take(chosen)
        if match.over:
            break


def test_copies_go_their_own_ways() -> None:
    first = compiled(Grammar(regex="(ab|cd)(e|f)"))
    second = first.copy()
    a, c = (TOKENIZER.token_to_id(letter) for letter in "ac")
    first.take(a)
    second.take(c)
    assert [TOKENIZER.id_to_token(i) for i in allowed(first)] == ["b"]
    assert [TOKENIZER.id_to_token(i) for i in allowed(second)] == ["d"]


def test_replay_consumes_what_is_there_and_refuses_what_does_not_fit() -> None:
    match = compiled(Grammar(regex="(ab|cd)+;?"))
    a, b, c, d, semicolon = (TOKENIZER.token_to_id(letter) for letter in "abcd;")
    for output in ([], [a], [a, b], [a, b, c, d], [a, b, semicolon], [a, b, EOS]):
        begun = match.begin(output, frozenset(), False)
        assert begun.over == (output[-1:] in ([semicolon], [EOS]))
    for output in ([b], [a, c], [a, b, EOS, a], [a, EOS], [SIZE - 1], [a, b, semicolon, a]):
        with pytest.raises(InvalidArgument, match="does not match"):
            match.begin(output, frozenset(), False)
    # A stop token that is no part of the grammar may end it where it is whole, and only there.
    assert match.begin([a, b, 7], frozenset({7}), False).over
    with pytest.raises(InvalidArgument):
        match.begin([a, 7], frozenset({7}), False)


def test_ends_of_a_match() -> None:
    a, b, other = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b"), TOKENIZER.token_to_id("<other>")
    match = compiled(Grammar(regex="a{2}b*"))
    plain = match.begin([a], frozenset({other}), False)
    assert other not in allowed(plain)
    assert EOS not in allowed(plain)
    plain.take(a)
    assert allowed(plain) == sorted([b, EOS, other])
    ignoring = match.begin([a, a], frozenset(), True)
    assert allowed(ignoring) == [b]
    over = compiled(Grammar(regex="a")).begin([a], frozenset({other}), True)
    assert over.over
    assert allowed(over) == [EOS]


def test_tokens_can_be_left_out_of_a_mask_as_long_as_any_is_left() -> None:
    words = np.array([0b1010, 1 << 31], np.uint32)
    assert without(words, frozenset({1, 63})).tolist() == [0b1000, 0]
    assert without(words, frozenset({1, 3, 63, 1000})) is words
    assert words.tolist() == [0b1010, 1 << 31]


def test_one_that_costs_too_much_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.grammar import match as module

    match = compiled(Grammar(regex="a+"))
    monkeypatch.setattr(module, "_CPU_BASE_S", -1.0)
    match.fill()
    assert isinstance(match.error, InvalidArgument)
    assert "too long" in match.error.message
    assert np.flatnonzero(np.unpackbits(match.mask().view(np.uint8), bitorder="little")).tolist() == [EOS]


def test_taking_tokens_costs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.grammar import match as module

    ambiguous = compiled(Grammar(lark='start: e\ne: e e | "+" | "++"'))
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "thread_time", lambda: float(next(clock)))
    ambiguous.take(TOKENIZER.token_to_id("+"))
    monkeypatch.setattr(module.time, "thread_time", lambda: 0.0)
    ambiguous.fill()
    assert isinstance(ambiguous.error, InvalidArgument)
    assert "too long" in ambiguous.error.message


async def test_limits_that_others_used_up_are_not_met_again() -> None:
    """What is built for a grammar is shared by all its outputs; so are the limits of that."""
    compiler = GrammarCompiler(VOCABULARY)
    source = GrammarSource.of(Grammar(regex=r"(\p{L}|\p{N}){1,2000}\w{1,2000}"))
    a = TOKENIZER.token_to_id("a")
    try:
        rows = [await compiler.begin(source) for _ in range(2)]
        for row in rows:
            for _ in range(4000):
                row.fill()
                if row.error is not None:
                    break
                row.take(a)
        assert rows[0].error is not None
        assert "lexer error: too many" in rows[0].error.message
        for output in ([], [a], [a] * 30):
            fresh = await compiler.begin(source, output)
            assert len(allowed(fresh)) > 50
            assert fresh.error is None
        assert compiler.compiled == 2
    finally:
        compiler.close()


def test_the_end_stands_only_where_the_match_is_whole() -> None:
    """The library shows it for any token that may stand inside, and then does not take it."""
    match = compiled(Grammar(lark="start: <[*]>{2}"))
    assert EOS not in allowed(match)
    with pytest.raises(InvalidArgument, match="only the end"):
        compiled(Grammar(lark=f'start: <[{EOS}]> "a"'))


def test_masks_are_filled_elsewhere_and_waited_for() -> None:
    thread = MaskThread()
    matches = [compiled(Grammar(regex=f"{digit}x")) for digit in range(5)]
    thread.fill(matches)
    for digit, match in enumerate(matches):
        mask = match.mask()
        (token,) = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert TOKENIZER.id_to_token(int(token)) == str(digit)
    # A token is not taken while its mask is still being made.
    done: Future[None] = Future()
    matches[0].filling(done)
    taker = threading.Thread(target=matches[0].take, args=(TOKENIZER.token_to_id("0"),))
    taker.start()
    done.set_result(None)
    taker.join(WAIT_S)
    assert matches[0].error is None
    thread.close()


def test_a_mask_that_fails_is_its_own_outputs_error() -> None:
    class Broken:
        def is_stopped(self) -> bool:
            raise BaseException("a panic")

    thread = MaskThread()
    matches = [compiled(Grammar(regex="0x")) for _ in range(3)]
    good, matches[1]._matcher = matches[1]._matcher, Broken()
    thread.fill(matches)
    for match in matches:
        assert match.mask().any()
    assert [match.error is None for match in matches] == [True, False, True]
    matches[1]._matcher = good
    thread.close()


def test_its_threads_have_room_for_recursion() -> None:
    """The bound on a Lark text leaves a chain of rules that a small stack would not carry."""
    before = threading.stack_size()
    pool = threads(2, "deep")
    assert threading.stack_size() == before

    def sink(depth: int) -> int:
        return 0 if depth == 0 else 1 + sink(depth - 1)

    limit = sys.getrecursionlimit()
    assert pool.submit(sink, limit // 2).result(WAIT_S) == limit // 2
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1200)) + 'r1200: "a"'
    match = pool.submit(compiled, Grammar(lark=chain)).result(WAIT_S)
    assert [TOKENIZER.id_to_token(i) for i in allowed(match)][:1] == ["a"]
    pool.shutdown()


async def test_compiled_once_for_each_text_and_the_last_are_kept() -> None:
    compiler = GrammarCompiler(VOCABULARY, kept=2)
    try:
        sources = [GrammarSource.of(Grammar(regex=pattern)) for pattern in ("a", "b", "c")]
        await asyncio.gather(*[compiler.compile(source) for source in sources[:2] for _ in range(5)])
        assert compiler.compiled == 2
        await compiler.compile(sources[0])
        await compiler.compile(sources[2])
        await compiler.compile(sources[0])
        assert compiler.compiled == 3
        await compiler.compile(sources[1])
        assert compiler.compiled == 4
        bad = GrammarSource.of(Grammar(regex="("))
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                await compiler.compile(bad)
        assert compiler.compiled == 6
        assert not compiler._compiling
    finally:
        compiler.close()


async def test_what_is_kept_is_bounded_by_the_size_of_its_texts_too() -> None:
    compiler = GrammarCompiler(VOCABULARY, kept=8, kept_bytes=100)
    try:
        small, large, huge = (GrammarSource.of(Grammar(regex=size * "a")) for size in (10, 60, 200))
        for source in (small, large, small, large):
            await compiler.compile(source)
        assert compiler.compiled == 2
        # Larger than all may be: kept alone.
        await compiler.compile(huge)
        await compiler.compile(huge)
        assert compiler.compiled == 3
        assert len(compiler._kept) == len(compiler._sizes) == 1
        await compiler.compile(small)
        assert compiler.compiled == 4
        assert list(compiler._kept) == [small.digest]
    finally:
        compiler.close()


def test_who_serves_none() -> None:
    with pytest.raises(FailedPrecondition, match="end-of-sequence"):
        Vocabulary(TOKENIZER.to_str(), SIZE, [])
    with pytest.raises(FailedPrecondition, match="tokenizer"):
        Vocabulary("{}", SIZE, [EOS])
    assert re.fullmatch(r"llguidance-\d+\.\d+\.\d+", version())


def test_the_digest_knows_the_kind() -> None:
    assert GrammarSource.of(Grammar(regex="a")).digest != GrammarSource.of(Grammar(lark="a")).digest
    both = [GrammarSource.of(Grammar(json_object=True)), GrammarSource.of(Grammar(json_schema='{"type":"object"}'))]
    assert both[0].text == both[1].text
    assert both[0].digest != both[1].digest


def test_sizes_are_looked_at_before_anything_is_compiled() -> None:
    inner = json.dumps({"enum": ["x" * 100] * 400})
    # Schemas inside a Lark text are measured as schemas.
    GrammarSource.of(Grammar(lark=f"start: %json {inner}"))
    for grammar in (
        Grammar(lark="start: " + '"x" ' * 5000),
        Grammar(regex="x" * 9000),
        Grammar(json_schema=json.dumps({"enum": ["x" * 100] * 1000})),
        Grammar(lark=f"start: %json {inner}\nother: %json {inner}"),
        Grammar(json_schema=json.dumps({"patternProperties": {f"^{i}{'a?' * 100}": {} for i in range(50)}})),
        Grammar(lark='start: %json {"pattern": "' + "a?" * 4500 + '"}'),
        Grammar(json_schema='{"enum": [' + ", ".join(["[]"] * 11_000) + "]}"),
        Grammar(json_schema=json.dumps({"patternProperties": {f"^k{i:03d}[a-z]{{1,9}}$": {} for i in range(300)}})),
        Grammar(lark='start: %json {"x-guidance": {"item_separator": "' + "a?" * 4500 + '"}}'),
    ):
        with pytest.raises(InvalidArgument, match=r"larger than|more than"):
            GrammarSource.of(grammar)


@pytest.mark.parametrize(
    ("divisors", "fine"),
    [
        (["0.01", "5", "100", "25", "0.1", "1e-5"], True),
        (["9973"], True),
        (["1000000000"], True),
        (["true", '"a"', "0", "-7"], True),
        (["9973", "9967"], False),
        (["99400891"], False),
        (["1048576"], False),
        (["12345678.9"], False),
        (["1" + "7" * 4000], False),
    ],
)
def test_remainders_are_bounded_before_anything_is_compiled(divisors: list[str], fine: bool) -> None:
    """The library would walk through all of them, for minutes and gigabytes."""
    schema = '{"allOf": [' + ", ".join(f'{{"multipleOf": {divisor}}}' for divisor in divisors) + "]}"
    for grammar in (Grammar(json_schema=schema), Grammar(lark=f"start: %json {schema}")):
        if fine:
            GrammarSource.of(grammar)
        else:
            with pytest.raises(InvalidArgument, match="multipleOf"):
                GrammarSource.of(grammar)
