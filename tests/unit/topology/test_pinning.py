"""Where threads are pinned, and where they never are."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvmesh.transfer.topology import Topology, allowed_cpus, node_of_range, pin_thread, plan_pinning, read_topology
from kvmesh.transfer.topology.pinning import Pinning
from machines import Machine, eight_gpus

EVERY = range(128)


@pytest.fixture
def large(tmp_path: Path) -> Topology:
    eight_gpus(tmp_path)
    return read_topology(tmp_path)


def one_node(root: Path, cpus: int) -> Topology:
    Machine(root).node(0, f"0-{cpus - 1}")
    return read_topology(root)


def test_the_cpus_of_the_nics_node(large: Topology) -> None:
    pinning = plan_pinning(large, [1], EVERY, enabled=True)
    assert pinning.cpus == large.cpus(1)
    assert pinning.reason == "NUMA node 1"
    assert pinning.text == "CPUs 32-63,96-127"


def test_never_outside_of_what_the_process_may_use(large: Topology) -> None:
    allowed = {1, 40, 41, 42}
    pinning = plan_pinning(large, [1], allowed, enabled=True)
    assert pinning.cpus == {40, 41, 42}


@pytest.mark.parametrize(
    ("nodes", "allowed", "enabled", "reason"),
    [
        ([1], EVERY, False, "switched off"),
        ([], EVERY, True, "no NUMA node is known"),
        ([5], EVERY, True, "no CPUs that are told"),
        ([1], {0, 1, 40}, True, "may use 1 CPUs"),
        ([1], range(8), True, "may use 0 CPUs"),
        ([0], range(8), True, "already"),
        ([0, 1], EVERY, True, "already"),
    ],
)
def test_not_pinned_with_a_reason(
    large: Topology, nodes: list[int], allowed: list[int], enabled: bool, reason: str
) -> None:
    pinning = plan_pinning(large, nodes, allowed, enabled=enabled)
    assert pinning.cpus is None
    assert reason in pinning.reason
    assert pinning.text == "not pinned"


@pytest.mark.parametrize("cpus", [1, 2, 4, 7])
def test_never_on_small_machines(tmp_path: Path, cpus: int) -> None:
    pinning = plan_pinning(one_node(tmp_path, cpus), [0], range(cpus), enabled=True)
    assert pinning.cpus is None
    assert "small machine" in pinning.reason


def test_no_numa_told(tmp_path: Path) -> None:
    empty = read_topology(tmp_path)
    assert plan_pinning(empty, [], range(4), enabled=True).cpus is None
    assert plan_pinning(empty, [0], range(64), enabled=True).cpus is None


def test_a_thread_is_pinned_and_let_go_again() -> None:
    cpus = allowed_cpus()
    one = frozenset([min(cpus)])
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (ready.set(), over.wait(60)))
    thread.start()
    try:
        assert ready.wait(30)
        native = thread.native_id
        assert native is not None
        assert pin_thread(native, Pinning(one, "test"), "test", cpus)
        assert os.sched_getaffinity(native) == one
        assert allowed_cpus() == cpus, "only that thread"
        assert pin_thread(native, Pinning(None, "test"), "test", cpus)
        assert os.sched_getaffinity(native) == cpus
        assert not pin_thread(native, Pinning(frozenset([1 << 15]), "test"), "test", cpus), (
            "no such CPU: told, not raised"
        )
    finally:
        over.set()
        thread.join(30)
    assert not pin_thread(None, Pinning(one, "test"), "test", cpus)


def test_memory_on_one_node_or_on_nobody_knows_which() -> None:
    assert node_of_range(0, 160, lambda address: 1) == 1
    assert node_of_range(0, 160, lambda address: address // 80) is None
    assert node_of_range(0, 160, lambda address: None) is None
    region = bytearray(1 << 16)
    found = node_of_range(0, 1 << 16)
    assert found is None, "an address that is not ours is no error"
    del region
