"""The scripted runner itself: pace, doorbell, KV bytes, and disaggregated output equal to unified output."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.engine.core import Mode
from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.engine.scripted import EOS, ScriptedModel, ScriptedRunner, history_digest, scripted_token
from kvmesh.errors import FailedPrecondition
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from tests.unit.engine.world import BASES, World, error_of


class Bench:
    """A bound runner without a core."""

    def __init__(self, page_size: int = 4, **kwargs) -> None:
        self.waits: list[float] = []
        self.runner = ScriptedRunner(ScriptedModel(**kwargs), wait=self.waits.append)
        self.layout = self.runner.layout(page_size, 16)
        self.region = bytearray(self.layout.region_bytes("kv"))
        self.doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        self.runner.bind(self.layout, {"kv": memoryview(self.region)}, self.doorbell)

    def run(self, tokens, start, table, *, sample: bool = False, copies=(), seq_id: int = 1):
        known = [*BASES[0][:start], *tokens]
        samples = (SampleInput(SamplingParams(), 0, len(known), known, ()),) if sample else ()
        part = Slice(seq_id, np.array(tokens, np.int32), start, np.array(table, np.int32), samples)
        return self.runner.execute(StepBatch(1, [part], copies))


@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 16), ("fp32", 16), ("bf16", 4)])
def test_every_byte_of_every_page_is_checked(dtype: str, head_dim: int) -> None:
    bench = Bench(dtype=dtype, head_dim=head_dim)
    prompt = list(BASES[0][:6])
    bench.run(prompt, 0, [3, 5])
    page_bytes = bench.layout.page_bytes("kv")
    checked = 0
    for layer in range(4):
        for page, slots in ((3, 4), (5, 2)):
            at = bench.layout.page_offset("kv", layer, page)
            view = np.frombuffer(bench.region, np.uint8)[at : at + page_bytes].reshape(2, 2, 4, -1)
            for head in range(2):
                for kv in range(2):
                    for slot in range(slots):
                        byte = (layer * 7 + slot * 3 + head) % view.shape[-1]
                        view[head, kv, slot, byte] ^= 1
                        for sample in (False, True):
                            with pytest.raises(SequencesFailed):
                                bench.run([BASES[0][6]], 6, [3, 5], sample=sample)
                        view[head, kv, slot, byte] ^= 1
                        checked += 1
    assert checked == 4 * 2 * 2 * 6
    bench.run([BASES[0][6]], 6, [3, 5], sample=True)


def test_missing_swapped_and_other_tokens_are_found() -> None:
    bench = Bench()
    prompt = list(BASES[0][:8])
    with pytest.raises(SequencesFailed):
        bench.run([1], 8, [1, 2, 3])  # nothing was ever written
    bench.run(prompt, 0, [1, 2])
    with pytest.raises(SequencesFailed):
        bench.run([1], 8, [2, 1, 3])
    bench.run(list(BASES[1][:8]), 0, [1, 2])  # another sequence's tokens, in the same place
    bench.run([BASES[0][8]], 8, [1, 2, 3])  # cannot be told without the history
    with pytest.raises(SequencesFailed):
        bench.run([BASES[0][8]], 8, [1, 2, 3], sample=True)
    assert bench.runner.foreign > 8


@pytest.mark.parametrize(("verify", "found"), [("all", True), ("last", False), ("off", False)])
def test_verification_can_be_narrowed(verify: str, found: bool) -> None:
    bench = Bench(verify=verify)
    bench.run(list(BASES[0][:8]), 0, [1, 2])
    np.frombuffer(bench.region, np.uint8)[bench.layout.page_offset("kv", 0, 1)] ^= 1
    if found:
        with pytest.raises(SequencesFailed):
            bench.run([BASES[0][8]], 8, [1, 2, 3])
    else:
        bench.run([BASES[0][8]], 8, [1, 2, 3])


def test_copies_come_before_the_step() -> None:
    bench = Bench()
    bench.run(list(BASES[0][:6]), 0, [1, 2])
    bench.run([BASES[0][6]], 6, [1, 9], sample=True, copies=[(2, 9)])
    assert bench.runner.foreign == 0


def test_pace_is_spread_over_the_layers_and_the_bell_rings_after_each() -> None:
    bench = Bench(step_s=0.4, token_s=0.04, prefill_token_s=0.02, layers=4)
    seen = []
    part = Slice(1, np.array(list(BASES[0][:5]), np.int32), 0, np.array([1, 2], np.int32))
    row = Slice(2, np.array([65], np.int32), 0, np.array([3], np.int32))

    def on_layer(layer: int) -> None:
        seen.append((layer, bench.doorbell.value, sum(bench.waits)))

    bench.runner.execute(StepBatch(1, [part, row]), on_layer)
    total = 0.4 + 0.04 + 5 * 0.02
    assert [(layer, value) for layer, value, _ in seen] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [slept for _, _, slept in seen] == pytest.approx([total / 4 * (i + 1) for i in range(4)])


def test_close_ends_a_pause_and_unbinds() -> None:
    runner = ScriptedRunner(ScriptedModel(step_s=3600.0, layers=2))
    layout = runner.layout(4, 4)
    runner.bind(layout, {"kv": memoryview(bytearray(layout.region_bytes("kv")))}, Doorbell(bytearray(DOORBELL_BYTES)))
    runner._closed.set()
    runner.execute(StepBatch(1, []))
    runner.close()
    with pytest.raises(FailedPrecondition):
        runner.execute(StepBatch(2, []))


def test_next_token_depends_on_history_seed_and_choice_and_is_printable() -> None:
    def token(history, seed=1, choice=0, banned=frozenset(), eos_after=None, output=()):
        sample = SampleInput(SamplingParams(seed=seed), choice, len(history), history, output, banned)
        return scripted_token(history_digest(history), sample, eos_after)

    histories = [list(range(40, 40 + n)) for n in range(1, 40)]
    tokens = [token(h) for h in histories]
    assert all(32 <= t < 127 for t in tokens)
    assert len(set(tokens)) > 15
    assert tokens != [token(h, seed=2) for h in histories]
    assert tokens != [token(h, choice=1) for h in histories]
    assert tokens != [token(list(reversed(h))) for h in histories]
    assert all(token(h, banned=frozenset({t})) != t for h, t in zip(histories, tokens, strict=True))
    assert token([1, 2], eos_after=2, output=[5, 6]) == EOS
    assert token([1, 2], eos_after=2, output=[5, 6], banned=frozenset({EOS})) != EOS


@pytest.mark.parametrize("cached", [0, 8, 20])
@pytest.mark.parametrize("chunk", [3, 4, 64])
def test_disaggregated_output_is_the_unified_output(cached: int, chunk: int) -> None:
    """Prefill on one engine, its pages copied page by page into another's, decode there."""
    prefill = World(chunk_size=chunk, token_budget=64, num_pages=40)
    decode = World(num_pages=40)
    if cached:
        warm = decode.submit(length=cached, max_tokens=1)
        decode.run()
        assert decode.tracks[warm].over
    wanted = decode.submit(Mode.REMOTE, length=23, n=2)
    decode.step()
    admitted = decode.tracks[wanted].admitted[0]
    assert admitted.first_block == min(cached, 22) // 4
    assert decode.expose(wanted)
    source = prefill.submit(Mode.PREFILL_ONLY, length=22)
    prefill.step()
    prefill.start_prefill(source, admitted.first_block)
    prefill.run()
    sent = prefill.tracks[source].arrived
    assert sent == set(range(6 - admitted.first_block))
    for index in sent:
        block = admitted.first_block + index
        decode._bytes[:, admitted.pages[block]] = prefill._bytes[:, prefill.tracks[source].admitted[0].pages[block]]
    generation, decode.tracks[wanted].generation = decode.tracks[wanted].generation, None
    decode.core.kv_ready(wanted, generation)
    decode.run()
    prefill.release(source)
    assert error_of(decode.tracks[wanted]) is None
    assert decode.core.counters.prefill_tokens == 1 + cached
    decode.finish()
    prefill.finish()
