"""An EFA device: what it can do, and the address handles of its peers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvmesh.errors import InvalidArgument, KvmeshError, Unavailable
from kvmesh.transfer.transports.efa.options import EfaOptions
from kvmesh.transfer.transports.efa.shim import NEEDED_VERSION, EfaApi
from kvmesh.transfer.transports.efa.window import WORD_RECEIVES
from kvmesh.transfer.transports.verbs.device import GID_BYTES, RdmaDevice, gid_text

CAP_RNR_RETRY = 1 << 1
CAP_RDMA_WRITE = 1 << 3
HOP_LIMIT = 255
# A page of the smallest model is larger; below it every page would be cut.
MIN_WRITE = 4096


class Peer(NamedTuple):
    """Another device. handle: for work requests; number: what completions call it (their `slid`)."""

    gid: bytes
    handle: Any
    number: int


@dataclass(slots=True, eq=False)
class _Handle:
    peer: Peer
    users: int = 0


class EfaDevice(RdmaDevice):
    """Raises Unavailable with the reason where it cannot do RDMA writes by SRD. max_write: bytes of one."""

    def __init__(self, api: EfaApi, options: EfaOptions, name: str = "") -> None:
        self.efa = api
        self.options = options
        self.max_write = 0
        self.retries_rnr = False
        # The loop and the mover both take and release.
        self._handles_lock = threading.Lock()
        self._handles: dict[bytes, _Handle] = {}
        super().__init__(api.verbs, options, name)
        if not any(self.port.gid):
            self.close()
            raise Unavailable(f"port {self.port.number} of {self.name} has no GID")

    def peer(self, gid: bytes) -> Peer:
        """The address handle of a device, one for all links to it; `release_peer` gives it back. RDMA is refused by a
        device that has no handle of the one it comes from. Raises Unavailable."""
        with self._handles_lock:
            held = self._handles.get(gid)
            if held is None:
                held = self._handles[gid] = _Handle(self._make_peer(gid))
            held.users += 1
            return held.peer

    def release_peer(self, peer: Peer) -> None:
        """The last user's ends it. No posted work request may name it by then."""
        with self._handles_lock:
            held = self._handles.get(peer.gid)
            if held is None:
                raise InvalidArgument("an address handle that is not held")
            held.users -= 1
            if not held.users:
                del self._handles[peer.gid]
                held.peer.handle.close()

    @property
    def peers(self) -> int:
        """Address handles in force."""
        return len(self._handles)

    def _make_peer(self, gid: bytes) -> Peer:
        api = self.api
        route = api.GlobalRoute(dgid=api.GID(gid_text(gid)), sgid_index=self.port.gid_index, hop_limit=HOP_LIMIT)
        attributes = api.AHAttr(gr=route, is_global=1, port_num=self.port.number)
        try:
            handle = self.efa.EfaAH(self.pd, attr=attributes)
        except api.error as error:
            raise Unavailable(f"{self.name} gives no address handle: {error}") from None
        try:
            return Peer(gid, handle, int(handle.query_efa_ah().ahn))
        except api.error as error:
            handle.close()
            raise Unavailable(f"{self.name} does not number its address handles: {error}") from None

    # --- opening -------------------------------------------------------------------------------------------------

    def _choose(self, names: Sequence[str], wanted: str) -> str:
        if wanted or len(names) == 1:
            return super()._choose(names, wanted)
        for name in names:
            try:
                context = self._context(name)
            except self.api.error:
                continue
            try:
                self._judge(name, context)
                return name
            except KvmeshError:
                continue
            finally:
                context.close()
        # Which says what is wrong with it.
        return names[0]

    def _open(self) -> Any:
        return self._context(self.name)

    def _context(self, name: str) -> Any:
        return self.efa.EfaContext(name=name)

    def _check(self, attributes: Any) -> None:
        """One queue pair with its completion queue, and what EFA can say of itself."""
        caps = self._judge(self.name, self.context)
        options = self.options
        for name, need, have in (
            ("max_sq_wr", options.send_depth, int(caps.max_sq_wr)),
            ("max_rq_wr", options.receives, int(caps.max_rq_wr)),
            ("max_cqe", max(options.send_depth, options.receives) + WORD_RECEIVES, int(attributes.max_cqe)),
        ):
            if have < need:
                raise Unavailable(f"{self.name} has {name} {have}, {need} are needed: lower send_depth or receives")
        largest = int(caps.max_rdma_size)
        self.max_write = min(options.max_write or largest, largest)
        self.retries_rnr = bool(int(caps.device_caps) & CAP_RNR_RETRY)

    def _judge(self, name: str, context: Any) -> Any:
        """EFA's own attributes of a device. Raises Unavailable where it is none, or cannot write."""
        try:
            caps = context.query_efa_device()
        except self.api.error as error:
            if getattr(error, "error_code", None) == errno.EOPNOTSUPP:
                raise Unavailable(f"{name} is no EFA device (errno {errno.EOPNOTSUPP})") from None
            raise Unavailable(f"{name} does not tell what it can do: {error}") from None
        if not int(caps.device_caps) & CAP_RDMA_WRITE:
            raise Unavailable(f"{name} cannot do RDMA writes (device_caps {int(caps.device_caps):#x})")
        if not self.efa.can_write:
            raise Unavailable(f"RDMA writes by SRD need pyverbs {NEEDED_VERSION}, this is {self.api.version}")
        if int(caps.max_rdma_size) < MIN_WRITE:
            raise Unavailable(f"{name} has max_rdma_size {int(caps.max_rdma_size)}, {MIN_WRITE} are needed")
        return caps

    def _close_parts(self) -> None:
        with self._handles_lock:
            for held in self._handles.values():
                held.peer.handle.close()
            self._handles.clear()


def check_gid(gid: bytes) -> None:
    """Raises InvalidArgument."""
    if len(gid) != GID_BYTES or not any(gid):
        raise InvalidArgument(f"a gid of {GID_BYTES} bytes is needed")
