"""Ports for services whose address others must know before they listen, and find again after a restart.

A port that the kernel named free (bind to 0) is of the range from which it also takes the local ends of outgoing
connections: until the service binds it, and again while the service is down, any connection of this machine may take
it, even one that is tried to that very port. So these ports come from outside of that range.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections import deque
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 10_000, 65_000
_LEAST = 1_000
_CLAIMS = 128


def _bindable(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _claim(port: int) -> socket.socket | None:
    """A name of this network namespace for the port: whoever holds it means to use it. None when another does."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":  # the only one that has such names
        try:
            claim.bind(f"\0kvmesh-port-{port}")
        except OSError:
            claim.close()
            return None
    return claim


def quiet_ports(local_range: str | None = None) -> range:
    """The larger part of 10000..65000 that lies outside `local_range` ("first last", as the kernel writes it)."""
    try:
        low, high = (int(part) for part in (local_range or _RANGE_FILE.read_text()).split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    below, above = range(_FIRST, max(_FIRST, low)), range(max(_FIRST, high + 1), _LAST)
    best = max(below, above, key=len)
    return best if len(best) >= _LEAST else range(_FIRST, _LAST)


class Ports:
    """Names a port at a time, none twice before all were named. Another process begins somewhere else, and is not given
    one of the newest `_CLAIMS` that this one has named: a service takes a while until it listens."""

    def __init__(self, ports: range | None = None) -> None:
        self._ports = quiet_ports() if ports is None else ports
        self._next = 0
        self._owner = 0
        self._claims: deque[socket.socket] = deque()
        self._lock = threading.Lock()

    def free(self) -> int:
        """A port that nothing listens on. OSError when there is none."""
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._next = os.getpid(), random.SystemRandom().randrange(len(self._ports))
            for _ in range(len(self._ports)):
                port = self._ports[self._next % len(self._ports)]
                self._next += 1
                if _bindable(port) and (claim := _claim(port)) is not None:
                    self._claims.append(claim)
                    if len(self._claims) > _CLAIMS:
                        self._claims.popleft().close()
                    return port
        raise OSError("no free TCP port on 127.0.0.1")


_PORTS = Ports()


def free_port(preferred: int = 0) -> int:
    """`preferred` if nothing listens there, else a free port of 127.0.0.1. The service itself reports a lost race."""
    return preferred if preferred and _bindable(preferred) else _PORTS.free()
