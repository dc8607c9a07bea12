"""The exposed tail: what decode waited for KV after it had been computed; and what engines tell at 0."""

from __future__ import annotations

from itertools import permutations

import pytest

from kvmesh.engine.worker import tail as tail_module
from kvmesh.engine.worker.loading import LoadProgress
from kvmesh.engine.worker.tail import ExposedTail
from kvmesh.telemetry import metrics, names
from test_worker_remote import mesh
from worker_harness import prompt, until


def observed(transport: str) -> tuple[float, float]:
    """Observations so far, and their sum in seconds."""
    total = metrics.REGISTRY.get_sample_value(names.TRANSFER_EXPOSED.name + "_sum", {"transport": transport})
    return metrics.value(names.TRANSFER_EXPOSED, transport=transport), total or 0.0


@pytest.mark.parametrize("order", list(permutations(["accepted", "ready", "computed"])))
@pytest.mark.parametrize(("computed_ms", "tail_s"), [(300.0, 0.2), (500.0, 0.0), (900.0, 0.0)])
def test_it_is_what_is_left_of_the_wait(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...], computed_ms: float, tail_s: float
) -> None:
    """Accepted at 10 s, the pages there at 10.5 s; in whatever order that becomes known."""
    tell = {
        "accepted": lambda: tail.accepted(),
        "ready": lambda: tail.ready("a transport"),
        "computed": lambda: tail.computed(computed_ms),
    }
    times = {"accepted": 10.0, "ready": 10.5, "computed": 99.0}
    tail, before = ExposedTail(), observed("a transport")
    for word in order:
        assert observed("a transport") == before
        monkeypatch.setattr(tail_module.time, "monotonic", lambda word=word: times[word])
        tell[word]()
    count, total = observed("a transport")
    assert count == before[0] + 1
    assert total - before[1] == pytest.approx(tail_s)
    tail.ready("a transport")
    assert observed("a transport")[0] == count, "once"


def test_a_source_that_does_not_tell_is_not_guessed_about() -> None:
    tail, before = ExposedTail(), observed("a transport")
    tail.accepted()
    tail.ready("a transport")
    tail.computed(0.0)
    assert observed("a transport") == before


async def test_each_transfer_is_observed_on_decode() -> None:
    count, total = observed("fake")
    async with mesh() as m:
        await m.ask(prompt(100))
        await until(lambda: observed("fake")[0] == count + 1)
        await m.ask(prompt(5))
        await m.all_back()
    assert observed("fake")[0] == count + 1, "what is computed here travels nowhere"
    assert 0.0 <= observed("fake")[1] - total < 60.0


async def test_known_series_of_an_engine_begin_at_zero() -> None:
    async with mesh() as m:
        model = m.decode.worker.ctx.identity.served_name
        for metric in (names.SPEC_DRAFTS, names.SPEC_DRAFT_TOKENS, names.SPEC_ACCEPTED_TOKENS):
            assert metrics.REGISTRY.get_sample_value(metric.name, {"model_name": model}) == 0.0
        waiting = metrics.REGISTRY.get_sample_value(names.NUM_TOKENS_WAITING.name, {"model_name": model})
        assert waiting == 0.0 or waiting is None
        await m.ask(prompt(100))
        await m.all_back()
        assert metrics.value(names.NUM_TOKENS_WAITING, model_name=model) == 0.0


async def test_pages_add_up_to_what_the_engine_was_given() -> None:
    async with mesh() as m:
        worker = m.decode.worker
        await m.ask(prompt(100))
        await m.all_back()
        counts = worker.ctx.core.pool.counts()
        assert sum(counts) == worker.ctx.core.load().total_pages > 0
        model = worker.ctx.identity.served_name
        await until(lambda: metrics.value(names.KV_POOL_PAGES, model_name=model) > 0)


def test_a_model_that_is_loaded_does_not_look_stuck() -> None:
    """A checkpoint may hold tensors that nobody reads: the last of those that are read is not the end of the bytes."""
    progress = LoadProgress("/models/of-a-test")
    progress(90, 100)
    assert metrics.value(names.MODEL_LOAD_PROGRESS, model_name="of-a-test") == 0.9
    progress.finished()
    assert metrics.value(names.MODEL_LOAD_PROGRESS, model_name="of-a-test") == 1.0
