"""The NICs of an RDMA transport: which ones are opened, which serve the engine's memory, and why the others do not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from kvmesh.errors import InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.topology import (
    AUTO,
    SYSFS,
    Affinity,
    Chosen,
    Topology,
    nics_by_name,
    nics_for_gpu,
    nics_for_memory,
    node_of_range,
    read_topology,
)
from kvmesh.transfer.transports.verbs.device import RdmaDevice
from kvmesh.transfer.transports.verbs.registrations import Memory

log = logging.getLogger(__name__)
DeviceT = TypeVar("DeviceT", bound=RdmaDevice)
# Pairs of NICs of one link, at most.
MAX_RAILS = 16
MAX_DEVICES = 64


@dataclass(frozen=True, slots=True)
class NicOptions:
    """devices: names, or `auto` alone for those near the memory. near: the PCI address of the GPU whose memory it is,
    "" = host memory, asked of the kernel. sysfs: where the topology is read."""

    devices: tuple[str, ...] = (AUTO,)
    near: str = ""
    sysfs: Path = SYSFS

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices) or not all(self.devices):
            raise InvalidArgument("rdma devices: names, each once, or auto")
        if AUTO in self.devices and len(self.devices) > 1:
            raise InvalidArgument("rdma devices: auto stands alone")
        if len(self.devices) > MAX_DEVICES:
            raise InvalidArgument(f"rdma devices: more than {MAX_DEVICES}")

    @classmethod
    def of(cls, device: str, devices: tuple[str, ...], near: str, sysfs: Path) -> NicOptions:
        """From a transport's options: `device` is one that is named alone."""
        return cls(devices or ((device,) if device else (AUTO,)), near, sysfs)

    @property
    def auto(self) -> bool:
        """Whether the topology decides."""
        return self.devices == (AUTO,)


@dataclass(slots=True, eq=False)
class Rail(Generic[DeviceT]):
    """A NIC that serves the engine's memory, with its registrations, by region."""

    device: DeviceT
    chosen: Chosen
    memory: list[Memory] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """Its share of a write, among others."""
        return self.chosen.rate_gbps or 1.0

    def status(self, peer: str, reason: str, *, used: bool = True) -> pb.NicStatus:
        """As one end of a link."""
        return nic_status(self.chosen, used=used, reason=reason, peer=peer)


class Nics(Generic[DeviceT]):
    """Life: `open` → `serve` (an engine's memory) → `release` → … → `close`.

    open_device(name): raises KvmeshError with the reason why not; name "" = its own choice. unfit(driver): why a device
    of that kernel driver is left to others where the topology decides, "" where it is not.
    """

    def __init__(
        self, options: NicOptions, open_device: Callable[[str], DeviceT], unfit: Callable[[str], str], port: int
    ) -> None:
        self._options = options
        self._open_device = open_device
        self._unfit = unfit
        self._port = port
        self._topology = Topology((), (), (), ())
        self._devices: dict[str, DeviceT] = {}
        self._left_out: dict[str, str] = {}
        self._names: Callable[[], Sequence[str]] = tuple
        self.rails: list[Rail[DeviceT]] = []
        # By region, the names of the NICs that are near to it.
        self.near: list[frozenset[str]] = []
        self.why = ""

    @property
    def devices(self) -> list[DeviceT]:
        """Open ones, in the order of their names' natural sort or of the setting."""
        return list(self._devices.values())

    def open(self, names: Callable[[], Sequence[str]]) -> None:
        """Open what the setting names, or all that fit. names: of this machine's devices; may raise KvmeshError, as
        this does where none can be opened."""
        self._names = names
        try:
            self._open_missing()
        except BaseException:
            self.close()
            raise

    def _open_missing(self) -> None:
        self._topology = read_topology(self._options.sysfs)
        present = self._names()
        wanted = list(present[:MAX_DEVICES]) if self._options.auto else list(self._options.devices)
        error: KvmeshError | None = None
        self._left_out = {}
        for name in wanted:
            if name in self._devices:
                continue
            nic = self._topology.nic(name)
            unfit = self._unfit(nic.driver) if nic is not None and self._options.auto else ""
            if unfit:
                self._left_out[name] = unfit
                error = error or Unavailable(f"{name}: {unfit}")
                continue
            try:
                self._devices[name] = self._open_device(name)
            except KvmeshError as refused:
                self._left_out[name] = refused.message
                error = error or refused
                log.info("RDMA device %s is left out: %s", name, refused.message)
        if not self._devices and error is not None:
            raise error

    def serve(self, regions: Sequence[Region]) -> None:
        """Choose the NICs of an engine's memory and register it with each. Raises Unavailable where no NIC can have it;
        nothing is registered then."""
        self.release()
        # One that was down at the start may be up by now.
        self._open_missing()
        topology = self._topology.with_open(self._devices, self._port)
        affinities = self._affinities(topology, regions)
        self.near = [frozenset(nic.name for nic in affinity.nics) for affinity in affinities]
        wanted = list({nic.name: nic for affinity in affinities for nic in affinity.nics}.values())
        error: KvmeshError | None = None
        for name, why in (item for affinity in affinities for item in affinity.rejected.items()):
            if name not in {nic.name for nic in wanted}:
                self._left_out.setdefault(name, why)
        for chosen in wanted[:MAX_RAILS]:
            device = self._devices[chosen.name]
            rail = Rail(device, chosen)
            problem = device.problem()
            if not problem and self.rails and device.port.link_layer != self.rails[0].device.port.link_layer:
                problem = "its link layer is not that of the others"
            try:
                if problem:
                    raise Unavailable(problem)
                rail.memory = _registered(device, regions)
            except KvmeshError as refused:
                self._left_out[chosen.name] = refused.message
                error = error or refused
            else:
                self.rails.append(rail)
        for chosen in wanted[MAX_RAILS:]:
            self._left_out[chosen.name] = f"more than {MAX_RAILS} NICs"
        self.why = "; ".join(dict.fromkeys(affinity.why for affinity in affinities))
        # What has not come back with this engine does not.
        self.end_idle()
        if not self.rails:
            raise error or Unavailable(f"no NIC for the engine's memory: {self.why}")

    def release(self, *, linger: bool = False) -> None:
        """Give the registrations back. linger: the same memory may be served again; see `end_idle`."""
        for rail in self.rails:
            for memory in rail.memory:
                rail.device.release(memory, linger=linger)
        self.rails = []

    def end_idle(self) -> int:
        """End the registrations of memory that has not come back; returns how many."""
        return sum(device.end_idle() for device in self._devices.values())

    def up(self) -> list[Rail[DeviceT]]:
        """Rails whose port can be used now."""
        return [rail for rail in self.rails if not rail.device.problem()]

    @property
    def nodes(self) -> frozenset[int]:
        """NUMA nodes of the NICs in use (of all open ones, before there is an engine)."""
        names = [rail.device.name for rail in self.rails] or list(self._devices)
        found = (self._topology.nic(name) for name in names)
        return frozenset(nic.node for nic in found if nic is not None and nic.node is not None)

    def status(self) -> list[pb.NicStatus]:
        """All of them, used or not."""
        result = []
        for rail in self.rails:
            problem = rail.device.problem()
            result.append(rail.status("", problem or self.why, used=not problem))
        used = {rail.device.name for rail in self.rails}
        for name in [*self._devices, *(name for name in self._left_out if name not in self._devices)]:
            if name in used:
                continue
            nic = self._topology.nic(name)
            port = nic.port(self._port) if nic is not None else None
            result.append(
                pb.NicStatus(
                    name=name,
                    numa_node=nic.node if nic is not None and nic.node is not None else -1,
                    rate_gbps=port.rate_gbps if port is not None else 0.0,
                    reason=self._left_out.get(name, "open, no engine yet"),
                )
            )
        return result

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self.release()
        for device in self._devices.values():
            device.close()
        self._devices = {}

    def _affinities(self, topology: Topology, regions: Sequence[Region]) -> list[Affinity]:
        """By region: the ranks of an engine may have theirs on different nodes."""
        if not self._options.auto:
            names = [name for name in self._options.devices if name in self._devices]
            return [nics_by_name(topology, names, port=self._port)] * len(regions)
        only = frozenset(self._devices)
        if self._options.near:
            return [nics_for_gpu(topology, self._options.near, port=self._port, only=only)] * len(regions)
        return [self._near(topology, region, only) for region in regions]

    def _near(self, topology: Topology, region: Region, only: frozenset[str]) -> Affinity:
        if region.dmabuf is not None and region.dmabuf.pci_address:
            return nics_for_gpu(topology, region.dmabuf.pci_address, port=self._port, only=only)
        return nics_for_memory(topology, _node(topology, region), port=self._port, only=only)


def _registered(device: RdmaDevice, regions: Sequence[Region]) -> list[Memory]:
    """The regions at a device, or none. Raises Unavailable."""
    while True:
        memory: list[Memory] = []
        try:
            for region in regions:
                memory.append(_register(device, region))
            return memory
        except KvmeshError:
            for item in memory:
                device.release(item)
            # What waits for an engine that has not come back is pinned too: without it there may be room.
            if not device.end_idle():
                raise


def _register(device: RdmaDevice, region: Region) -> Memory:
    dmabuf = region.dmabuf
    if dmabuf is None:
        return device.register_region(region)
    return device.register_dmabuf(dmabuf.fd, region.nbytes, dmabuf.offset)


def _node(topology: Topology, region: Region) -> int | None:
    """The NUMA node that all of a region is on, None where there is no such, or where it is not mapped here."""
    if not region.mapped:
        return None
    if len(topology.nodes) <= 1:
        return topology.nodes[0].number if topology.nodes else None
    return node_of_range(address_of(region), region.nbytes)


def address_of(region: Region) -> int:
    """Where it is mapped here."""
    return int(region.view().__array_interface__["data"][0])


def nic_status(chosen: Chosen, *, used: bool, reason: str, peer: str = "") -> pb.NicStatus:
    """For GetStatus."""
    return pb.NicStatus(
        name=chosen.name,
        peer=peer,
        numa_node=chosen.node if chosen.node is not None else -1,
        rate_gbps=chosen.rate_gbps,
        used=used,
        reason=reason,
    )
