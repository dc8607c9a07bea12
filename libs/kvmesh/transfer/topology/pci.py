"""Where a device sits in the PCI tree, and how far two of them are from one another.

sysfs shows the tree as folders: `/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0/…` is host bridge, root port, the
upstream port of a switch, and so on to the device, which is the last PCI address of the path.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from pathlib import Path

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", re.ASCII)
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


class Level(enum.IntEnum):
    """Distance of two devices, nearest first, in the words of `nvidia-smi topo`."""

    PIX = 0
    """At most one switch between them."""
    PXB = 1
    """Several switches, no host bridge."""
    PHB = 2
    """Through a host bridge."""
    NODE = 3
    """Through host bridges of one NUMA node."""
    SYS = 4
    """Across NUMA nodes, or nobody knows."""


@dataclass(frozen=True, slots=True)
class PciPath:
    """host: its host bridge; chain: PCI addresses from the root port to the device itself, which is the last."""

    host: str
    chain: tuple[str, ...]

    @property
    def address(self) -> str:
        """Domain:bus:device.function."""
        return self.chain[-1]


def pci_path(path: Path) -> PciPath | None:
    """Of a device's folder or a link to it; None where it is no PCI device (soft-RoCE, or no such path)."""
    host = ""
    chain: list[str] = []
    # Not Path.resolve: it raises on a loop of links.
    for part in os.path.realpath(path).split(os.sep):
        if not host:
            host = part if _HOST_BRIDGE.fullmatch(part) else ""
        elif _ADDRESS.fullmatch(part):
            chain.append(part)
        elif chain:
            # What hangs below the device (a net device, an auxiliary one).
            break
    return PciPath(host, tuple(chain)) if chain else None


def level(a: PciPath | None, a_node: int | None, b: PciPath | None, b_node: int | None, *, nodes: int = 1) -> Level:
    """Distance of two devices on these NUMA nodes (None: not told). nodes: of the machine; with one, all are in it."""
    if a is not None and b is not None and a.host == b.host:
        common = 0
        for mine, other in zip(a.chain, b.chain, strict=False):
            if mine != other:
                break
            common += 1
        if common:
            # Ports between each device and what they share: a switch counts one (its downstream port).
            between = max(len(a.chain), len(b.chain)) - common - 1
            return Level.PIX if between <= 1 else Level.PXB
        return Level.PHB
    if nodes <= 1 or (a_node is not None and a_node == b_node):
        return Level.NODE
    return Level.SYS
