"""The whole of a machine's topology, read once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvmesh.transfer.topology.devices import (
    Gpu,
    NumaNode,
    RdmaDevice,
    RdmaPort,
    read_gpus,
    read_nodes,
    read_rdma_devices,
)
from kvmesh.transfer.topology.pci import Level, level

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Topology:
    """notes: what could not be read, for logs and status."""

    nics: tuple[RdmaDevice, ...]
    gpus: tuple[Gpu, ...]
    nodes: tuple[NumaNode, ...]
    notes: tuple[str, ...]

    def nic(self, name: str) -> RdmaDevice | None:
        """By name."""
        return next((nic for nic in self.nics if nic.name == name), None)

    def gpu(self, address: str) -> Gpu | None:
        """By PCI address; the domain may have four digits or the eight that CUDA prints, in either case."""
        wanted = normal_address(address)
        return next((gpu for gpu in self.gpus if normal_address(gpu.address) == wanted), None)

    def cpus(self, node: int) -> frozenset[int]:
        """CPUs of a node; empty where it is not there."""
        return next((item.cpus for item in self.nodes if item.number == node), frozenset())

    def with_open(self, names: Iterable[str], port: int = 1) -> Topology:
        """With these devices in it, and that port of them up: the library has opened them, whatever sysfs can tell here
        (in a container: little)."""
        nics = {nic.name: nic for nic in self.nics}
        for name in names:
            nic = nics.get(name) or RdmaDevice(name, None, None, ())
            if nic.port(port) is None:
                ports = (*nic.ports, RdmaPort(port, "ACTIVE", 0.0, "", {}))
                nics[name] = dataclasses.replace(nic, ports=ports)
        return dataclasses.replace(self, nics=tuple(nics.values()))

    @property
    def cpu_count(self) -> int:
        """CPUs of all nodes; 0 = not told."""
        return len(frozenset().union(*(node.cpus for node in self.nodes)))

    def gpu_level(self, gpu: Gpu, nic: RdmaDevice) -> Level:
        """Distance of a GPU and a NIC."""
        return level(gpu.pci, gpu.node, nic.pci, nic.node, nodes=len(self.nodes))

    def memory_level(self, node: int | None, nic: RdmaDevice) -> Level:
        """Distance of host memory of a node and a NIC: NODE or SYS. A NIC without a node (soft-RoCE) is in all."""
        if len(self.nodes) <= 1 or node is None or nic.node == node or nic.pci is None:
            return Level.NODE
        return Level.SYS


def read_topology(root: Path = SYSFS) -> Topology:
    """Read it all. Never raises."""
    notes: list[str] = []
    return Topology(read_rdma_devices(root, notes), read_gpus(root, notes), read_nodes(root, notes), tuple(notes))


def normal_address(address: str) -> str:
    """A PCI address with a domain of four digits, in small letters; what is none comes back as it is."""
    domain, colon, rest = address.strip().lower().partition(":")
    if not colon:
        return domain
    if ":" not in rest:
        # Bus:device.function alone: domain 0.
        return f"0000:{domain}:{rest}"
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
