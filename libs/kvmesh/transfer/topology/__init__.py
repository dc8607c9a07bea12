"""NICs, GPUs and NUMA nodes: what sysfs tells of them, which NICs serve which memory, which CPUs serve which NICs.

Pure but for reading sysfs, whose root can be another folder. Nothing here raises for what is missing or broken: it says
so in `Topology.notes` and in the reasons of a choice.
"""

from kvmesh.transfer.topology.affinity import AUTO, Affinity, Chosen, nics_by_name, nics_for_gpu, nics_for_memory
from kvmesh.transfer.topology.devices import Gpu, NumaNode, RdmaDevice, RdmaPort
from kvmesh.transfer.topology.machine import SYSFS, Topology, read_topology
from kvmesh.transfer.topology.memory import node_of_range
from kvmesh.transfer.topology.pci import Level, PciPath, level, pci_path
from kvmesh.transfer.topology.pinning import Pinning, allowed_cpus, pin_thread, plan_pinning

__all__ = [
    "AUTO",
    "SYSFS",
    "Affinity",
    "Chosen",
    "Gpu",
    "Level",
    "NumaNode",
    "PciPath",
    "Pinning",
    "RdmaDevice",
    "RdmaPort",
    "Topology",
    "allowed_cpus",
    "level",
    "nics_by_name",
    "nics_for_gpu",
    "nics_for_memory",
    "node_of_range",
    "pci_path",
    "pin_thread",
    "plan_pinning",
    "read_topology",
]
