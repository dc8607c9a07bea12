"""TCP between the hosts of a group: listening, dialling, noticing that the other side is gone, and which interface."""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator

from kvmesh.config.types import split_host_port
from kvmesh.errors import FailedPrecondition, Unavailable

log = logging.getLogger(__name__)

# A host that is gone without a word (power, network) is noticed after about this long.
LIVENESS_S = 15.0
DIAL_S = 5.0
_PROBE_S = 5
_BACKLOG = 128
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def listen(address: str) -> socket.socket:
    """A listening socket at "host:port". Raises FailedPrecondition."""
    host, port = split_host_port(address)
    try:
        family, *_, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot listen on {address} for the ranks of other hosts: {error.strerror or error}",
            details={"field": "tp_listen"},
        ) from error


def dial(address: str, source: str = "", timeout_s: float = DIAL_S) -> socket.socket:
    """Connect to "host:port", from the local address `source` where one is given. Raises Unavailable."""
    host, port = split_host_port(address)
    try:
        # A name may not be known yet, or lead elsewhere by now: it is looked up each time.
        sock = socket.create_connection(
            (host.strip("[]"), port), timeout_s, source_address=(source, 0) if source else None
        )
    except OSError as error:
        raise Unavailable(f"{address}: {error.strerror or error}") from error
    if sock.getsockname() == sock.getpeername():
        # The kernel gave this end the very port that it connects to: nobody listens there.
        sock.close()
        raise Unavailable(f"{address}: nobody listens there")
    return sock


def watch_peer(sock: socket.socket, unread_s: float = LIVENESS_S) -> None:
    """Let the kernel end the connection when the other host does not answer any more; small frames leave at once.

    unread_s: how long sent data may stay unacknowledged; the other side may read nothing for as long.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(LIVENESS_S / _PROBE_S) - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(max(unread_s, LIVENESS_S) * 1000))


def own_address(sock: socket.socket) -> str:
    """The IP address of this end of a connection."""
    return _plain(sock.getsockname()[0])


def peer_address(sock: socket.socket) -> str:
    """The IP address of the other end."""
    return _plain(sock.getpeername()[0])


def _plain(address: str) -> str:
    """Without a zone, and IPv4 as such where it came to a socket of both families."""
    address = address.partition("%")[0]
    return address.removeprefix("::ffff:") if "." in address else address


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
)


def _addresses() -> Iterator[tuple[str, str]]:
    """(interface, address) of this host."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        entry = first
        while entry:
            found = entry.contents
            if found.address:
                data = bytes(found.address.contents.data)
                if found.address.contents.family == socket.AF_INET:
                    yield os.fsdecode(found.name), socket.inet_ntop(socket.AF_INET, data[2:6])
                elif found.address.contents.family == socket.AF_INET6:
                    yield os.fsdecode(found.name), socket.inet_ntop(socket.AF_INET6, data[6:22])
            entry = found.next
    finally:
        libc.freeifaddrs(first)


def interface_of(address: str) -> str:
    """The interface that has this address, "" where none has."""
    wanted = ipaddress.ip_address(address)
    names = {ipaddress.ip_address(each): name for name, each in _addresses()}
    if wanted not in names and wanted.is_loopback:
        # All of 127.0.0.0/8 is there, one address is listed.
        wanted = ipaddress.ip_address("127.0.0.1")
    return names.get(wanted, "")


def name_interface(address: str) -> None:
    """Tell NCCL, before it starts in this process, to use the interface of this address. What the environment says
    already stays."""
    if NCCL_INTERFACE in os.environ:
        return
    if name := interface_of(address):
        # "=": that name, not all that begin so.
        os.environ[NCCL_INTERFACE] = f"={name}"
    else:
        log.warning("no interface has the address %s: NCCL chooses one itself", address)
