"""Grammars on the real chat model, through the gateway: whatever it says at temperature 1 is what was asked for.

The judges are jsonschema and `re`. All 25 schemas with four seeds each with KVMESH_SOAK=1.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvmesh.cli.plan import MeshOptions
from kvmesh.client import Client
from kvmesh.proto.v1 import inference_pb2 as pb
from mesh_kit import PATIENT, Mesh, mesh_up

pytestmark = pytest.mark.model

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "grammar_schemas.json").read_text())
SOAK = bool(os.environ.get("KVMESH_SOAK"))
# Names tell what each is for; these five go through nesting, references, patterns, alternatives and an open string.
CHOSEN = ("invoice", "one_of_payment", "refs_defs", "optional_fields", "free_text")
MAX_TOKENS = 400
AT_ONCE = 16
UNIFIED = MeshOptions(
    gateway_port=0, threads=1, settings=PATIENT, prefill=0, decode=0, unified=1, cache=False, embedder="none"
)


async def say(mesh: Mesh, client: Client, prompt: str, grammar: pb.Grammar, seed: int) -> tuple[str, int, int]:
    """The answer's text, finish reason and tokens."""
    text, reason = "", 0
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS, "grammar": grammar}
    async with client.chat([{"role": "user", "content": prompt}], model=mesh.model, **sampling) as stream:
        async for event in stream:
            if event.HasField("delta"):
                text += event.delta.text
                reason = event.delta.finish_reason or reason
            elif event.HasField("finished"):
                return text, reason, event.finished.usage.completion_tokens
    raise AssertionError("no terminal event")


def check_json(schema: dict[str, Any]) -> Callable[[str], None]:
    return lambda text: jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def check_regex(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


REGEX = r"(yes|no), because [a-z ]{5,60}\."
ITEM = "[A-Za-z][a-z ]{2,20}"
LARK = f'start: "- " item ("\\n- " item){{1,3}}\nitem: /{ITEM}/'


async def test_what_ends_by_itself_is_what_was_asked_for(record_property: Any) -> None:
    wanted = [case for case in CASES if SOAK or case["name"] in CHOSEN]
    asks = [
        (case["name"], case["prompt"], pb.Grammar(json_schema=json.dumps(case["schema"])), check_json(case["schema"]))
        for case in wanted
    ]
    seeds = range(1, 5 if SOAK else 2)
    others = [
        ("regex", "Is the sea salty?", pb.Grammar(regex=REGEX), check_regex(REGEX)),
        (
            "lark",
            "List some fruits.",
            pb.Grammar(lark=LARK),
            check_regex(r"- [A-Za-z][a-z ]{2,20}(\n- [A-Za-z][a-z ]{2,20}){1,3}"),
        ),
    ]
    started = time.monotonic()
    room = asyncio.Semaphore(AT_ONCE)
    async with mesh_up(UNIFIED) as mesh, mesh.client() as client:

        async def one(ask: Any, seed: int) -> tuple[str, int, str, int, int]:
            name, prompt, grammar, _ = ask
            async with room:
                return name, seed, *await say(mesh, client, prompt, grammar, seed)

        jobs = [(ask, seed) for ask in [*asks, *others] for seed in (seeds if ask in asks else [1])]
        answers = await asyncio.gather(*[one(ask, seed) for ask, seed in jobs])
    long = []
    for (ask, seed), (name, _, text, reason, tokens) in zip(jobs, answers, strict=True):
        if SOAK:
            print(f"{name:18} {seed} {pb.FinishReason.Name(reason)[14:]:6} {tokens:4} {text!r}")
        if reason == pb.FINISH_REASON_STOP:
            ask[3](text)
        else:
            assert reason == pb.FINISH_REASON_LENGTH
            long.append((name, seed))
    assert len(long) <= (5 if SOAK else 1), long
    record_property(
        "measured",
        f"grammars on SmolLM2 at temperature 1: {len(jobs)} answers, {len(jobs) - len(long)} stop (all valid), "
        f"{len(long)} length {long}, {sum(a[4] for a in answers)} tokens, {time.monotonic() - started:.0f} s",
    )
