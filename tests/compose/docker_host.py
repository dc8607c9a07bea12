"""What a Docker engine changes on its host outside of its own folders: saved before it starts, put back afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import subprocess
from pathlib import Path

_FORWARD = {"ipv4": Path("/proc/sys/net/ipv4/ip_forward")}
_FILTERS = ("iptables", "ip6tables")


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
        "forward": {name: path.read_text().strip() for name, path in _FORWARD.items() if path.exists()},
        "filters": {name: _out(f"{name}-save") for name in _FILTERS},
        "links": _links(),
        "made": _made(),
    }


def restore(saved: dict[str, object]) -> None:
    """Back to what `save` saw: links that came since go, and packet filter tables are as they were."""
    before = saved["links"]
    assert isinstance(before, list)
    for link in _links():
        if link not in before and (link == "docker0" or link.startswith(("br-", "veth"))):
            _out("ip", "link", "delete", link)
            if link in _links():
                _delete_bridge(link)
    filters, forward = saved["filters"], saved["forward"]
    assert isinstance(filters, dict)
    assert isinstance(forward, dict)
    made = saved["made"]
    assert isinstance(made, list)
    for path in map(Path, _made()):
        if str(path) not in made:
            _remove(path)
    for name, rules in filters.items():
        _restore_filter(name, rules)
    for name, value in forward.items():
        if _FORWARD[name].read_text().strip() != value:
            _FORWARD[name].write_text(value)


def _remove(path: Path) -> None:
    """A file, or folders that are empty: a control group is removed group by group, its files are the kernel's."""
    with contextlib.suppress(OSError):
        if path.is_file():
            path.unlink()
            return
        for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
            folder.rmdir()
        path.rmdir()


def _delete_bridge(name: str) -> None:
    """Where the `ip` tool is not installed: the kernel's own interface, SIOCBRDELBR, once the link is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", name.encode(), 0)  # IFF_UP off
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS
        fcntl.ioctl(control, 0x89A1, name.encode() + b"\0")  # SIOCBRDELBR


def _restore_filter(name: str, rules: str) -> None:
    """The saved tables as they were; a table that was not there is emptied, its chains deleted, its policies ACCEPT."""
    had = {line[1:] for line in rules.splitlines() if line.startswith("*")}
    now = _out(f"{name}-save")
    table = ""
    for line in now.splitlines():
        if line.startswith("*"):
            table = line[1:]
            if table not in had:
                _out(name, "-t", table, "-F")
                _out(name, "-t", table, "-X")
        elif line.startswith(":") and table not in had and line.split()[1] not in ("-", "ACCEPT"):
            _out(name, "-t", table, "-P", line[1:].split()[0], "ACCEPT")
    if rules.strip():
        _out(f"{name}-restore", stdin=rules)


def unmount(*folders: Path) -> None:
    """Unmounts everything below the folders, the deepest first."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        target = line.split()[1].encode().decode("unicode_escape")
        if any(target.startswith(f"{folder}/") for folder in folders):
            _out("umount", "-l", target)
