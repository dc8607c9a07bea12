"""The fake keeps the transports' promises even while everything goes wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.transports.base import Write
from kvmesh.transfer.transports.fake import FakeOutbound, FaultOptions, VirtualClock


class Net:
    """A fake link that records what lands and what is told, and when."""

    def __init__(self, options: FaultOptions) -> None:
        self.clock = VirtualClock()
        self.landed: list[tuple[float, int, int]] = []
        self.told: Counter[int] = Counter()
        self.out = FakeOutbound(options, self.land, self.tell, clock=self.clock)
        self.done: dict[int, tuple[float, str]] = {}
        self.duplicates = 0

    def land(self, write: Write, first: int, last: int) -> int:
        self.landed.append((self.clock(), write.context, last - first))
        return sum(write.length[first:last])

    def tell(self, immediate: int, nbytes: int) -> None:
        self.told[immediate] += nbytes

    def post(self, context: int, runs: int = 4, immediate: int = 1) -> None:
        offsets = list(range(0, runs * 8, 8))
        self.out.post(Write(context, immediate, 0, 0, offsets, offsets, [8] * runs, 8 * runs))

    def run(self, seconds: float, step: float = 0.1) -> None:
        for _ in range(int(seconds / step)):
            for completion in self.out.poll(1 << 20):
                if completion.context in self.done:
                    self.duplicates += 1
                else:
                    self.done[completion.context] = (self.clock(), completion.error)
            self.clock.advance(step)


faults = st.builds(
    FaultOptions,
    seed=st.integers(0, 1000),
    delay_s=st.sampled_from([(0.0, 0.0), (0.0, 2.0), (1.0, 3.0)]),
    pieces=st.integers(1, 5),
    error_rate=st.sampled_from([0.0, 0.3]),
    duplicate_rate=st.sampled_from([0.0, 0.5]),
    completion_delay_s=st.sampled_from([(0.0, 0.0), (0.0, 1.0)]),
    arrival_delay_s=st.sampled_from([(0.0, 0.0), (0.0, 2.0)]),
)


@given(options=faults, writes=st.integers(1, 12), stop=st.floats(0, 3), how=st.sampled_from(["run", "flush", "fence"]))
@settings(deadline=None)
def test_promises(options: FaultOptions, writes: int, stop: float, how: str) -> None:
    net = Net(options)
    for context in range(writes):
        net.post(context)
    net.run(stop)
    if how == "flush":
        net.out.flush(1)
    elif how == "fence":
        net.out.fence("over")
    net.run(30)
    # 1: each write completes, and says so once but for the duplicates that were asked for.
    assert set(net.done) == set(range(writes))
    assert net.duplicates == 0 or options.duplicate_rate
    landed: Counter[int] = Counter()
    for at, context, runs in net.landed:
        landed[context] += runs
        # 2: nothing of it lands after its completion.
        assert at <= net.done[context][0] + 1e-9
    for context, (_, error) in net.done.items():
        assert error or landed[context] == 4
    # 3: what is told adds up to what has landed.
    assert net.told[1] == 8 * sum(landed.values())


def test_same_seed_same_fate() -> None:
    options = FaultOptions(seed=3, delay_s=(0.0, 2.0), pieces=4, error_rate=0.3, duplicate_rate=0.3)
    nets = [Net(options) for _ in range(2)]
    for net in nets:
        for context in range(20):
            net.post(context)
        net.run(10)
    assert nets[0].landed == nets[1].landed
    assert nets[0].done == nets[1].done


def test_delays_reorder() -> None:
    net = Net(FaultOptions(seed=1, delay_s=(0.0, 5.0)))
    for context in range(20):
        net.post(context)
    net.run(10)
    order = [context for _, context, _ in net.landed]
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


def test_stale_counts_come_only_in_a_later_generation() -> None:
    net = Net(FaultOptions(seed=1, stale_rate=1.0))
    old, new = pack(5, 1), pack(5, 2)
    net.post(1, immediate=old)
    net.run(5)
    assert net.told[old] == 32
    net.post(2, immediate=new)
    net.run(5)
    assert net.told[new] == 32
    assert net.told[old] == 64


def test_death_and_hold() -> None:
    net = Net(FaultOptions(die_after_writes=3))
    for context in range(5):
        net.post(context)
    assert net.out.broken
    net.run(1)
    assert {error for _, error in net.done.values()} == {"the fake peer died"}
    held = Net(FaultOptions(hold_after_writes=2))
    held.post(0)
    held.post(1)
    held.run(100, step=1.0)
    assert set(held.done) == {0}
    held.out.flush(1)
    held.run(1)
    assert held.done[1][1] == "flushed"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[]", "JSON object"),
        ("{", "cannot read"),
        ('{"speling": 1}', "'speling' is not one of"),
        ('{"error_rate": 2}', "error_rate"),
        ('{"delay_s": [2, 1]}', "delay_s"),
        ('{"pieces": 0}', "pieces"),
        ('{"pieces": "many"}', "faults"),
    ],
)
def test_bad_fault_files(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=match):
        FaultOptions.load(path)


def test_fault_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"seed": 4, "delay_s": [0, 0.5], "pieces": 3}))
    assert FaultOptions.load(path) == FaultOptions(seed=4, delay_s=(0, 0.5), pieces=3)
