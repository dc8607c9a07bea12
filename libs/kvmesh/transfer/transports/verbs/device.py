"""An RDMA device: its port, and the memory that is registered with it."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvmesh.errors import FailedPrecondition, Unavailable
from kvmesh.kv.region import Region
from kvmesh.transfer.transports.verbs.options import VerbsOptions
from kvmesh.transfer.transports.verbs.registrations import Made, Memory, MemoryKey, Registrations
from kvmesh.transfer.transports.verbs.shim import Api

__all__ = ["Device", "Memory", "Port", "PortOptions", "RdmaDevice", "device_names", "gid_bytes", "gid_text"]

log = logging.getLogger(__name__)
GID_BYTES = 16
MAX_GIDS = 64
LINK_INFINIBAND = 1
LINK_ETHERNET = 2
_IPV4 = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


class Port(NamedTuple):
    """What a peer must know of the port, and what we must know to reach one. mtu: ibv_mtu."""

    number: int
    link_layer: int
    lid: int
    mtu: int
    gid_index: int
    gid: bytes


class PortOptions(Protocol):
    """Which device and port. See VerbsOptions."""

    @property
    def device(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def gid_index(self) -> int: ...


class RdmaDevice(ABC):
    """An open device with one protection domain. Raises Unavailable with the reason where it cannot be used."""

    def __init__(self, api: Api, where: PortOptions, name: str = "") -> None:
        """name: which device; "" = as `where` says."""
        self.api = api
        self._where = where
        self.name = self._choose(device_names(api), name or where.device)
        self.context: Any = None
        try:
            self.context = self._open()
            self._check(self.context.query_device())
            self.port = self._port()
            self.pd = api.PD(self.context)
        except api.error as error:
            self._close_context()
            raise Unavailable(f"{self.name} cannot be opened: {error}") from None
        except BaseException:
            self._close_context()
            raise
        self._registrations = Registrations()

    def register(self, address: int, nbytes: int) -> Memory:
        """Memory of this process for local and remote writes. The same memory is registered once, for all who ask. The
        caller keeps it mapped until the last `release`. Raises Unavailable."""
        key = MemoryKey.of_address(address, nbytes)
        return self._registrations.take(key, lambda: self._host(address, nbytes))

    def register_region(self, region: Region) -> Memory:
        """A memfd, once for all who ask, by whatever descriptor or mapping; it stays mapped here for as long. Raises
        Unavailable."""
        key = MemoryKey.of_file("memfd", region.fd, 0, region.nbytes)

        def make() -> Made:
            view = region.view()
            address = int(view.__array_interface__["data"][0])
            # The view keeps the mapping alive when the region is closed.
            return self._host(address, region.nbytes)._replace(keep=view)

        return self._registrations.take(key, make)

    def register_dmabuf(self, fd: int, nbytes: int, offset: int = 0) -> Memory:
        """Device memory that its driver exported as a dma-buf; it is addressed by offset, never by a device pointer.
        `fd` may be closed after. Raises Unavailable, InvalidArgument where the descriptor is none."""
        key = MemoryKey.of_file("dmabuf", fd, offset, nbytes)

        def make() -> Made:
            flags = self._flags()
            try:
                return Made(self.api.DmaBufMR(self.pd, nbytes, flags, dmabuf=fd, offset=offset), offset)
            except self.api.error as error:
                raise Unavailable(f"{self.name} cannot register device memory: {error}") from None

        return self._registrations.take(key, make)

    def release(self, memory: Memory, *, linger: bool = False) -> None:
        """Give a registration back; the last user's ends it. linger: its memory may come back, and it waits for that
        until `end_idle`. No work request may name it by then."""
        self._registrations.give_back(memory, linger=linger)

    def end_idle(self) -> int:
        """End registrations that wait for their memory to come back; returns how many."""
        return self._registrations.end_idle()

    @property
    def registered(self) -> int:
        """Registrations in force."""
        return len(self._registrations)

    def problem(self) -> str:
        """Why nothing can go through its port now, "" where it can."""
        if self.context is None:
            return "the device is closed"
        try:
            self._check_active(self.context.query_port(self._where.port))
        except (Unavailable, self.api.error) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Let go of everything; queue pairs and completion queues are closed by then. Idempotent."""
        if self.context is None:
            return
        self._registrations.end_all()
        self._close_parts()
        self.pd.close()
        self._close_context()

    def _close_context(self) -> None:
        if self.context is not None:
            with contextlib.suppress(self.api.error):
                self.context.close()
            self.context = None

    def _host_mr(self, address: int, nbytes: int, flags: int) -> Any:
        return self.api.MR(self.pd, nbytes, flags, address=address)

    def _host(self, address: int, nbytes: int) -> Made:
        flags = self._flags()
        try:
            return Made(self._host_mr(address, nbytes, flags), address)
        except self.api.error as error:
            hint = "; is `ulimit -l` (memlock) large enough?"
            raise Unavailable(f"{self.name} cannot register memory: {error}{hint}") from None

    def _flags(self) -> int:
        if self.context is None:
            # pyverbs would end the process.
            raise Unavailable("the device is closed")
        enums = self.api.enums
        return int(enums.IBV_ACCESS_LOCAL_WRITE) | int(enums.IBV_ACCESS_REMOTE_WRITE)

    def _choose(self, names: Sequence[str], wanted: str) -> str:
        """The wanted one, or the first. Raises FailedPrecondition."""
        if wanted and wanted not in names:
            raise FailedPrecondition(f"no RDMA device {wanted!r}; there is {', '.join(names)}")
        return wanted or names[0]

    def _open(self) -> Any:
        """The context of `name`."""
        return self.api.Context(name=self.name)

    @abstractmethod
    def _check(self, attributes: Any) -> None:
        """Is it large enough? Raises Unavailable."""

    def _close_parts(self) -> None:  # noqa: B027
        """Let go of what else the protection domain holds; nothing here."""

    def _port(self) -> Port:
        number = self._where.port
        state = self.context.query_port(number)
        self._check_active(state)
        layer = int(state.link_layer) or LINK_INFINIBAND
        index, gid = self._gid(number, layer, int(state.gid_tbl_len))
        return Port(number, layer, int(state.lid), int(state.active_mtu), index, gid)

    def _check_active(self, state: Any) -> None:
        if int(state.state) != int(self.api.enums.IBV_PORT_ACTIVE):
            raise Unavailable(f"port {self._where.port} of {self.name} is not active")

    def _gid(self, port: int, layer: int, count: int) -> tuple[int, bytes]:
        """The best entry: on Ethernet RoCE v2 over IPv4, then over routed IPv6, then what there is."""
        wanted = self._where.gid_index
        indices: Sequence[int] = [wanted] if wanted >= 0 else range(min(count, MAX_GIDS))
        best: tuple[int, int, bytes] | None = None
        for index in indices:
            try:
                gid = gid_bytes(self.context.query_gid(port, index).gid)
            except self.api.error:
                continue
            if gid == bytes(GID_BYTES):
                continue
            score = 1
            if layer == LINK_ETHERNET:
                score += 4 * self._is_v2(port, index) + 2 * gid.startswith(_IPV4) + (not gid.startswith(_LINK_LOCAL))
            if best is None or score > best[0]:
                best = (score, index, gid)
        if best is None:
            if layer == LINK_ETHERNET:
                raise Unavailable(f"port {port} of {self.name} has no GID (index {wanted})")
            return 0, bytes(GID_BYTES)
        return best[1], best[2]

    def _is_v2(self, port: int, index: int) -> bool:
        try:
            return int(self.context.query_gid_type(port, index)) == int(self.api.enums.IBV_GID_TYPE_SYSFS_ROCE_V2)
        except self.api.error:
            return False


class Device(RdmaDevice):
    """A device for reliable connections."""

    def __init__(self, api: Api, options: VerbsOptions, name: str = "") -> None:
        self.options = options
        super().__init__(api, options, name)

    def _check(self, attributes: Any) -> None:
        """Is it large enough?"""
        options = self.options
        requests = options.qps * (options.send_depth + options.receives + 8)
        for name, need in (("max_qp_wr", max(options.send_depth, options.receives)), ("max_cqe", requests)):
            have = int(getattr(attributes, name))
            if have < need:
                raise Unavailable(f"{self.name} has {name} {have}, {need} are needed: lower send_depth or qps")


def device_names(api: Api) -> list[str]:
    """This machine's RDMA devices. Raises Unavailable where there is none."""
    try:
        names = [device.name.decode() for device in api.get_device_list()]
    except api.error:
        names = []
    if not names:
        raise Unavailable("this machine has no RDMA device")
    return names


def gid_bytes(text: str) -> bytes:
    """A GID as 16 bytes from pyverbs' eight words."""
    return bytes.fromhex(text.replace(":", ""))


def gid_text(gid: bytes) -> str:
    """And back."""
    return ":".join(gid[i : i + 2].hex() for i in range(0, GID_BYTES, 2))
