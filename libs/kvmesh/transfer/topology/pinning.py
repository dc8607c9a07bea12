"""CPUs for the threads that move and poll: those of the NICs' NUMA nodes, within what this process may use."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass

from kvmesh.transfer.topology.machine import Topology
from kvmesh.transfer.topology.sysfs import format_cpulist

log = logging.getLogger(__name__)
# On fewer, a pinned thread is in the way of others, and they of it.
LARGE_MACHINE_CPUS = 8
MIN_CPUS = 2


@dataclass(frozen=True, slots=True)
class Pinning:
    """cpus: where the threads may run, None = where the process may. reason: why (not)."""

    cpus: frozenset[int] | None
    reason: str

    @property
    def text(self) -> str:
        """For people."""
        return "not pinned" if self.cpus is None else f"CPUs {format_cpulist(self.cpus)}"


def plan_pinning(topology: Topology, nodes: Collection[int], allowed: Collection[int], *, enabled: bool) -> Pinning:
    """nodes: of the NICs (or of the memory). allowed: CPUs of the process's own set, which is never left."""
    if not enabled:
        return Pinning(None, "switched off")
    cpus = frozenset(allowed)
    if len(topology.nodes) <= 1 and max(topology.cpu_count, len(cpus)) < LARGE_MACHINE_CPUS:
        return Pinning(None, f"a small machine ({len(cpus)} CPUs, one NUMA node)")
    wanted = sorted(set(nodes))
    if not wanted:
        return Pinning(None, "no NUMA node is known for its NICs or memory")
    where = ", ".join(str(node) for node in wanted)
    near = frozenset().union(*(topology.cpus(node) for node in wanted))
    if not near:
        return Pinning(None, f"NUMA node {where} has no CPUs that are told")
    both = near & cpus
    if len(both) < MIN_CPUS:
        return Pinning(None, f"this process may use {len(both)} CPUs of NUMA node {where}")
    if both == cpus:
        return Pinning(None, f"all CPUs of this process are of NUMA node {where} already")
    return Pinning(both, f"NUMA node {where}")


def allowed_cpus() -> frozenset[int]:
    """Those of this process."""
    return frozenset(os.sched_getaffinity(0))


def pin_thread(native_id: int | None, pinning: Pinning, name: str, back_to: Collection[int]) -> bool:
    """Apply it to a thread of this process. back_to: the process's own set, for one that is not pinned any more. False
    where the kernel refuses (told in the log)."""
    if native_id is None:
        return False
    cpus = back_to if pinning.cpus is None else pinning.cpus
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(native_id) == set(cpus):
            return True
    try:
        os.sched_setaffinity(native_id, cpus)
    except OSError as error:
        log.warning("thread %s cannot be pinned to %s: %s", name, pinning.text, error.strerror)
        return False
    return True
