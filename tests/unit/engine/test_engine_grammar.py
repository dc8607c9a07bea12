"""Grammars in the engine core: every output is the scripted model's own, however its steps run and whoever is near.

`World` compares each output with the model's, computed alone with a match of its own.
"""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest

from kvmesh.engine.core import Ended, FinishReason, Mode, RequestKey, Tokens
from kvmesh.engine.runner import StepBatch
from kvmesh.errors import Internal
from kvmesh.grammar.match import Match
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1.inference_pb2 import Grammar
from tests.unit.engine.overlap_kit import tokens_of
from tests.unit.engine.test_overlap_equal import live, script, told
from tests.unit.engine.world import World

LIVES = 40 if os.environ.get("KVMESH_SOAK") else 1
TEXTS = (
    Grammar(regex="[a-z ]{7,}"),
    Grammar(regex="(ab|cd){4,6}!?"),
    Grammar(json_object=True),
    Grammar(json_schema='{"type":"array","items":{"enum":["x","yy"]},"minItems":2,"maxItems":3}'),
    Grammar(lark='start: "(" start ")" | "word by word"'),
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    bundle = scripted_tokenizer()
    return Vocabulary(bundle.tokenizer.to_str(), 512, bundle.eos_token_ids)


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> list[Match]:
    return [vocabulary.compile(GrammarSource.of(text)) for text in TEXTS]


def waves(rng: random.Random, grammars: list[Match], share: float) -> Any:
    """Random requests, some with a grammar."""
    made = script(rng, None, False)
    for request in [request for wave in made for request in wave]:
        if request["mode"] is not Mode.PREFILL_ONLY and rng.random() < share:
            request["grammar"] = rng.choice(grammars)
    return made


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("late", [True, False])
def test_ahead_of_the_device_every_output_is_the_same(grammars: list[Match], late: bool, share: float) -> None:
    """Choices, healed output, min_tokens, stop tokens, aborts by stop: whatever `script` draws."""
    deepest = 0
    for seed in range(LIVES):
        rng = random.Random(seed)
        made = waves(rng, grammars, share)
        config = {
            "num_pages": 400, "page_size": rng.choice([1, 2, 4]), "max_batch": 32, "token_budget": 200,
            "chunk_size": rng.choice([1, 3, 64]),
        }  # fmt: skip
        worlds = [live(made, soon, **config) for soon in (None, lambda: not late)]
        assert [len(events) for events in told(worlds[0], False)] == [len(events) for events in told(worlds[1], False)]
        deepest = max(deepest, worlds[1].device.deepest)
    assert deepest == 2


def test_in_a_small_pool_every_output_is_the_same(grammars: list[Match]) -> None:
    preempted = 0
    for seed in range(2 * LIVES):
        rng = random.Random(100 + seed)
        made = waves(rng, grammars, 0.5)
        for soon in (None, lambda: False):
            config: dict[str, Any] = {"num_pages": 26, "page_size": 4, "max_batch": 6, "token_budget": 16}
            preempted += live(made, soon, **config).core.counters.preemptions
    assert preempted > 0


def batches_with(world: World, key: RequestKey) -> list[StepBatch]:
    seq_ids = {choice.seq_id for choice in world.core.scheduler.requests[key].seqs}
    return [batch for batch in world.device.launched if any(s.seq_id in seq_ids for s in batch.slices)]


def test_beside_others_it_takes_every_second_step_and_never_waits_for_a_token(grammars: list[Match]) -> None:
    """What it may say hangs on its last token: planned behind the step that draws it, it would say something else."""
    world = World(soon=lambda: False, num_pages=400, max_batch=8)
    plain = [world.submit(length=9, base=b, max_tokens=24) for b in (0, 1, 2)]
    bound = world.submit(length=9, max_tokens=40, grammar=grammars[1])
    for _ in range(16):
        world.step()
    assert all(not (s.pending and s.grammar) for b in world.device.launched for p in b.slices for s in p.samples)
    ours, theirs = len(batches_with(world, bound)), len(batches_with(world, plain[0]))
    assert theirs - 2 >= ours >= theirs // 2 - 1
    world.run()
    world.finish()


def test_alone_it_takes_every_step(grammars: list[Match]) -> None:
    world = World(soon=lambda: False, num_pages=400, max_batch=8)
    keys = [world.submit(length=9, base=b, max_tokens=40, grammar=grammars[1]) for b in (0, 1, 2)]
    world.run()
    longest = max(len(tokens_of(world, key)) for key in keys)
    assert len(world.device.launched) <= longest + 2
    assert all(re.fullmatch("(ab|cd){4,6}!?", text_of(world, key)) for key in keys)
    world.finish()


def text_of(world: World, key: RequestKey) -> str:
    return bytes(token for token in tokens_of(world, key) if token < 256).decode()


def test_one_that_cannot_go_on_ends_alone(vocabulary: Vocabulary, grammars: list[Match]) -> None:
    """A limit that only shows in the middle: its request ends with the reason, and nothing of it is told."""
    world = World(num_pages=100)
    other = world.submit(length=9, max_tokens=20)
    bad = world.submit(length=9, max_tokens=20, n=2, grammar=grammars[0])
    for _ in range(3):
        world.step()
    match = world.core.scheduler.requests[bad].seqs[1].match
    assert match is not None
    before = len(tokens_of(world, bad))
    match.error = Internal("too many items")
    while world.step():
        pass
    (end,) = [event for event in world.log if isinstance(event, Ended) and event.key == bad]
    assert end.error is match.error
    assert len(tokens_of(world, bad)) <= before + 1
    assert len(tokens_of(world, other)) == 20
    assert world.core.pool.available_count == world.core.pool.total


@pytest.mark.parametrize(
    ("pattern", "sampling", "text", "reason"),
    [
        ("abc", {"min_tokens": 9}, "abc", FinishReason.STOP),
        ("abc", {"ignore_eos": True}, "abc", FinishReason.STOP),
        ("a{3}b*", {}, "aaa", FinishReason.STOP),
        ("a{3}b*", {"min_tokens": 5}, "aaabb", FinishReason.STOP),
        ("a{3}b*", {"ignore_eos": True}, "aaabbbbbb", FinishReason.LENGTH),
        # Ends wherever the match is whole, as the end of sequence does; a token like any other inside.
        ("a{3}b*", {"ignore_eos": True, "stop_token_ids": frozenset({98})}, "aaab", FinishReason.STOP),
        ("a{3}b*", {"stop_token_ids": frozenset({97})}, "a", FinishReason.STOP),
        ("abc", {"max_tokens": 3}, "abc", FinishReason.STOP),
        ("abc", {"max_tokens": 2}, "ab", FinishReason.LENGTH),
    ],
)
def test_ends(vocabulary: Vocabulary, pattern: str, sampling: dict[str, Any], text: str, reason: FinishReason) -> None:
    world = World(num_pages=100)
    grammar = vocabulary.compile(GrammarSource.of(Grammar(regex=pattern)))
    key = world.submit(length=5, grammar=grammar, **{"max_tokens": 9, **sampling})
    world.run()
    assert text_of(world, key) == text
    told_ends = [e for e in world.log if isinstance(e, Tokens) and e.key == key and e.finish_reason is not None]
    assert [event.finish_reason for event in told_ends] == [reason]
    # A stop token is told as such; a match that is over needs none.
    stop = told_ends[0].stop_token_id
    assert stop is None or stop in sampling.get("stop_token_ids", ()) or stop == 257
    world.finish()


def test_without_grammars_nothing_is_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_pages=100)
    monkeypatch.setattr(world.core.scheduler._masks, "fill", None)
    keys = [world.submit(length=9, base=b) for b in (0, 1)]
    world.run()
    assert all(sample.grammar is None for batch in world.batches for part in batch.slices for sample in part.samples)
    assert world.core.scheduler._masks._pool is None
    assert all(len(tokens_of(world, key)) == 8 for key in keys)
    world.finish()
