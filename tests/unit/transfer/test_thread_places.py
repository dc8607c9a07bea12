"""Where the sidecar's threads are put: by the NICs' nodes, else by the memory's, never where it makes no sense."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.sidecar import threads
from kvmesh.transfer.sidecar.threads import ThreadPlaces, memory_nodes

NODE0, NODE1 = frozenset(range(8)), frozenset(range(8, 16))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was asked of the kernel, on a machine of 16 CPUs."""
    asked: dict[str, Any] = {}

    def pin(native_id: int | None, pinning: Any, name: str, back_to: frozenset[int]) -> bool:
        asked[name] = (native_id, back_to if pinning.cpus is None else pinning.cpus)
        return True

    monkeypatch.setattr(threads, "pin_thread", pin)
    monkeypatch.setattr(threads, "allowed_cpus", lambda: NODE0 | NODE1)
    return asked


def nodes(root: Path, *cpulists: str) -> Path:
    for number, cpus in enumerate(cpulists):
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return root


def transport(*where: int, poller: int | None = None) -> Any:
    own = [("verbs poller", poller)] if poller is not None else []
    return SimpleNamespace(nodes=frozenset(where), threads=lambda: own)


MOVER: Any = SimpleNamespace(native_id=71)


def test_near_the_nics_of_all_transports(tmp_path: Path, pinned: dict[str, Any]) -> None:
    places = ThreadPlaces(nodes(tmp_path, "0-7", "8-15"), enabled=True)
    places.settle(MOVER, [transport(), transport(1, poller=72)], None)
    assert pinned == {"mover": (71, NODE1), "verbs poller": (72, NODE1)}
    assert [(item.name, item.cpus, item.reason) for item in places.status()] == [
        ("mover", "8-15", "NUMA node 1"),
        ("verbs poller", "8-15", "NUMA node 1"),
    ]


def test_an_engine_whose_nics_are_elsewhere_moves_them(tmp_path: Path, pinned: dict[str, Any]) -> None:
    places = ThreadPlaces(nodes(tmp_path, "0-7", "8-15"), enabled=True)
    places.settle(MOVER, [transport(1)], None)
    places.settle(MOVER, [transport(0)], None)
    assert pinned["mover"] == (71, NODE0)
    places.settle(MOVER, [transport(0, 1)], None)
    assert pinned["mover"] == (71, NODE0 | NODE1), "let go again"


def test_without_nics_near_the_memory(tmp_path: Path, pinned: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "node_of_range", lambda address, nbytes: 1)
    region = Region.create("r", 4096)
    memory: Any = SimpleNamespace(infos=[pb.RegionInfo(group="main")], regions=[region])
    places = ThreadPlaces(nodes(tmp_path, "0-7", "8-15"), enabled=True)
    places.settle(MOVER, [transport()], None)
    assert pinned["mover"] == (71, NODE0 | NODE1), "nothing is known yet"
    places.settle(MOVER, [transport()], memory)
    assert pinned["mover"] == (71, NODE1)
    region.close()


def test_device_memory_is_not_looked_at() -> None:
    memory: Any = SimpleNamespace(infos=[pb.RegionInfo(group="main", memory="cuda")], regions=[object()])
    assert memory_nodes(memory) == frozenset()


def test_switched_off_and_small_machines(
    tmp_path: Path, pinned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ThreadPlaces(nodes(tmp_path / "a", "0-7", "8-15"), enabled=False)
    places.settle(MOVER, [transport(1)], None)
    assert pinned["mover"] == (71, NODE0 | NODE1)
    assert [(item.cpus, item.reason) for item in places.status()] == [("", "switched off")]
    monkeypatch.setattr(threads, "allowed_cpus", lambda: frozenset([0, 1]))
    places = ThreadPlaces(nodes(tmp_path / "b", "0-1"), enabled=True)
    places.settle(MOVER, [transport(0)], None)
    assert pinned["mover"] == (71, {0, 1})
    assert "small machine" in places.status()[0].reason


def test_no_sysfs_at_all(tmp_path: Path, pinned: dict[str, Any]) -> None:
    places = ThreadPlaces(tmp_path, enabled=True)
    assert (places.status(), places.notes) == ([], ())
    places.settle(MOVER, [transport()], None)
    assert pinned["mover"] == (71, NODE0 | NODE1)
    assert any("NUMA" in note for note in places.notes)
