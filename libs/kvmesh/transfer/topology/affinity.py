"""Which NICs serve which memory: those at the least distance, all of them, in a stable order.

A GPU takes the nearest NICs; GPUs that share the same ones begin with different ones. Host memory takes the NICs of its
NUMA node. Where none is near, the far ones are used and it is said. Of those at one distance, a NIC of less than half
the best rate is left out: a write would end when its part does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvmesh.transfer.topology.devices import RdmaDevice
from kvmesh.transfer.topology.machine import Topology
from kvmesh.transfer.topology.pci import Level
from kvmesh.transfer.topology.sysfs import natural

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A NIC that is used. rate_gbps: 0 = not told."""

    name: str
    node: int | None
    level: Level
    rate_gbps: float


@dataclass(frozen=True, slots=True)
class Affinity:
    """nics: to be used, best first. rejected: the others, by name, each with its reason. why: of the choice."""

    nics: tuple[Chosen, ...]
    rejected: Mapping[str, str]
    why: str


def nics_for_gpu(topology: Topology, address: str, *, port: int = 1, only: Collection[str] | None = None) -> Affinity:
    """The NICs of a GPU, by its PCI address. only: names that may be chosen (None: all)."""
    gpu = topology.gpu(address)
    if gpu is None:
        found = nics_for_memory(topology, None, port=port, only=only)
        return Affinity(found.nics, found.rejected, f"GPU {address} is not in sysfs: {found.why}")
    levels = {nic.name: topology.gpu_level(gpu, nic) for nic in topology.nics}
    chosen = _nearest(topology, levels, port, only)
    if not chosen.nics:
        return chosen
    # GPUs for which the choice is the same begin with different NICs.
    names = {nic.name for nic in chosen.nics}
    alike = [
        other.address
        for other in topology.gpus
        if {
            nic.name
            for nic in _nearest(
                topology, {nic.name: topology.gpu_level(other, nic) for nic in topology.nics}, port, only
            ).nics
        }
        == names
    ]
    turn = alike.index(gpu.address) % len(chosen.nics)
    nics = chosen.nics[turn:] + chosen.nics[:turn]
    return Affinity(nics, chosen.rejected, f"{_names(nics)}: {nics[0].level.name} to GPU {gpu.address}")


def nics_for_memory(
    topology: Topology, node: int | None, *, port: int = 1, only: Collection[str] | None = None
) -> Affinity:
    """The NICs of host memory on a NUMA node (None: not known, or on several)."""
    levels = {nic.name: topology.memory_level(node, nic) for nic in topology.nics}
    chosen = _nearest(topology, levels, port, only)
    if not chosen.nics:
        return chosen
    if len(topology.nodes) <= 1:
        where = "one NUMA node"
    elif node is None:
        where = "memory whose NUMA node is not known"
    else:
        where = f"memory of NUMA node {node}"
        if chosen.nics[0].level is Level.SYS:
            where += " (which has none of its own)"
    return Affinity(chosen.nics, chosen.rejected, f"{_names(chosen.nics)}: {where}")


def nics_by_name(topology: Topology, names: Collection[str], *, port: int = 1) -> Affinity:
    """Those that a setting names, in its order."""
    nics = []
    rejected = {nic.name: "not among the devices of the setting" for nic in topology.nics if nic.name not in names}
    for name in names:
        nic = topology.nic(name)
        if nic is None:
            rejected[name] = "no such device"
            continue
        reason = _down(nic, port)
        if reason:
            rejected[name] = reason
        else:
            nics.append(_chosen(nic, port, topology.memory_level(None, nic)))
    why = f"{_names(nics)}: by setting" if nics else "none of the devices of the setting can be used"
    return Affinity(tuple(nics), rejected, why)


def _nearest(topology: Topology, levels: Mapping[str, Level], port: int, only: Collection[str] | None) -> Affinity:
    rejected: dict[str, str] = {}
    candidates: list[Chosen] = []
    for nic in topology.nics:
        reason = _down(nic, port)
        if only is not None and nic.name not in only:
            reason = "not open"
        if reason:
            rejected[nic.name] = reason
        else:
            candidates.append(_chosen(nic, port, levels[nic.name]))
    if not candidates:
        return Affinity((), rejected, topology.notes[0] if not topology.nics and topology.notes else "no NIC is up")
    nearest = min(item.level for item in candidates)
    near = [item for item in candidates if item.level == nearest]
    best = max(item.rate_gbps for item in near)
    nics = []
    for item in candidates:
        if item.level != nearest:
            rejected[item.name] = f"farther away ({item.level.name}, others {nearest.name})"
        elif item.rate_gbps * 2 < best:
            rejected[item.name] = f"{item.rate_gbps:g} Gbit/s, others have {best:g}"
        else:
            nics.append(item)
    nics.sort(key=lambda item: (-item.rate_gbps, natural(item.name)))
    return Affinity(tuple(nics), rejected, "")


def _chosen(nic: RdmaDevice, port: int, level: Level) -> Chosen:
    found = nic.port(port)
    return Chosen(nic.name, nic.node, level, found.rate_gbps if found is not None else 0.0)


def _down(nic: RdmaDevice, port: int) -> str:
    found = nic.port(port)
    if found is None:
        return f"has no port {port}"
    return "" if found.active else f"port {port} is {found.state or 'of unknown state'}"


def _names(nics: Collection[Chosen]) -> str:
    return ", ".join(nic.name for nic in nics)
