"""Addresses behind the router settings, resolved again from time to time: one stream goes to EVERY replica."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from kvmesh.config import split_host_port

log = logging.getLogger(__name__)


async def resolve_all(targets: Iterable[str], timeout_s: float = 5.0) -> set[str] | None:
    """Every "host:port" (or "unix:…") that the targets stand for. None when a name could not be resolved now."""
    found: set[str] = set()
    for target in targets:
        scheme, _, rest = target.partition(":")
        if scheme == "unix":
            found.add(target)
        elif scheme in ("ipv4", "ipv6"):
            found.update(part.strip() for part in rest.split(",") if part.strip())
        else:
            name = target.removeprefix("dns:").lstrip("/")
            addresses = await _lookup(name, timeout_s)
            if addresses is None:
                return None
            found |= addresses
    return found


async def _lookup(name: str, timeout_s: float) -> set[str] | None:
    # "dns://authority/host:port" names a server to ask; the system's resolver is asked instead.
    host, port = split_host_port(name.rpartition("/")[2])
    try:
        async with asyncio.timeout(timeout_s):
            infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        log.debug("cannot resolve %s: %s", name, error)
        return None
    # One family: a replica reached by both of its addresses would get two streams, and each would end the other.
    infos = [info for info in infos if info[0] == infos[0][0]]
    return {f"[{info[4][0]}]:{port}" if info[0] == socket.AF_INET6 else f"{info[4][0]}:{port}" for info in infos}
