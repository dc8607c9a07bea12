"""Sizes and choices of the efa transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.topology import SYSFS
from kvmesh.transfer.transports.verbs.options import MAX_DEPTH, POLLING, spins


@dataclass(frozen=True, slots=True)
class EfaOptions:
    """device: a name as in `rdma link`; devices: several, or `auto` = those nearest to the engine's memory (as where
    neither is given); near, sysfs: see NicOptions. gid_index: -1 = choose.

    send_depth: writes in flight per link at the writer; receives: at the destination (the smaller one bounds them).
    batch: writes per doorbell. max_write: bytes of one write, 0 = what the device allows.
    polling: `events` sleeps on completion channels, `thread` spins for a while before it does, `auto` asks the machine.
    rnr_retry: tries where no receive is posted, which credits rule out; not 7, which is for ever.
    """

    device: str = ""
    devices: tuple[str, ...] = ()
    near: str = ""
    sysfs: Path = SYSFS
    port: int = 1
    gid_index: int = -1
    send_depth: int = 256
    receives: int = 256
    batch: int = 64
    max_write: int = 0
    polling: str = "auto"
    rnr_retry: int = 3

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 1, 255),
            ("gid_index", -1, 1 << 16),
            ("send_depth", 1, MAX_DEPTH),
            ("receives", 2, MAX_DEPTH),
            ("batch", 1, MAX_DEPTH),
            ("max_write", 0, 1 << 31),
            ("rnr_retry", 0, 7),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"efa: {name} must be in {low}..{high}, got {value}")
        if self.polling not in POLLING:
            raise InvalidArgument(f"efa: polling must be one of {', '.join(POLLING)}, got {self.polling!r}")

    @property
    def spins(self) -> bool:
        """Whether waiting begins with spinning."""
        return spins(self.polling)
