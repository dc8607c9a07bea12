"""What is read of sysfs, and that nothing in it can make the reader raise."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transfer.topology import Level, level, nics_for_gpu, nics_for_memory, pci_path, read_topology
from kvmesh.transfer.topology.sysfs import MAX_CPUS, format_cpulist, natural, parse_cpulist
from machines import IPV4_GID, Machine, eight_gpus, flat


def test_a_large_machine_is_read(tmp_path: Path) -> None:
    eight_gpus(tmp_path)
    topology = read_topology(tmp_path)
    assert [nic.name for nic in topology.nics] == [f"mlx5_{i}" for i in range(10)]
    nic = topology.nic("mlx5_5")
    assert nic is not None
    assert nic.node == 1
    assert nic.pci is not None
    assert nic.pci.address == "0000:64:00.0"
    port = nic.port(1)
    assert port is not None
    assert (port.active, port.state, port.rate_gbps, port.link_layer) == (True, "ACTIVE", 400.0, "Ethernet")
    assert port.gids == {3: (IPV4_GID, "RoCE v2")}, "empty entries are left out"
    assert [gpu.address for gpu in topology.gpus][:2] == ["0000:13:00.0", "0000:23:00.0"]
    assert topology.cpus(1) == frozenset([*range(32, 64), *range(96, 128)])
    assert topology.nodes[0].distance == (10, 21)
    assert topology.cpu_count == 128
    assert topology.notes == ()


def test_ten_comes_after_two(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("mlx5_10", "mlx5_2", "mlx5_1"):
        machine.nic(name, None)
    assert [nic.name for nic in read_topology(tmp_path).nics] == ["mlx5_1", "mlx5_2", "mlx5_10"]


def test_addresses_as_cuda_prints_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("pci0000:c0/0000:c0:01.0/0000:c1:00.0")
    topology = read_topology(tmp_path)
    for text in ("0000:c1:00.0", "00000000:C1:00.0", "c1:00.0", " 0000:C1:00.0\n"):
        assert topology.gpu(text) is topology.gpus[0], text
    assert topology.gpu("0001:c1:00.0") is None
    assert topology.gpu("") is None


def test_only_gpus_of_the_vendor_are_gpus(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("pci0000:00/0000:00:01.0", kind="0x030000")
    machine.gpu("pci0000:00/0000:00:02.0", kind="0x040300")
    machine.pci("pci0000:00/0000:00:03.0", vendor="0x1234", kind="0x030200", node=0)
    assert [gpu.address for gpu in read_topology(tmp_path).gpus] == ["0000:00:01.0"]


@pytest.mark.parametrize(
    ("a", "b", "nodes", "want"),
    [
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", "same switch", 2, Level.PIX),
        ("pci0000:10/0000:10:01.0/0000:14:00.0", "two functions", 2, Level.PIX),
        (
            "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0/0000:14:00.0/0000:15:00.0",
            "deep",
            2,
            Level.PXB,
        ),
        ("pci0000:10/0000:10:01.0/0000:11:00.0", "root ports", 2, Level.PHB),
        ("pci0000:10/0000:10:01.0/0000:11:00.0", "hosts", 2, Level.NODE),
        ("pci0000:10/0000:10:01.0/0000:11:00.0", "sockets", 2, Level.SYS),
        ("pci0000:10/0000:10:01.0/0000:11:00.0", "unknown", 2, Level.SYS),
        ("pci0000:10/0000:10:01.0/0000:11:00.0", "unknown", 1, Level.NODE),
    ],
)
def test_levels(a: str, b: str, nodes: int, want: Level) -> None:
    others = {
        "same switch": ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:16:00.0", 0),
        "two functions": ("pci0000:10/0000:10:01.0/0000:14:00.1", 0),
        "deep": ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:16:00.0", 0),
        "root ports": ("pci0000:10/0000:10:02.0/0000:16:00.0", 0),
        "hosts": ("pci0000:20/0000:20:02.0/0000:21:00.0", 0),
        "sockets": ("pci0000:20/0000:20:02.0/0000:21:00.0", 1),
        "unknown": ("pci0000:20/0000:20:02.0/0000:21:00.0", None),
    }
    chain, node = others[b]
    first, second = pci_path(Path("/nowhere/devices") / a), pci_path(Path("/nowhere/devices") / chain)
    assert first is not None
    assert second is not None
    assert level(first, 0, second, node, nodes=nodes) == want
    assert level(second, node, first, 0, nodes=nodes) == want


def test_no_infiniband_at_all(tmp_path: Path) -> None:
    topology = read_topology(tmp_path)
    assert (topology.nics, topology.gpus, topology.nodes) == ((), (), ())
    assert any("no RDMA device" in note for note in topology.notes)
    found = nics_for_memory(topology, 0)
    assert found.nics == ()
    assert "no RDMA device" in found.why


def test_partial_trees_say_what_is_missing(tmp_path: Path) -> None:
    machine = flat(tmp_path)
    machine.nic("rxe0", None)
    (tmp_path / "class" / "infiniband" / "broken0").mkdir()
    os.symlink("loop", tmp_path / "class" / "infiniband" / "loop")
    topology = read_topology(tmp_path)
    notes = " | ".join(topology.notes)
    assert "rdmap0: its NUMA node is not told" in notes
    assert "rxe0: no PCI device" in notes
    assert "broken0: no ports" in notes
    assert "GPU 0000:00:04.0: its NUMA node is not told" in notes
    rejected = nics_for_memory(topology, 0).rejected
    assert rejected["broken0"] == rejected["loop"] == "has no port 1"


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_makes_the_reader_raise(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    (eight_gpus if seed % 2 else flat)(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    for path in draw.sample(files, len(files) // 2):
        damage = draw.randrange(5)
        if damage == 0:
            path.unlink()
        elif damage == 1:
            path.write_bytes(draw.randbytes(draw.randrange(200)))
        elif damage == 2:
            path.write_text(
                draw.choice(["", "-1", "0x", "9" * 40, "4294967295", "٣", "1-", "5-2", "a b c", "0-99999999"])
            )
        elif damage == 3:
            path.unlink()
            path.symlink_to(path.name)
        else:
            path.unlink()
            path.mkdir()
    topology = read_topology(tmp_path)
    for node in (None, 0, 1, 7):
        found = nics_for_memory(topology, node)
        assert found.why
        assert {nic.name for nic in found.nics}.isdisjoint(found.rejected)
        assert len(found.nics) + len(found.rejected) == len(topology.nics)
    for address in [*(gpu.address for gpu in topology.gpus), "0000:ff:00.0", "nonsense"]:
        found = nics_for_gpu(topology, address)
        assert found.why
        assert len(found.nics) + len(found.rejected) == len(topology.nics)


@given(st.frozensets(st.integers(0, 300)))
def test_cpulists_come_back(cpus: frozenset[int]) -> None:
    assert parse_cpulist(format_cpulist(cpus)) == cpus


@given(st.text(alphabet="0123456789-, a٣", max_size=30))
def test_a_cpulist_is_a_set_or_nonsense(text: str) -> None:
    found = parse_cpulist(text)
    assert found is None or all(0 <= cpu < MAX_CPUS for cpu in found)


def test_cpulists_with_too_many_are_nonsense() -> None:
    assert parse_cpulist("0-99999999") is None
    assert parse_cpulist("3-1") is None
    assert parse_cpulist("") == frozenset()


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    forward = sorted(names, key=natural)
    names.reverse()
    assert sorted(names, key=natural) == forward, "the order does not depend on what was first"
