"""RDMA devices, GPUs and NUMA nodes of this machine, as sysfs tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvmesh.transfer.topology.pci import PciPath, pci_path
from kvmesh.transfer.topology.sysfs import MAX_CPUS, link_name, names_in, natural, parse_cpulist, read_int, read_text

MAX_GIDS = 64
NVIDIA = 0x10DE
# VGA controller and 3D controller.
GPU_CLASSES = (0x0300, 0x0302)
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", re.ASCII)
_NODE = re.compile(r"node(\d{1,5})", re.ASCII)
_ZERO_GID = ":".join(["0000"] * 8)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """state: as sysfs has it, without the number. rate_gbps: 0 = not told. gids: index to (text, type); type "" =
    not told. Empty entries are left out."""

    number: int
    state: str
    rate_gbps: float
    link_layer: str
    gids: dict[int, tuple[str, str]]

    @property
    def active(self) -> bool:
        """Whether bytes can go through it."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """node: NUMA node, None = not told. pci: None for soft-RoCE and the like. driver: of the kernel, "" = not told."""

    name: str
    node: int | None
    pci: PciPath | None
    ports: tuple[RdmaPort, ...]
    driver: str = ""

    def port(self, number: int) -> RdmaPort | None:
        """By number, from 1."""
        return next((port for port in self.ports if port.number == number), None)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its PCI address."""

    address: str
    node: int | None
    pci: PciPath | None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """cpus: empty for a node of memory alone. distance: to every node, by the firmware's numbers (10 = itself)."""

    number: int
    cpus: frozenset[int]
    distance: tuple[int, ...]


def read_rdma_devices(root: Path, notes: list[str]) -> tuple[RdmaDevice, ...]:
    """All of `class/infiniband`. What is broken is left out or incomplete, and told in `notes`."""
    folder = root / "class" / "infiniband"
    if not folder.is_dir():
        notes.append("no RDMA device: there is no class/infiniband")
        return ()
    devices = []
    for name in names_in(folder):
        base = folder / name
        pci = pci_path(base / "device")
        node = _node_of(base / "device")
        ports = tuple(
            _port(base / "ports" / number, int(number))
            for number in names_in(base / "ports")
            if number.isdecimal() and number.isascii() and len(number) <= 3
        )
        if not ports:
            notes.append(f"{name}: no ports can be read")
        if pci is None:
            notes.append(f"{name}: no PCI device")
        elif node is None:
            notes.append(f"{name}: its NUMA node is not told")
        devices.append(RdmaDevice(name, node, pci, ports, link_name(base / "device" / "driver")))
    if not devices:
        notes.append("no RDMA device: class/infiniband is empty")
    return tuple(devices)


def read_gpus(root: Path, notes: list[str]) -> tuple[Gpu, ...]:
    """NVIDIA's display and 3D controllers."""
    folder = root / "bus" / "pci" / "devices"
    gpus = []
    for address in names_in(folder):
        base = folder / address
        vendor, kind = read_int(base / "vendor"), read_int(base / "class")
        if vendor != NVIDIA or kind is None or kind >> 8 not in GPU_CLASSES:
            continue
        node = _node_of(base)
        if node is None:
            notes.append(f"GPU {address}: its NUMA node is not told")
        gpus.append(Gpu(address, node, pci_path(base)))
    return tuple(gpus)


def read_nodes(root: Path, notes: list[str]) -> tuple[NumaNode, ...]:
    """NUMA nodes, by number."""
    folder = root / "devices" / "system" / "node"
    nodes = []
    for name in names_in(folder):
        match = _NODE.fullmatch(name)
        if match is None:
            continue
        text = read_text(folder / name / "cpulist")
        cpus = None if text is None else parse_cpulist(text)
        if cpus is None:
            notes.append(f"{name}: its CPUs are not told")
        distances = (read_text(folder / name / "distance") or "").split()
        numbers = tuple(int(x) for x in distances if x.isdecimal() and x.isascii() and len(x) <= 5)
        whole = len(numbers) == len(distances) <= MAX_CPUS
        nodes.append(NumaNode(int(match[1]), cpus or frozenset(), numbers if whole else ()))
    if not nodes:
        notes.append("NUMA nodes are not told: taken for one")
    return tuple(sorted(nodes, key=lambda node: node.number))


def _node_of(device: Path) -> int | None:
    node = read_int(device / "numa_node")
    return node if node is not None and 0 <= node < MAX_CPUS else None


def _port(base: Path, number: int) -> RdmaPort:
    state = read_text(base / "state") or ""
    rate = _RATE.match(read_text(base / "rate") or "")
    gids: dict[int, tuple[str, str]] = {}
    indices = [x for x in names_in(base / "gids") if x.isdecimal() and x.isascii() and len(x) <= 5]
    for index in sorted(indices, key=natural)[:MAX_GIDS]:
        gid = read_text(base / "gids" / index)
        if gid and gid != _ZERO_GID:
            gids[int(index)] = (gid, read_text(base / "gid_attrs" / "types" / index) or "")
    return RdmaPort(
        number,
        state.rpartition(":")[2].strip(),
        float(rate[1]) if rate else 0.0,
        read_text(base / "link_layer") or "",
        gids,
    )
