"""What grammars cost: tokens a second with and without one, in the same run; masks and compiling by themselves.

    python benchmarks/grammar.py [--rounds 5] [--tokens 64] [--batch 1 8]

The engine core in this process, over the scripted runner (nothing but the core's own work) and over SmolLM2 in bf16 on
CPU. Rounds alternate between with and without; every output has the same length. Figures by the clock and by CPU time
of the process, which other work on the machine disturbs less. A mask is computed in a thread beside the forward pass:
`masks` says what one takes there, and what the core's own thread spends to take a token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1] / "libs"))

import numpy as np

from kvmesh.engine.core import EngineConfig, EngineCore, EngineRequest, RequestKey
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import ScriptedModel, ScriptedRunner
from kvmesh.grammar.match import Match
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary, version
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.loading.tokenizer import load_tokenizer
from kvmesh.proto.v1.inference_pb2 import Grammar

# Never whole before the length is reached.
ENDLESS = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 2000}},
    "required": ["items"],
    "additionalProperties": False,
}
SCHEMAS = Path(__file__).parents[1] / "tests" / "integration" / "grammar_schemas.json"


def vocabulary(spec: str, size: int = 0) -> Vocabulary:
    bundle = load_tokenizer(spec)
    return Vocabulary(bundle.tokenizer.to_str(), size or bundle.vocab_size, bundle.eos_token_ids)


def compiled(words: Vocabulary, schema: Any) -> Match:
    return words.compile(GrammarSource.of(Grammar(json_schema=json.dumps(schema))))


def once(runner: Any, layout: Any, batch: int, tokens: int, grammar: Match | None) -> tuple[float, float]:
    """Tokens a second by the clock and by CPU time."""
    core = EngineCore(runner, layout, EngineConfig(4096, max(32, batch), 2048, 256, prefix_cache=False), lambda _: None)
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=7)
    begun = grammar.begin((), frozenset(), True) if grammar is not None else None
    for i in range(batch):
        core.submit(EngineRequest(RequestKey(str(i)), list(range(40, 72)), 32, params, grammar=begun))
    wall, cpu = time.perf_counter(), time.process_time()
    while core.step_once():
        pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    made = core.counters.generation_tokens
    core.stop()
    assert made == batch * tokens, (made, batch * tokens)
    return made / wall, made / cpu


def compare(name: str, runner: Any, batch: int, tokens: int, grammar: Match, rounds: int) -> None:
    layout = runner.layout(16, 4096)
    regions = {group.name: memoryview(bytearray(layout.region_bytes(group))) for group in layout.groups}
    runner.bind(layout, regions, Doorbell(bytearray(DOORBELL_BYTES)))
    once(runner, layout, batch, tokens, grammar)
    figures: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(2 * rounds):
        kind = bool(turn % 2)
        figures[kind].append(once(runner, layout, batch, tokens, grammar if kind else None))
    for place, what in enumerate(("clock", "CPU")):
        plain, bound = (statistics.median(pair[place] for pair in figures[kind]) for kind in (False, True))
        print(
            f"{name:10} batch {batch:3}  {what:5}  without {plain:9.1f} tok/s  with {bound:9.1f} tok/s  "
            f"ratio {bound / plain:.3f}",
            flush=True,
        )


def masks(words: Vocabulary, steps: int = 300) -> None:
    """Over walks through the schemas of the tests; CPU time of this thread."""
    rng = np.random.default_rng(3)
    filled, taken, copied, made = [], [], [], []
    for case in json.loads(SCHEMAS.read_text()):
        began = time.thread_time()
        start = compiled(words, case["schema"])
        made.append(time.thread_time() - began)
        began = time.thread_time()
        match = start.copy()
        copied.append(time.thread_time() - began)
        for _ in range(steps):
            began = time.thread_time()
            match.fill()
            filled.append(time.thread_time() - began)
            ids = np.flatnonzero(np.unpackbits(match.mask().view(np.uint8), bitorder="little"))
            began = time.thread_time()
            match.take(int(rng.choice(ids)))
            taken.append(time.thread_time() - began)
            if match.over:
                break
    for name, values in (("mask", filled), ("token taken", taken), ("copy", copied), ("compile", made)):
        p50, p99 = np.percentile(values, [50, 99]) * 1e6
        print(f"masks      {name:12} CPU p50 {p50:8.1f} us  p99 {p99:8.1f} us  of {len(values)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    print(
        f"{version()}, {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds",
        flush=True,
    )
    words = vocabulary("scripted", 512)
    for batch in (1, 32):
        runner = ScriptedRunner(ScriptedModel(verify="off", max_model_len=4096))
        compare("scripted", runner, batch, 8 * given.tokens, compiled(words, ENDLESS), given.rounds)
    words = vocabulary(given.model)
    masks(words)

    from kvmesh.engine.torch_runner import TorchRunner

    model = TorchRunner.load(given.model, "bf16", 1)
    for batch in given.batch:
        compare(given.model, model, batch, given.tokens, compiled(words, ENDLESS), given.rounds)


if __name__ == "__main__":
    main()
