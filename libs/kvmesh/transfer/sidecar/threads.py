"""Where the sidecar's threads run: near the NICs that they drive, or else near the engine's memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.topology import Pinning, Topology, allowed_cpus, node_of_range, pin_thread, plan_pinning
from kvmesh.transfer.topology import read_topology as read
from kvmesh.transfer.topology.sysfs import format_cpulist
from kvmesh.transfer.transports.base import EngineMemory, Transport

log = logging.getLogger(__name__)
MOVER = "mover"


class ThreadPlaces:
    """Plans and applies the pinning of the mover's thread and the transports' own. The loop's thread, which serves the
    control API, stays where the process may run. Never raises for what the kernel refuses."""

    def __init__(self, sysfs: Path, *, enabled: bool) -> None:
        self._sysfs = sysfs
        self._enabled = enabled
        self._topology: Topology | None = None
        # Of the process before anything is pinned: what is never left.
        self._allowed = allowed_cpus()
        self._pinning = Pinning(None, "not started")
        self._threads: dict[str, int | None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the topology could not be read."""
        return self._topology.notes if self._topology is not None else ()

    def settle(self, mover: Mover, transports: Iterable[Transport], memory: EngineMemory | None) -> None:
        """Pin what there is now; again whenever an engine has registered."""
        transports = list(transports)
        if self._topology is None:
            self._topology = read(self._sysfs)
        topology = self._topology
        nodes = frozenset().union(*(transport.nodes for transport in transports))
        if not nodes and memory is not None and len(topology.nodes) > 1:
            nodes = memory_nodes(memory)
        if not nodes and len(topology.nodes) == 1:
            nodes = frozenset([topology.nodes[0].number])
        before = self._pinning
        self._pinning = plan_pinning(topology, nodes, self._allowed, enabled=self._enabled)
        self._threads = {MOVER: mover.native_id}
        for transport in transports:
            self._threads.update(transport.threads())
        for name, native_id in self._threads.items():
            pin_thread(native_id, self._pinning, name, self._allowed)
        if self._pinning != before:
            names = ", ".join(self._threads)
            log.info("threads %s: %s (%s)", names, self._pinning.text, self._pinning.reason)

    def status(self) -> list[pb.ThreadStatus]:
        """For GetStatus."""
        cpus = format_cpulist(self._pinning.cpus) if self._pinning.cpus is not None else ""
        return [pb.ThreadStatus(name=name, cpus=cpus, reason=self._pinning.reason) for name in self._threads]


def memory_nodes(memory: EngineMemory) -> frozenset[int]:
    """NUMA nodes of an engine's host memory; empty where it is not told."""
    nodes = set()
    for info, region in zip(memory.infos, memory.regions, strict=True):
        if info.memory not in ("", "host"):
            continue
        view = region.view()
        node = node_of_range(int(view.__array_interface__["data"][0]), region.nbytes)
        if node is not None:
            nodes.add(node)
    return frozenset(nodes)
