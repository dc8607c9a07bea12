"""A port that several processes share, held by their parent for as long as it lives.

A bound socket that does not listen gets no connections, but nobody else can take its port: not a second gateway while
we run, and nobody at all while a process of ours restarts.
"""

from __future__ import annotations

import errno
import socket

from kvmesh.config import split_host_port
from kvmesh.errors import FailedPrecondition


class HeldPort:
    """`address` is what the processes listen on, with the port that was chosen for port 0."""

    def __init__(self, listen: str) -> None:
        """Raises FailedPrecondition when the address is taken, not of this machine, or cannot be shared."""
        self._sockets: list[socket.socket] = []
        self.address = ""
        if listen.startswith("unix:"):
            raise FailedPrecondition("several processes share a port, not a Unix socket", details={"address": listen})
        host, port = split_host_port(listen)
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, place in found if port else found[:1]:
                where = (*place[:1], port, *place[2:])
                if port:
                    # Whoever listens there, sharing or not, is told by this.
                    _bind(family, kind, protocol, where, socket.SO_REUSEADDR).close()
                held = _hold(family, kind, protocol, where)
                self._sockets.append(held)
                port = held.getsockname()[1]
        except OSError as exc:
            self.close()
            raise FailedPrecondition(
                f"cannot listen on {listen}: {exc.strerror}", details={"address": listen}
            ) from None
        self.address = f"{host}:{port}"

    def close(self) -> None:
        """Let go."""
        for held in self._sockets:
            held.close()


def _hold(family: int, kind: int, protocol: int, place: tuple[object, ...]) -> socket.socket:
    try:
        return _bind(family, kind, protocol, place, socket.SO_REUSEPORT)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        # Connections of somebody who did not share it are in TIME_WAIT. Held like this it is guarded less: while none
        # of our processes listens.
        return _bind(family, kind, protocol, place, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bind(family: int, kind: int, protocol: int, place: tuple[object, ...], *flags: int) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        for flag in flags:
            made.setsockopt(socket.SOL_SOCKET, flag, 1)
        made.bind(place)
    except OSError:
        made.close()
        raise
    return made
