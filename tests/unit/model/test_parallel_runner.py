"""The engine's runner over rank processes: it answers as one rank does, and a rank that is lost ends it at once.

Every process here is real. Nothing waits for a time to pass: deadlines are generous and events end the waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from kvmesh.engine.parallel import runner as runner_module
from kvmesh.engine.parallel.ranks import RankGroup, start_ranks
from kvmesh.engine.parallel.runner import ParallelRunner
from kvmesh.engine.parallel.wire import Frame, Kind
from kvmesh.engine.runner import SamplingParams, Slice, StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.pidfd import open_pidfd, wait_exit
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.layers.parallel import leader_store, member_store
from model_harness import sample_of
from model_tiny import TINY, make_tiny

WAIT_S = 120.0
PAGE, PAGES = 16, 32
LAYERS = TINY["num_hidden_layers"]
PROMPT = np.random.default_rng(2).integers(3, 190, 37).astype(np.int32)


class Engine:
    """A bound runner, driven step by step."""

    def __init__(self, runner: ParallelRunner | TorchRunner) -> None:
        self.runner = runner
        self.layout = runner.layout(PAGE, PAGES)
        self.doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        self.region = bytearray(self.layout.region_bytes("full"))
        runner.bind(self.layout, {"full": memoryview(self.region)}, self.doorbell)
        self.steps = 0

    def step(self, *slices: Slice, copies: list[tuple[int, int]] | None = None) -> list[tuple[object, ...]]:
        self.steps += 1
        before = self.doorbell.value
        result = self.runner.execute(StepBatch(self.steps, slices, copies or []))
        assert self.doorbell.value - before == LAYERS
        return [
            (
                each.seq_id,
                list(each.token_ids),
                [t.token_id for t in each.prompt_logprobs],
                [t.logprob for t in each.prompt_logprobs],
            )
            for each in result.slices
        ]


def same(ours: list[tuple[object, ...]], theirs: list[tuple[object, ...]]) -> None:
    """Equal tokens, and logprobs up to the order in which partial sums are added."""
    assert [each[:-1] for each in ours] == [each[:-1] for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[-1] == pytest.approx(other[-1], abs=1e-3)


def table(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def scenario(engine: Engine) -> list[tuple[object, ...]]:
    """Chunks, mixed steps, a fork with a copied page, seeded sampling, prompt logprobs."""
    warm = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
    seen = engine.step(Slice(1, PROMPT[:20], 0, table(7, 3, 9)))
    seen += engine.step(
        Slice(1, PROMPT[20:], 20, table(7, 3, 9), (sample_of(warm, 37), sample_of(position=37))),
        Slice(2, PROMPT[:11], 0, table(5), (sample_of(position=11),), prompt_logprobs=0, next_token=4),
    )
    seen += engine.step(
        Slice(3, PROMPT[:1], 37, table(7, 3, 11), (sample_of(warm, 38),)),
        Slice(1, PROMPT[1:2], 37, table(7, 3, 9), (sample_of(warm, 38),)),
        Slice(2, PROMPT[:1], 11, table(5), (sample_of(position=12),)),
        copies=[(9, 11)],
    )
    return seen


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_tiny(made, "bias")
    return made


def start(directory: Path) -> ParallelRunner:
    return ParallelRunner.load(
        start_ranks(str(directory), 2, 1), str(directory), "fp32", threads=1, timeout_s=WAIT_S,
        logs={"service": "decode", "instance": "decode-0", "level": "info", "fmt": "text"},
    )  # fmt: skip


@pytest.fixture
def parallel(directory: Path) -> Iterator[ParallelRunner]:
    runner = start(directory)
    yield runner
    runner.close()


def gone(pidfds: list[int]) -> bool:
    """Whether all of these processes end; closes the descriptors."""
    try:
        return all(wait_exit(fd, WAIT_S) for fd in pidfds)
    finally:
        for fd in pidfds:
            os.close(fd)


def test_two_ranks_answer_as_one_and_a_kill_in_a_collective_ends_them(
    directory: Path, parallel: ParallelRunner
) -> None:
    one, two = Engine(TorchRunner.load(str(directory), "fp32", backend="torch")), Engine(parallel)
    assert two.layout.tp == 2
    assert two.layout.fingerprint() == one.layout.fingerprint()
    assert two.layout.region_bytes("full") * 2 == one.layout.region_bytes("full")
    same(scenario(two), scenario(one))

    # A batch that cannot run is refused before any rank sees it: the group goes on.
    for bad in (
        Slice(9, PROMPT, 0, table(1, 2)),
        Slice(9, PROMPT[:3], 0, table(PAGES)),
        Slice(9, np.array([TINY["vocab_size"]], dtype=np.int32), 0, table(1)),
    ):
        with pytest.raises(KvmeshError):
            two.runner.execute(StepBatch(99, [bad]))
    with pytest.raises(KvmeshError):
        two.runner.execute(StepBatch(99, [Slice(9, PROMPT[:3], 0, table(1))], [(0, PAGES)]))
    again = [Slice(4, PROMPT[:9], 0, table(2), (sample_of(position=9),))]
    same(two.step(*again), one.step(*again))

    # SIGTERM for all processes of a service reaches ranks too: the leader still has work for them.
    [pid] = parallel.ranks.pids
    os.kill(pid, signal.SIGTERM)
    same(two.step(*again), one.step(*again))

    # The rank stands still, so the leader waits for it in a collective; then it is killed there.
    pidfds = [open_pidfd(pid)]
    told, reasons = threading.Event(), []
    parallel.ranks.on_lost(lambda reason: (reasons.append(reason), told.set()))
    os.kill(pid, signal.SIGSTOP)
    errors: list[BaseException] = []

    def step() -> None:
        try:
            two.step(*again)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    # Not after the collective's time limit.
    assert time.monotonic() - killed < WAIT_S / 2
    assert isinstance(errors[0], Unavailable)
    assert told.wait(WAIT_S)
    assert reasons == [errors[0].message]
    assert f"pid {pid}" in reasons[0]
    assert gone(pidfds)
    with pytest.raises(Unavailable, match=f"pid {pid}"):
        two.step(*again)
    late: list[str] = []
    parallel.ranks.on_lost(late.append)
    assert late == reasons


def test_a_rank_that_hangs_is_killed_after_the_time_limit(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = start(directory)
    try:
        assert " decode/1 kvmesh." in capfd.readouterr().err, "a rank's lines do not tell whose they are"
        engine = Engine(runner)
        [pid] = runner.ranks.pids
        group = runner._shard.tp._group
        assert group.options._timeout == timedelta(seconds=WAIT_S)
        # Only now that everything has started: a busy machine may need longer for that.
        group._set_default_timeout(timedelta(seconds=2))
        pidfds = [open_pidfd(pid)]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="rank"):
            engine.step(Slice(1, PROMPT, 0, table(0, 1, 2), (sample_of(position=37),)))
        assert runner.ranks.lost
        assert gone(pidfds)
    finally:
        runner.close()


@pytest.mark.parametrize("phase", ["spawn", "meet", "load"])
def test_a_rank_that_dies_while_loading_ends_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """At once and by name, wherever the leader is: waiting for ranks to meet, or reading weights."""
    ranks = start_ranks(str(directory), 2, 1)
    pidfds = [open_pidfd(pid) for pid in ranks.pids]
    told, read, kept, killed = threading.Event(), [], [], []
    ranks.on_lost(lambda reason: told.set())

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(ranks.pids[0], signal.SIGKILL)

    def gather(kind: Kind, timeout_s: float) -> list[Frame]:
        frames = RankGroup.gather(ranks, kind, timeout_s)
        kill()
        return frames

    def store_apart(timeout_s: float, address: str = "127.0.0.1") -> tuple[object, int]:
        store, port = leader_store(timeout_s, address)
        kept.append(store)
        return member_store(port, timeout_s, address), port

    def progress(done: int, total: int) -> None:
        read.append(done)
        kill()
        assert told.wait(WAIT_S)

    if phase == "spawn":
        kill()
    elif phase == "meet":
        monkeypatch.setattr(ranks, "gather", gather)
        monkeypatch.setattr(runner_module, "leader_store", store_apart)
    with pytest.raises(Unavailable, match=r"rank 1 \(pid \d+\) ended with code -9"):
        ParallelRunner.load(
            ranks, str(directory), "fp32", threads=1, timeout_s=WAIT_S, progress=progress if phase == "load" else None
        )
    # Not after the time limit of the meeting.
    assert time.monotonic() - killed[0] < WAIT_S / 2
    assert len(read) == (phase == "load")
    assert gone(pidfds)
    # Whoever still waits for the rank's address, deaf to everything else, is let go with the store, and says so on
    # stderr, which is this test's a little longer. One that has the address tries it until the time limit, and is mute.
    kept.clear()
    for thread in threading.enumerate():
        if thread.name == "ranks-meet":
            thread.join(5.0)


def test_what_a_rank_says_last_is_the_reason_and_needs_no_step(directory: Path) -> None:
    """It is told something that it cannot do."""
    ranks = RankGroup(2, 1)
    try:
        told, reasons = threading.Event(), []
        ranks.on_lost(lambda reason: (reasons.append(reason), told.set()))
        pidfds = [open_pidfd(pid) for pid in ranks.pids]
        ranks.setup({"model": str(directory)})
        assert told.wait(WAIT_S)
        assert "ended with code 1: KeyError('logs')" in reasons[0]
        assert gone(pidfds)
    finally:
        ranks.close()


_LEADER = """
import json, sys
from kvmesh.engine.parallel.ranks import start_ranks
ranks = start_ranks(sys.argv[1], 2, 1)
from kvmesh.engine.parallel.runner import ParallelRunner
runner = ParallelRunner.load(ranks, sys.argv[1], "fp32", threads=1, timeout_s=120.0)
print(json.dumps(runner.ranks.pids), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_their_leader(directory: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", _LEADER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert leader.stdout is not None
        [pid] = json.loads(leader.stdout.readline())
        pidfds = [open_pidfd(pid)]
        leader.kill()
        assert gone(pidfds)
    finally:
        leader.kill()
        leader.wait(WAIT_S)
        leader.stdout.close()
        leader.stdin.close()


@pytest.mark.parametrize(
    ("variant", "tp", "why"),
    [
        ("plain", 3, "neither divides the 2 kv heads nor is a multiple of them; set tp to one of 1, 2, 4$"),
        ("plain", 8, "does not divide the 4 heads; set tp to one of 1, 2, 4$"),
        ("mqa", 3, "does not divide the 4 heads; set tp to one of 1, 2, 4$"),
    ],
)
def test_what_does_not_divide_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, tp: int, why: str
) -> None:
    make_tiny(tmp_path, variant)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(InvalidArgument, match=why) as caught:
        start_ranks(str(tmp_path), tp, 1)
    assert caught.value.details == {"field": "tp"}
