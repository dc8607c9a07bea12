"""What a Docker engine changes on its host outside of its own folders: saved before it starts, taken back afterwards.

Only what it added is taken back: rules, bridges and folders that others made meanwhile are theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import shlex
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Where the private engine's networks lie, docker0's too.
POOL = ipaddress.ip_network("172.30.0.0/16")
_FORWARD = {"ipv4": Path("/proc/sys/net/ipv4/ip_forward")}
_FILTERS = ("iptables", "ip6tables")
# Of an engine's rules: they name a chain, a bridge or an address of its.
_RULE = re.compile(r"\bDOCKER\b|\bDOCKER-|\bdocker0\b|\bbr-[0-9a-f]{12}\b|\b172\.30\.")
_BRIDGE = re.compile(r"br-[0-9a-f]{12}")


@contextlib.contextmanager
def alone(timeout_s: float = 120) -> Iterator[None]:
    """One kit at a time changes this network namespace: a name in it is the lock, so no file is left of a dead one.
    Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind("\0kvmesh-docker-kit")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another kit has been at work for {timeout_s:g} s") from None
                time.sleep(0.1)
        yield


def _network() -> str:
    return os.readlink("/proc/self/ns/net")


def engines() -> list[int]:
    """Every dockerd that has the same network as we: a second one would take its bridge and its rules away."""
    here, found = _network(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().strip() == "dockerd" and os.readlink(process / "ns/net") == here:
                found.append(int(process.name))
    return found


def _out(*command: str, stdin: str | None = None) -> str:
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False).stdout
    except FileNotFoundError:
        return ""


def _links() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def _made() -> list[str]:
    """Control groups and files that an engine makes outside of its folders."""
    groups = [Path("/sys/fs/cgroup/docker"), *Path("/sys/fs/cgroup").glob("*/docker")]
    files = [Path("/etc/docker/key.json"), Path("/etc/docker"), Path("/run/docker/plugins"), Path("/run/docker")]
    files += [Path("/run/containerd/s"), Path("/run/containerd")]
    return [str(path) for path in (*groups, *files) if path.exists()]


def save() -> dict[str, object]:
    """The host's packet filter, forwarding and network links, as plain JSON."""
    return {
        "network": _network(),
        "forward": {name: path.read_text().strip() for name, path in _FORWARD.items() if path.exists()},
        "filters": {name: _out(f"{name}-save") for name in _FILTERS},
        "links": _links(),
        "made": _made(),
    }


def check(saved: dict[str, object]) -> None:
    """Raises RuntimeError where `save` saw another network than ours, whose rules are not to be touched."""
    if saved.get("network", _network()) != _network():
        raise RuntimeError("the engine was started in another network namespace: enter that one first (nsenter)")


def restore(saved: dict[str, object]) -> None:
    """Takes back what an engine has added since `save`."""
    before, made, filters, forward = saved["links"], saved["made"], saved["filters"], saved["forward"]
    assert isinstance(before, list)
    assert isinstance(made, list)
    assert isinstance(filters, dict)
    assert isinstance(forward, dict)
    bridges = [link for link in _links() if link not in before and _is_engines(link)]
    for link in (*(link for link in _links() if _bridge_of(link) in bridges), *bridges):
        _out("ip", "link", "delete", link)
        if link in _links():
            _delete_bridge(link)
    for path in map(Path, _made()):
        if str(path) not in made:
            _remove(path)
    for name, rules in filters.items():
        for arguments in undo(rules, _out(f"{name}-save")):
            _out(name, "-w", "10", *arguments)
    for name, value in forward.items():
        if _FORWARD[name].read_text().strip() != value:
            _FORWARD[name].write_text(value)


def _is_engines(link: str) -> bool:
    """Whether a bridge is docker0 or has its name and its address from the private engine."""
    if link == "docker0":
        return True
    if not _BRIDGE.fullmatch(link):
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            answer = fcntl.ioctl(control, 0x8915, struct.pack("16s24x", link.encode()))  # SIOCGIFADDR
    except OSError:
        return False
    return ipaddress.ip_address(answer[20:24]) in POOL


def _bridge_of(link: str) -> str:
    try:
        return Path(os.readlink(f"/sys/class/net/{link}/master")).name
    except OSError:
        return ""


def _remove(path: Path) -> None:
    """A file, or folders that hold no files: a control group is removed group by group, its files are the kernel's."""
    with contextlib.suppress(OSError):
        if path.is_file():
            path.unlink()
            return
        if path.parts[1] == "run":  # sockets of what was killed
            for left in (found for found in path.rglob("*") if found.is_socket()):
                left.unlink()
        for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
            folder.rmdir()
        path.rmdir()


def _delete_bridge(name: str) -> None:
    """Where the `ip` tool is not installed: the kernel's own interface, SIOCBRDELBR, once the link is down."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", name.encode(), 0)  # IFF_UP off
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS
        fcntl.ioctl(control, 0x89A1, name.encode() + b"\0")  # SIOCBRDELBR


def _tables(text: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """What `iptables-save` says: table -> (chain -> policy, rules)."""
    tables: dict[str, tuple[dict[str, str], list[str]]] = {}
    chains: dict[str, str] = {}
    rules: list[str] = []
    for line in text.splitlines():
        if line.startswith("*"):
            chains, rules = {}, []
            tables[line[1:]] = (chains, rules)
        elif line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            chains[chain] = policy
        elif line.startswith("-A "):
            rules.append(line)
    return tables


def undo(before: str, now: str) -> list[list[str]]:
    """Arguments of iptables that take back what an engine has added between two outputs of `iptables-save`."""
    had, commands = _tables(before), []
    for table, (chains, rules) in _tables(now).items():
        old_chains, old_rules = had.get(table, ({}, []))
        new = [chain for chain in chains if chain.startswith("DOCKER") and chain not in old_chains]
        known = Counter(old_rules)
        for rule in rules:
            words = shlex.split(rule)
            if known[rule] > 0:
                known[rule] -= 1
            elif words[1] not in new and _RULE.search(rule):
                commands.append(["-t", table, "-D", *words[1:]])
        commands += [["-t", table, action, chain] for action in ("-F", "-X") for chain in new]
        if chains.get("FORWARD") == "DROP" and old_chains.get("FORWARD", "ACCEPT") == "ACCEPT":
            commands.append(["-t", table, "-P", "FORWARD", "ACCEPT"])
    return commands


def unmount(*folders: Path) -> None:
    """Unmounts everything below the folders, the deepest first."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        target = line.split()[1].encode().decode("unicode_escape")
        if any(target.startswith(f"{folder}/") for folder in folders):
            _out("umount", "-l", target)
