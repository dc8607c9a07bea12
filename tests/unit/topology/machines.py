"""Fabricated sysfs trees."""

from __future__ import annotations

import os
from pathlib import Path

IPV4_GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
ZERO_GID = ":".join(["0000"] * 8)


class Machine:
    """A sysfs tree under a folder. PCI devices are given by host bridge and chain, as in the real one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "class" / "infiniband").mkdir(parents=True)
        (root / "bus" / "pci" / "devices").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def node(self, number: int, cpus: str, distance: str = "") -> None:
        self.write(f"devices/system/node/node{number}/cpulist", cpus)
        self.write(f"devices/system/node/node{number}/distance", distance)

    def pci(self, chain: str, *, vendor: str, kind: str, node: int | None) -> str:
        """chain: `pci0000:40/0000:40:01.0/0000:41:00.0`; returns the folder."""
        path = f"devices/{chain}"
        self.write(f"{path}/vendor", vendor)
        self.write(f"{path}/class", kind)
        if node is not None:
            self.write(f"{path}/numa_node", str(node))
        link = self.root / "bus" / "pci" / "devices" / chain.rpartition("/")[2]
        os.symlink(os.path.relpath(self.root / path, link.parent), link)
        return path

    def gpu(self, chain: str, node: int | None = 0, kind: str = "0x030200") -> None:
        self.pci(chain, vendor="0x10de", kind=kind, node=node)

    def nic(
        self,
        name: str,
        chain: str | None,
        node: int | None = 0,
        *,
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        layer: str = "Ethernet",
    ) -> None:
        """chain None: a virtual device."""
        if chain is None:
            base = f"devices/virtual/infiniband/{name}"
        else:
            device = self.pci(chain, vendor="0x15b3", kind="0x020000", node=node)
            base = f"{device}/infiniband/{name}"
        port = f"{base}/ports/1"
        for file, text in (("state", state), ("rate", rate), ("link_layer", layer), ("gids/0", ZERO_GID)):
            self.write(f"{port}/{file}", text)
        self.write(f"{port}/gids/3", IPV4_GID)
        self.write(f"{port}/gid_attrs/types/3", "RoCE v2")
        if chain is not None:
            os.symlink("../..", self.root / base / "device")
        link = self.root / "class" / "infiniband" / name
        os.symlink(os.path.relpath(self.root / base, link.parent), link)


def eight_gpus(root: Path) -> Machine:
    """Two sockets; each has two host bridges with two switches each; a GPU and a 400 Gbit/s NIC behind every switch; a
    25 Gbit/s NIC for storage on each socket, with its own host bridge."""
    machine = Machine(root)
    machine.node(0, "0-31,64-95", "10 21")
    machine.node(1, "32-63,96-127", "21 10")
    for index in range(8):
        node = index // 4
        bus = 0x10 * (index + 1)
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        machine.gpu(f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", node)
        machine.nic(f"mlx5_{index}", f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0", node)
    for node in range(2):
        bus = 0xA0 + 0x10 * node
        machine.nic(
            f"mlx5_{8 + node}",
            f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0",
            node,
            rate="25 Gb/sec (1X EDR)",
        )
    return machine


def flat(root: Path, gpus: int = 2, nics: int = 2) -> Machine:
    """A virtual machine: everything on one host bridge, no NUMA node told."""
    machine = Machine(root)
    machine.node(0, "0-15", "10")
    for index in range(gpus):
        machine.gpu(f"pci0000:00/0000:00:{4 + index:02x}.0", -1)
    for index in range(nics):
        machine.nic(f"rdmap{index}", f"pci0000:00/0000:00:{12 + index:02x}.0", -1, rate="100 Gb/sec (4X EDR)")
    return machine
