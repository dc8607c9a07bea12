"""Steps that are launched ahead on several ranks: the same answers as one rank's, and a lost rank ends it at once.

Real processes; the device is a thread (`ahead_shard`). Deadlines are generous, events end the waits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ahead_shard
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.parallel.ahead import AheadRunner
from kvmesh.engine.parallel.clock import StepClock
from kvmesh.engine.parallel.ranks import ranks_of, start_ranks
from kvmesh.engine.runner import PENDING, SamplingParams, Slice, StepBatch, StepResult, as_async
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.kv.pidfd import open_pidfd, wait_exit
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from model_harness import sample_of
from model_tiny import TINY, make_tiny

WAIT_S = 120.0
PAGE, PAGES = 16, 32
Answer = list[list[tuple[int, Any]]]
LAYERS = TINY["num_hidden_layers"]
PROMPT = np.random.default_rng(3).integers(3, 190, 21).astype(np.int32)
# Tokens of so small a model hardly depend on those before, log-probabilities do.
WARM = SamplingParams(temperature=0.9, top_p=0.9, seed=4, want_logprobs=True)
TABLE = np.array([7, 3, 9, 1], dtype=np.int32)
# Two choices begin from one prompt, before the tokens of the other.
PROMPTS = (
    Slice(2, PROMPT[:5], 0, np.array([2], np.int32), (sample_of(WARM, 5), sample_of(SamplingParams(seed=9), 5))),
    Slice(1, PROMPT, 0, TABLE, (sample_of(WARM, len(PROMPT)),)),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_tiny(made, "bias")
    return made


def start(directory: Path, timeout_s: float = WAIT_S, **options: object) -> AheadRunner:
    ranks = start_ranks(str(directory), 2, 1, ahead_shard.__name__)
    return AheadRunner.load(
        ranks, str(directory), "fp32", first_gpu=0, options=options, timeout_s=timeout_s,
        backend=ahead_shard.ThreadBackend({}),
    )  # fmt: skip


def answer_of(result: StepResult, of: Callable[[float], Any] = float) -> Answer:
    """(token, its log-probability where it was asked for) of every slice."""
    return [
        [
            (token, of(scored.logprob if scored is not None else 0.0))
            for token, scored in zip(each.token_ids, each.logprobs, strict=True)
        ]
        for each in result.slices
    ]


def near(value: float) -> Any:
    return pytest.approx(value, abs=1e-3)


class Engine:
    """A bound runner with one sequence (and a second one beside it), driven a step ahead."""

    def __init__(self, runner: AheadRunner) -> None:
        self.runner = runner
        layout = runner.layout(PAGE, PAGES)
        self.doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        self.regions = {"full": Region.create("kv", layout.region_bytes("full"))}
        runner.bind_cuda(layout, self.regions, self.doorbell)
        self.steps = 0

    def launch(self, *slices: Slice) -> object:
        self.steps += 1
        return self.runner.launch(StepBatch(self.steps, slices))

    def prompt(self) -> object:
        return self.launch(*PROMPTS)

    def decode(self, token: int, at: int) -> object:
        return self.launch(Slice(1, np.array([token], np.int32), at, TABLE, (sample_of(WARM, at + 1),)))

    def tokens(self, flight: object) -> Answer:
        return answer_of(self.runner.collect(flight))


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    made = Engine(start(directory))
    yield made
    made.runner.close()


def expected(directory: Path, steps: int) -> list[Answer]:
    """One rank's answers, each step after the one before."""
    one = TorchRunner.load(str(directory), "fp32", backend="torch")
    layout = one.layout(PAGE, PAGES)
    one.bind(layout, {"full": memoryview(bytearray(layout.region_bytes("full")))}, Doorbell(bytearray(DOORBELL_BYTES)))
    answers = [answer_of(one.execute(StepBatch(1, PROMPTS)), near)]
    for n in range(steps):
        at, (token, _) = len(PROMPT) + n, answers[-1][-1][0]
        batch = StepBatch(2 + n, [Slice(1, np.array([token], np.int32), at, TABLE, (sample_of(WARM, at + 1),))])
        answers.append(answer_of(one.execute(batch), near))
    return answers


def test_pending_tokens_reach_the_ranks_and_a_rank_killed_under_way_ends_it(directory: Path, engine: Engine) -> None:
    runner = engine.runner
    assert as_async(runner) is runner
    assert ranks_of(runner) is runner.ranks
    steps = 7
    flights, answers = [engine.prompt()], []
    for n in range(steps):
        # More than the ring has slots; a rank that took another token would answer something else.
        flights.append(engine.decode(PENDING, len(PROMPT) + n))
        answers.append(engine.tokens(flights.pop(0)))
    answers.append(engine.tokens(flights.pop(0)))
    wanted = expected(directory, steps)
    assert answers == wanted
    assert engine.doorbell.value == LAYERS * (steps + 1)

    # Refused before any rank hears of it: the group goes on.
    with pytest.raises(InvalidArgument):
        engine.launch(Slice(1, PROMPT, 0, np.array([PAGES, 0], np.int32), ()))
    assert engine.tokens(engine.prompt()) == wanted[0]

    # Launched, and the rank stands still, so that the step waits for it; then it is killed there.
    [pid] = runner.ranks.pids
    pidfd = open_pidfd(pid)
    told, reasons = threading.Event(), []
    runner.ranks.on_lost(lambda reason: (reasons.append(reason), told.set()))
    os.kill(pid, signal.SIGSTOP)
    flight, ahead = engine.prompt(), engine.decode(PENDING, len(PROMPT))
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            runner.collect(flight)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    # Not after a time limit.
    assert time.monotonic() - killed < WAIT_S / 2
    assert isinstance(errors[0], DeviceFailed)
    assert f"rank 1 (pid {pid}) ended with code -9" in errors[0].message
    assert told.wait(WAIT_S)
    assert reasons == [errors[0].message]
    for late in (lambda: runner.collect(ahead), engine.prompt):
        with pytest.raises(DeviceFailed, match=f"pid {pid}"):
            late()
    try:
        assert wait_exit(pidfd, WAIT_S)
    finally:
        os.close(pidfd)


def test_a_rank_killed_when_its_step_was_done_is_seen_at_the_next_call(engine: Engine) -> None:
    runner = engine.runner
    engine.tokens(engine.prompt())
    lost = threading.Event()
    runner.ranks.on_lost(lambda reason: lost.set())
    os.kill(runner.ranks.pids[0], signal.SIGKILL)
    assert lost.wait(WAIT_S)
    with pytest.raises(DeviceFailed, match="ended with code -9"):
        engine.prompt()


def test_a_rank_that_stands_still_is_lost_after_the_time_limit(engine: Engine) -> None:
    """Nobody waits on the host while a step runs: the clock does."""
    ranks = engine.runner.ranks
    # Only now that everything has started: a busy machine may need longer for that.
    engine.runner._clock.close()
    engine.runner._clock = StepClock(1.0, engine.runner._late)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    with pytest.raises(DeviceFailed, match="did not end within 1 s: a rank stands still"):
        engine.tokens(engine.prompt())
    assert ranks.lost


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(directory: Path) -> None:
    with pytest.raises(Unavailable, match=r"rank 1 \(pid \d+\) ended with code 1: this rank does not load"):
        start(directory, fails=[1])


def test_a_leader_that_cannot_load_says_why_and_ends_its_ranks(directory: Path) -> None:
    ranks = start_ranks(str(directory), 2, 1, ahead_shard.__name__)
    pidfd = open_pidfd(ranks.pids[0])
    try:
        with pytest.raises(InvalidArgument, match="this rank does not load"):
            AheadRunner.load(
                ranks, str(directory), "fp32", first_gpu=0, options={}, timeout_s=WAIT_S,
                backend=ahead_shard.ThreadBackend({"fails": [0]}),
            )  # fmt: skip
        assert wait_exit(pidfd, WAIT_S)
    finally:
        os.close(pidfd)


def test_ranks_leave_when_they_are_told_to(directory: Path) -> None:
    engine = Engine(start(directory))
    [pid] = engine.runner.ranks.pids
    process = engine.runner.ranks._ranks[0].process
    flight = engine.prompt()
    engine.tokens(flight)
    engine.runner.close()
    assert process.returncode == 0, pid
    with pytest.raises(DeviceFailed, match="stopping"):
        engine.prompt()
