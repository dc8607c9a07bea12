"""Spend that Redis may not know yet, on disk: a file of lines per process, locked for as long as the process lives.

A line that was written whole is settled exactly once, whatever dies when: the file is emptied only after Redis has
confirmed all of it, and Redis knows a number that it has seen. A file whose lock is free belongs to a process that
died; whoever takes the lock settles it under that process' name.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from kvmesh.store.limits import Spend

log = logging.getLogger(__name__)

SUFFIX = ".spend.jsonl"
MAX_LINE_BYTES = 8192


class Journal:
    """The file of one process. Its methods block: call them from a thread."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.name = path.name.removesuffix(SUFFIX)
        self._handle = handle

    @classmethod
    def open(cls, folder: Path, name: str) -> Journal:
        """A new or an abandoned one. Raises OSError, BlockingIOError when its process lives."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}{SUFFIX}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed it meanwhile.
            if os.stat(path).st_ino != os.fstat(handle).st_ino:
                raise FileNotFoundError(path)
        except BaseException:
            os.close(handle)
            raise
        return cls(path, handle)

    @classmethod
    def abandoned(cls, folder: Path) -> Iterator[Journal]:
        """Those of processes that died, locked now."""
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                yield cls.open(folder, path.name.removesuffix(SUFFIX))
            except OSError:
                continue

    def append(self, spends: Sequence[Spend]) -> None:
        """Write whole lines, and wait until the disk has them."""
        data = "".join(json.dumps(asdict(spend), separators=(",", ":")) + "\n" for spend in spends).encode()
        write_whole(self._handle, data)
        os.fdatasync(self._handle)

    def read(self, after: int, count: int) -> list[Spend]:
        """Up to `count` spends with numbers above `after`. A line that is torn or none of ours is passed over."""
        out: list[Spend] = []
        with self.path.open("rb") as file:
            while len(out) < count and (line := file.readline(MAX_LINE_BYTES)):
                try:
                    spend = Spend(**json.loads(line))
                    usable = line.endswith(b"\n") and isinstance(spend.number, int) and isinstance(spend.tenant, str)
                except (ValueError, TypeError):
                    usable = False
                if not usable:
                    log.warning("journal %s: a line cannot be read", self.path.name)
                elif spend.number > after:
                    out.append(spend)
        return out

    def clear(self) -> None:
        """Forget everything: Redis has it."""
        os.ftruncate(self._handle, 0)

    def close(self, *, remove: bool) -> None:
        """Give the lock back; `remove`: there is nothing left in it."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._handle)


def write_whole(handle: int, data: bytes) -> None:
    """Append all of it, or nothing: half a line would spoil the next one, too. The file is locked."""
    size = os.fstat(handle).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(handle, view) :]
    except OSError:
        os.ftruncate(handle, size)
        raise
