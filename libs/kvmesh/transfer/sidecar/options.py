"""What a sidecar is told, and the transports it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import FailedPrecondition
from kvmesh.rpc import MeshChannel
from kvmesh.transfer.immediate import MAX_SLOTS
from kvmesh.transfer.topology import SYSFS
from kvmesh.transfer.transports.base import Transport
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.faulty import FakeTransport
from kvmesh.transfer.transports.nvlink import NvlinkTransport
from kvmesh.transfer.transports.shm import ShmTransport
from kvmesh.transfer.transports.tcp import TcpTransport
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """Times in seconds. rank_join_s: how long leader and ranks of an engine wait for one another. open_channel: a
    gRPC channel to another sidecar's control address. in_folder: engine_socket is a name of this life alone, beside
    others'. engine_group: a group whose processes may open it too. tcp_advertise: the host that writers connect to,
    "" = `tcp_host`, or this machine's name where that is any. tcp_streams, copy_threads: 0 = by cores. doorbell: see
    the watcher."""

    sidecar_id: str
    engine_socket: Path
    open_channel: Callable[[str], MeshChannel]
    in_folder: bool = False
    engine_group: int | None = None
    transports: tuple[str, ...] = ("shm", "tcp")
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    connect_timeout_s: float = 5.0
    rank_join_s: float = 30.0
    max_slots: int = MAX_SLOTS
    tcp_host: str = "127.0.0.1"
    tcp_advertise: str = ""
    tcp_streams: int = 0
    tcp_checksums: bool = False
    copy_threads: int = 0
    doorbell: str = "auto"
    fake_faults: Path | None = None
    verbs: VerbsOptions | None = None
    efa: EfaOptions | None = None
    pin_threads: bool = True
    sysfs: Path = SYSFS


def make_transport(name: str, options: SidecarOptions) -> Transport:
    """The transport of that name. Raises FailedPrecondition for one that this build does not have."""
    beside = options.engine_socket
    if name == "shm":
        return ShmTransport(beside.with_name(beside.name + ".shm"), options.copy_threads)
    if name == "fake":
        return FakeTransport(beside.with_name(beside.name + ".fake"), options.fake_faults)
    if name == "tcp":
        return TcpTransport(
            options.tcp_host,
            options.tcp_advertise,
            streams=options.tcp_streams,
            checksums=options.tcp_checksums,
            threads=options.copy_threads,
        )
    if name == "nvlink":
        return NvlinkTransport(beside.with_name(beside.name + ".nvlink"))
    if name == "verbs":
        return VerbsTransport(options.verbs)
    if name == "efa":
        return EfaTransport(options.efa)
    raise FailedPrecondition(f"not implemented: transport {name}")
