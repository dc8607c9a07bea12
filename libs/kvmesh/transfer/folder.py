"""A folder of sidecars' sockets: pairs of engine and sidecar under scaling, without a name that both must know.

Each life of a sidecar listens there under a name of its own; an engine registers with the first that takes it. Nothing
else is agreed upon: a sidecar serves one engine and refuses a second, so there is no lock that could outlive its owner.
A setting that names anything but a folder is the one socket itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kvmesh.errors import KvmeshError, Unavailable

log = logging.getLogger(__name__)

SUFFIX = ".sock"
# A sidecar's other sockets are named after this one, and a path of a Unix socket has at most 107 bytes.
_HOST_CHARS = 24
MAX_SOCKETS = 1024
T = TypeVar("T")


def is_folder(path: str | Path) -> bool:
    """Whether a setting names a folder of sockets; else it is a socket, which need not exist yet."""
    return Path(path).is_dir()


def own_socket(path: Path) -> Path:
    """Where this life of a sidecar listens: `path` itself, or a name in that folder which nobody had before."""
    if not is_folder(path):
        return path
    return path / f"{socket.gethostname()[:_HOST_CHARS]}-{secrets.token_hex(4)}{SUFFIX}"


def publish(server: Callable[[Path], socket.socket], path: Path) -> socket.socket:
    """Listen on a socket that gets its name only then, so that one which refuses connections is of the dead: between
    bind and listen it would refuse them too. server: makes a listening socket on a path."""
    hidden = path.with_name(path.name + ".new")
    made = server(hidden)
    try:
        hidden.rename(path)
    except BaseException:
        made.close()
        hidden.unlink(missing_ok=True)
        raise
    return made


def sockets(folder: Path) -> list[Path]:
    """What lies there, of the dead too, in order of name."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(SUFFIX)]
    except OSError:
        return []
    return [folder / name for name in sorted(names)[:MAX_SOCKETS]]


def remove(path: Path) -> bool:
    """Clear away what a dead sidecar left. Any engine may, at any time: its name is never used again. Nothing but a
    socket is touched: a file or a folder of that name refuses connections too, and is not ours. Whether it has gone."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    for name in (f"{path.name}.{kind}" for kind in ("shm", "fake", "nvlink")):
        with contextlib.suppress(OSError):
            path.with_name(name).unlink(missing_ok=True)
    log.info("removed the socket of a dead sidecar: %s", path.name)
    return True


class Sockets:
    """What an engine's setting names: one socket, or a folder of them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._last: Path | None = None

    async def claim(self, register: Callable[[Path], Awaitable[T]]) -> T:
        """The first sidecar that `register(path)` succeeds with: the last one again if it is there still, then the
        others in random order, so that engines that start together do not all ask the same one. Raises what a single
        socket raises, else Unavailable, which tells of each why not."""
        if not is_folder(self.path):
            return await register(self.path)
        refusals: list[str] = []
        for path in self._candidates():
            try:
                registered = await register(path)
            except (KvmeshError, OSError) as error:
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                if not (refused and remove(path)):
                    refusals.append(f"{path.name}: {error}")
                continue
            self._last = path
            return registered
        why = "; ".join(sorted(refusals))[:500] or "none is there"
        raise Unavailable(f"no free sidecar in {self.path}: {why}")

    def _candidates(self) -> list[Path]:
        found = sockets(self.path)
        random.shuffle(found)
        if self._last in found:
            found.remove(self._last)
            found.insert(0, self._last)
        return found
