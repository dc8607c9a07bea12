"""Grammars in the engine on a real forward pass: a tiny random model that would say anything.

`re`, jsonschema and the library's own judgement of each token are the judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvmesh.engine import torch_runner
from kvmesh.engine.core import CoreEvent, Ended, EngineConfig, EngineCore, EngineRequest, RequestKey, Tokens
from kvmesh.engine.runner import SampleInput, SamplingParams
from kvmesh.engine.sampler import NO_TOKEN, sample_row
from kvmesh.engine.sampling.processors import permitted_ids
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.grammar.match import Match
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.loading.tokenizer import from_directory
from kvmesh.proto.v1.inference_pb2 import Grammar
from tiny_model import write_tiny

PROMPT = list(b"say something, please")
EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 10, "maximum": 99}, "tags": {"enum": ["a", "bc"]}},
    "required": ["id", "tags"],
    "additionalProperties": False,
}
SCHEMA_GRAMMAR = Grammar(json_schema=json.dumps(SCHEMA))
REGEX = "(yes|no|[0-9]{2}), (because|since) [a-z]{3}x?"
HOT = SamplingParams(temperature=5.0, max_tokens=80)


class Tiny:
    """The model, and cores over it."""

    def __init__(self, path: Path) -> None:
        self.path = write_tiny(path)
        bundle = from_directory(self.path)
        self.vocabulary = Vocabulary(bundle.tokenizer.to_str(), bundle.vocab_size, bundle.eos_token_ids)

    def begin(self, grammar: Grammar, output: Sequence[int] = (), params: SamplingParams = HOT) -> Match:
        compiled = self.vocabulary.compile(GrammarSource.of(grammar))
        return compiled.begin(output, params.stop_token_ids, params.ignore_eos)

    def run(self, *requests: EngineRequest) -> dict[str, dict[int, list[int]]]:
        """Tokens of each choice by request, healed ones not counted; all must end well."""
        runner = TorchRunner.load(str(self.path), "fp32")
        layout = runner.layout(4, 200)
        regions = {group.name: memoryview(bytearray(layout.region_bytes(group))) for group in layout.groups}
        runner.bind(layout, regions, Doorbell(bytearray(DOORBELL_BYTES)))
        events: list[CoreEvent] = []
        core = EngineCore(runner, layout, EngineConfig(512, 16, 128, 16, check_integrity=True), events.extend)
        for request in requests:
            core.submit(request)
        while core.step_once():
            pass
        core.stop()
        runner.close()
        said: dict[str, dict[int, list[int]]] = {}
        for event in events:
            if isinstance(event, Tokens):
                said.setdefault(event.key.request_id, {}).setdefault(event.choice, []).extend(event.token_ids)
            elif isinstance(event, Ended):
                assert event.error is None
        return said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def asked(name: str, params: SamplingParams = HOT, output: Sequence[int] = (), **fields: Any) -> EngineRequest:
    return EngineRequest(RequestKey(name), [*PROMPT, *output], len(PROMPT), params, **fields)


def text(tokens: Sequence[int]) -> str:
    # A byte-level vocabulary in the order of its letters is no order of bytes: back through the tokenizer's alphabet.
    return bytes(LETTERS[token] for token in tokens if token < 256).decode()


def _letters() -> list[int]:
    from tokenizers import pre_tokenizers

    from services.gateway.tokenizers import _BYTES

    return [_BYTES[letter] for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]


LETTERS = _letters()


def test_at_any_heat_the_model_says_what_it_may(tiny: Tiny) -> None:
    requests = []
    for seed in range(6):
        params = replace(HOT, seed=seed)
        requests.append(
            asked(f"schema-{seed}", params, grammar=tiny.begin(Grammar(json_schema=json.dumps(SCHEMA))), n=2)
        )
        requests.append(asked(f"regex-{seed}", params, grammar=tiny.begin(Grammar(regex=REGEX))))
        requests.append(asked(f"free-{seed}", params))
    said = tiny.run(*requests)
    for name, choices in said.items():
        for output in choices.values():
            if name.startswith("free"):
                continue
            assert len(output) < 80
            if name.startswith("schema"):
                jsonschema.validate(json.loads(text(output)), SCHEMA)
            else:
                assert re.fullmatch(REGEX, text(output))
    assert said["schema-1"][0] != said["schema-1"][1]
    # Who has no grammar says the same as without those who have.
    alone = tiny.run(*[asked(f"free-{seed}", replace(HOT, seed=seed)) for seed in range(6)])
    assert alone == {name: choices for name, choices in said.items() if name.startswith("free")}


@pytest.mark.parametrize(
    "params",
    [
        HOT,
        replace(HOT, temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.5),
        replace(HOT, temperature=0.8, top_k=3, top_p=0.9, min_p=0.01, min_tokens=60),
        replace(HOT, logit_bias=dict.fromkeys(range(40), 90.0), ignore_eos=True),
    ],
)
def test_no_drawn_token_is_outside_the_mask(
    tiny: Tiny, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at the sampler, row by row."""
    seen = []

    def watched(logits: Any, rows: Sequence[int], samples: Sequence[SampleInput]) -> Any:
        tokens, scores = sample(logits, rows, samples)
        for row, drawn, token in zip(rows, samples, tokens, strict=True):
            if drawn.grammar is None:
                continue
            allowed = permitted_ids(drawn, logits.shape[1])
            assert token in allowed
            if drawn.params.temperature == 0 and drawn.params.repetition_penalty == 1.0:
                assert token == allowed[logits.numpy()[row][allowed].argmax()]
            seen.append(len(allowed))
        return tokens, scores

    sample = torch_runner.sample_rows
    monkeypatch.setattr(torch_runner, "sample_rows", watched)
    grammars = [Grammar(regex=REGEX), SCHEMA_GRAMMAR, Grammar(json_object=True)]
    tiny.run(*[asked(str(i), params, grammar=tiny.begin(g, (), params)) for i, g in enumerate(grammars)], asked("free"))
    assert len(seen) > 40
    assert min(seen) == 1


def test_from_any_token_on_a_replayed_output_goes_on_as_if_nothing_had_been(tiny: Tiny) -> None:
    params = replace(HOT, temperature=1.0, seed=3, repetition_penalty=1.2)
    grammar = SCHEMA_GRAMMAR
    whole = tiny.run(asked("w", params, grammar=tiny.begin(grammar)))["w"][0]
    requests = [
        asked(str(done), params, whole[:done], grammar=tiny.begin(grammar, whole[:done]))
        for done in range(1, len(whole))
    ]
    healed = tiny.run(*requests)
    assert {name: choices[0] for name, choices in healed.items()} == {
        str(done): whole[done:] for done in range(1, len(whole))
    }


def test_scores_are_those_of_the_raw_distribution(tiny: Tiny) -> None:
    """A token that the grammar forced is told with what the model gave it."""
    params = replace(HOT, want_logprobs=True, logprobs=3)
    events: list[Any] = []
    collect: Callable[[Any, Any, Any], Any] = torch_runner.sample_rows

    def kept(logits: Any, rows: Any, samples: Any) -> Any:
        answer = collect(logits, rows, samples)
        events.append((logits.numpy().copy(), rows, answer))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_runner, "sample_rows", kept)
        tiny.run(asked("x", params, grammar=tiny.begin(Grammar(regex="forced"))))
    assert len(events) == 6
    for logits, rows, (tokens, scores) in events:
        row = logits[rows[0]].astype(np.float64)
        exact = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert scores[0].token_id == tokens[0]
        assert scores[0].logprob == pytest.approx(exact[tokens[0]], abs=1e-4)
        assert scores[0].rank == 1 + int((row > row[tokens[0]]).sum())
        assert [token for token, _ in scores[0].top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert any(score[1][0].rank > 3 for _, _, score in events)


class Only:
    """A mask of one's own."""

    def __init__(self, *ids: int) -> None:
        bits = np.zeros(64, np.uint8)
        bits[list(ids)] = 1
        self.words = np.packbits(bits, bitorder="little").view(np.uint32)

    def mask(self) -> Any:
        return self.words


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("allowed", "banned", "logits", "drawn"),
    [
        ((7,), (), {}, {7}),
        ((7, 9), (7,), {7: 50.0}, {9}),
        # Nothing would be left: the grammar wins.
        ((7, 9), (7, 9), {}, {7, 9}),
        # The model gives it no chance at all.
        ((7,), (), {7: -np.inf}, {7}),
        ((63, 0), (), {63: 40.0}, {63}),
    ],
)
def test_one_row(
    temperature: float, allowed: tuple[int, ...], banned: tuple[int, ...], logits: dict[int, float], drawn: set[int]
) -> None:
    row = np.zeros(64, np.float32)
    for token, value in logits.items():
        row[token] = value
    for seed in range(20):
        params = SamplingParams(temperature=temperature, seed=seed, top_p=0.95)
        sample = SampleInput(params, 0, seed, [], [], frozenset(banned), grammar=Only(*allowed))
        before = row.copy()
        assert sample_row(row, sample) in drawn
        assert np.array_equal(row, before)


def test_a_token_that_only_the_tokenizer_has_is_no_token_of_the_model(tiny: Tiny) -> None:
    """Its row has nothing to draw from; the others of its step are not concerned."""
    match = tiny.begin(Grammar(regex="a"))
    match.fill()
    (token,) = np.flatnonzero(np.unpackbits(match.mask().view(np.uint8), bitorder="little"))
    sample = SampleInput(HOT, 0, len(PROMPT), PROMPT, [], frozenset(), grammar=match)
    assert sample_row(np.zeros(token, np.float32), sample) == NO_TOKEN
    assert sample_row(np.zeros(token + 1, np.float32), sample) == token
