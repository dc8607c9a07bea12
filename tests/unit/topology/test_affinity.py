"""Which NICs are chosen, in which order, and what is said of the others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvmesh.transfer.topology import Level, Topology, nics_by_name, nics_for_gpu, nics_for_memory, read_topology
from machines import Machine, eight_gpus, flat


def names(found: object) -> list[str]:
    return [nic.name for nic in found.nics]  # type: ignore[attr-defined]


def test_each_gpu_has_the_nic_behind_its_switch(tmp_path: Path) -> None:
    eight_gpus(tmp_path)
    topology = read_topology(tmp_path)
    for index, gpu in enumerate(topology.gpus):
        found = nics_for_gpu(topology, gpu.address)
        assert names(found) == [f"mlx5_{index}"]
        assert found.nics[0].level is Level.PIX
        assert found.nics[0].node == index // 4
        assert len(found.rejected) == 9
        assert "farther away" in found.rejected[f"mlx5_{(index + 1) % 8}"]
        assert f"PIX to GPU {gpu.address}" in found.why


def test_host_memory_has_the_nics_of_its_node_without_the_slow_one(tmp_path: Path) -> None:
    eight_gpus(tmp_path)
    topology = read_topology(tmp_path)
    for node in (0, 1):
        found = nics_for_memory(topology, node)
        assert names(found) == [f"mlx5_{i}" for i in range(4 * node, 4 * node + 4)]
        assert found.rejected[f"mlx5_{8 + node}"] == "25 Gbit/s, others have 400"
        assert f"NUMA node {node}" in found.why
    everywhere = nics_for_memory(topology, None)
    assert names(everywhere) == [f"mlx5_{i}" for i in range(8)]
    assert "not known" in everywhere.why


def test_a_nic_that_is_down_is_left_out_and_the_next_best_is_taken(tmp_path: Path) -> None:
    machine = eight_gpus(tmp_path)
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "state"
    port.write_text("1: DOWN\n")
    topology = read_topology(machine.root)
    found = nics_for_gpu(topology, topology.gpus[0].address)
    assert found.rejected["mlx5_0"] == "port 1 is DOWN"
    # None behind the switch: those of the socket.
    assert sorted(names(found)) == ["mlx5_1", "mlx5_2", "mlx5_3"]
    assert found.nics[0].level is Level.NODE


def test_gpus_that_share_nics_begin_with_different_ones(tmp_path: Path) -> None:
    flat(tmp_path, gpus=4, nics=2)
    topology = read_topology(tmp_path)
    found = [names(nics_for_gpu(topology, gpu.address)) for gpu in topology.gpus]
    assert found == [["rdmap0", "rdmap1"], ["rdmap1", "rdmap0"]] * 2


def test_ties_are_broken_by_rate_then_by_name(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.node(0, "0-7")
    rates = {"mlx5_10": 200, "mlx5_2": 200, "mlx5_3": 400, "mlx5_1": 100}
    for place, (name, rate) in enumerate(rates.items()):
        machine.nic(name, f"pci0000:00/0000:00:{place:02x}.0", 0, rate=f"{rate} Gb/sec (4X)")
    found = nics_for_memory(read_topology(tmp_path), 0)
    assert names(found) == ["mlx5_3", "mlx5_2", "mlx5_10"]
    assert list(found.rejected) == ["mlx5_1"]


def test_memory_of_a_node_without_nics_takes_the_far_ones_and_says_so(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.node(0, "0-7")
    machine.node(1, "8-15")
    machine.nic("mlx5_0", "pci0000:00/0000:00:01.0", 0)
    found = nics_for_memory(read_topology(tmp_path), 1)
    assert names(found) == ["mlx5_0"]
    assert found.nics[0].level is Level.SYS
    assert "none of its own" in found.why


def test_soft_roce_is_near_to_all_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.node(0, "0-1")
    machine.node(1, "2-3")
    machine.nic("rxe0", None, rate="2.5 Gb/sec (1X SDR)")
    topology = read_topology(tmp_path)
    assert [names(nics_for_memory(topology, node)) for node in (0, 1, None)] == [["rxe0"]] * 3


def test_a_gpu_that_sysfs_does_not_show_falls_back(tmp_path: Path) -> None:
    flat(tmp_path, gpus=0)
    found = nics_for_gpu(read_topology(tmp_path), "0000:3b:00.0")
    assert names(found) == ["rdmap0", "rdmap1"]
    assert "not in sysfs" in found.why


def test_only_open_ones_are_chosen(tmp_path: Path) -> None:
    flat(tmp_path, nics=3)
    found = nics_for_memory(read_topology(tmp_path), 0, only={"rdmap1"})
    assert names(found) == ["rdmap1"]
    assert found.rejected == {"rdmap0": "not open", "rdmap2": "not open"}


def test_a_setting_names_them(tmp_path: Path) -> None:
    machine = flat(tmp_path, nics=3)
    machine.nic("rdmap9", "pci0000:00/0000:00:1e.0", state="1: DOWN")
    topology = read_topology(tmp_path)
    found = nics_by_name(topology, ["rdmap2", "rdmap0", "mlx5_7", "rdmap9"])
    assert names(found) == ["rdmap2", "rdmap0"]
    assert found.rejected == {
        "rdmap1": "not among the devices of the setting",
        "mlx5_7": "no such device",
        "rdmap9": "port 1 is DOWN",
    }
    assert nics_by_name(topology, ["mlx5_7"]).nics == ()


@pytest.mark.parametrize("seed", range(20))
def test_nearest_and_only_nearest_are_taken(tmp_path: Path, seed: int) -> None:
    """Random machines: no NIC that is left out and up is nearer than one that is taken; the order in which sysfs lists
    them does not matter."""
    draw = random.Random(seed)
    machine = Machine(tmp_path)
    for node in range(draw.randint(1, 3)):
        machine.node(node, f"{node * 8}-{node * 8 + 7}")
    buses = iter(draw.sample(range(1, 255), 40))
    for kind in ["gpu"] * draw.randint(1, 4) + ["nic"] * draw.randint(1, 8):
        host = draw.randrange(3)
        port = f"pci000{host}:00/000{host}:00:0{draw.randrange(3)}.0"
        bus = next(buses)
        switch = f"/000{host}:f0:00.0/000{host}:f1:0{draw.randrange(3)}.0" * draw.randint(0, 1)
        chain = f"{port}{switch}/000{host}:{bus:02x}:00.0"
        node = draw.choice([0, 1, -1, None])
        if kind == "gpu":
            machine.gpu(chain, node)
        else:
            rate = draw.choice(["400 Gb/sec", "200 Gb/sec", "50 Gb/sec", ""])
            machine.nic(f"mlx5_{bus}", chain, node, rate=rate, state=draw.choice(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]))
    topology = read_topology(tmp_path)
    shuffled = Topology(tuple(draw.sample(topology.nics, len(topology.nics))), topology.gpus, topology.nodes, ())
    for gpu in topology.gpus:
        found = nics_for_gpu(topology, gpu.address)
        assert names(nics_for_gpu(shuffled, gpu.address)) == names(found)
        if not found.nics:
            continue
        assert len({nic.level for nic in found.nics}) == 1
        for nic in topology.nics:
            if nic.name in found.rejected and nic.ports[0].active:
                assert topology.gpu_level(gpu, nic) >= found.nics[0].level
        rates = [nic.rate_gbps for nic in found.nics]
        assert min(rates) * 2 >= max(rates)
