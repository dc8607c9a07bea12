"""Addresses behind a name that stands for several replicas, each of which is spoken to by itself."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket

from kvmesh.config import split_host_port

log = logging.getLogger(__name__)


def host_of(target: str) -> str:
    """The host name of a target, "" where there is none (numbers, paths): what a certificate of all that it stands for
    bears."""
    if target.partition(":")[0] in ("unix", "ipv4", "ipv6"):
        return ""
    host = split_host_port(target.removeprefix("dns:").lstrip("/").rpartition("/")[2])[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return ""


async def resolve(target: str, timeout_s: float = 5.0) -> set[str] | None:
    """Every "host:port" (or "unix:…") that a target stands for; None when its name cannot be resolved now."""
    scheme, _, rest = target.partition(":")
    if scheme == "unix" or (scheme not in ("ipv4", "ipv6", "dns") and not host_of(target)):
        return {target}
    if scheme in ("ipv4", "ipv6"):
        return {part.strip() for part in rest.split(",") if part.strip()}
    # "dns://authority/host:port" names a server to ask; the system's resolver is asked instead.
    host, port = split_host_port(target.removeprefix("dns:").lstrip("/").rpartition("/")[2])
    try:
        async with asyncio.timeout(timeout_s):
            infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        log.debug("cannot resolve %s: %s", target, error)
        return None
    # One family: a replica reached by both of its addresses would get two streams, and each would end the other.
    infos = [info for info in infos if info[0] == infos[0][0]]
    return {f"[{info[4][0]}]:{port}" if info[0] == socket.AF_INET6 else f"{info[4][0]}:{port}" for info in infos}
