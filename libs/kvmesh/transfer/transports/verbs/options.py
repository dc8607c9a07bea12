"""Sizes and choices of the verbs transport."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.topology import SYSFS

MAX_QPS = 16
MAX_DEPTH = 4096
# From so many cores on, one may spin for the network.
LARGE_MACHINE_CPUS = 16
POLLING = ("auto", "events", "thread")


@dataclass(frozen=True, slots=True)
class VerbsOptions:
    """device: a name as in `rdma link`; devices: several, or `auto` = those nearest to the engine's memory (as where
    neither is given); near, sysfs: see NicOptions. gid_index: -1 = choose.

    qps: queue pairs per link. send_depth: work requests per queue pair. receives: runs in flight per queue pair, the
    size of its mailbox. run_rows, run_bytes: at most so much in a run, which one write-with-immediate closes.
    polling: `events` sleeps on completion channels, `thread` spins for a while before it does, `auto` asks the machine.
    retry_count: not 7, which soft-RoCE takes for ever; timeout_exponent: 4.096 µs * 2^n until the first retry.
    """

    device: str = ""
    devices: tuple[str, ...] = ()
    near: str = ""
    sysfs: Path = SYSFS
    port: int = 1
    gid_index: int = -1
    qps: int = 4
    send_depth: int = 256
    receives: int = 32
    run_rows: int = 64
    run_bytes: int = 4 << 20
    polling: str = "auto"
    retry_count: int = 3
    timeout_exponent: int = 14
    drain_timeout_s: float = 0.25

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 1, 255),
            ("gid_index", -1, 1 << 16),
            ("qps", 1, MAX_QPS),
            ("send_depth", 2, MAX_DEPTH),
            ("receives", 2, MAX_DEPTH),
            ("run_rows", 1, MAX_DEPTH),
            ("run_bytes", 1, 1 << 40),
            ("retry_count", 0, 7),
            ("timeout_exponent", 1, 31),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"verbs: {name} must be in {low}..{high}, got {value}")
        if self.polling not in POLLING:
            raise InvalidArgument(f"verbs: polling must be one of {', '.join(POLLING)}, got {self.polling!r}")

    @property
    def spins(self) -> bool:
        """Whether waiting begins with spinning."""
        return spins(self.polling)


def spins(polling: str) -> bool:
    """What a choice of POLLING means on this machine."""
    if polling == "auto":
        return len(os.sched_getaffinity(0)) >= LARGE_MACHINE_CPUS
    return polling == "thread"
