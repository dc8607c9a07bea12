"""Memory registrations of one device: each memory once, for all who ask, named by what it is.

A memfd or a dma-buf is named by its inode, never by the number of its descriptor or the address of a mapping: both are
used again for other memory. A registration keeps its own mapping for as long as it lives, so its inode cannot become
another file's meanwhile. With its last user it ends, or becomes idle where its memory may come back (an engine that
connects anew): the owner of this ends idle ones in time. Idle ones are bounded in number, the oldest goes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvmesh.errors import InvalidArgument

MAX_IDLE = 64


class Memory(NamedTuple):
    """Registered memory. address: what offset 0 is in work requests (in a dma-buf: where the registration starts)."""

    address: int
    nbytes: int
    lkey: int
    rkey: int


class MemoryKey(NamedTuple):
    """What is registered. kind: `address` (first: the address), `memfd` or `dmabuf` (first, second: device and inode;
    offset: into it)."""

    kind: str
    first: int
    second: int
    offset: int
    nbytes: int

    @classmethod
    def of_address(cls, address: int, nbytes: int) -> MemoryKey:
        """Memory of this process that nobody else names."""
        return cls("address", address, 0, 0, nbytes)

    @classmethod
    def of_file(cls, kind: str, fd: int, offset: int, nbytes: int) -> MemoryKey:
        """Raises InvalidArgument where the descriptor is none."""
        try:
            found = os.fstat(fd)
        except OSError as error:
            raise InvalidArgument(f"no {kind}: {error.strerror}") from None
        return cls(kind, found.st_dev, found.st_ino, offset, nbytes)


class Made(NamedTuple):
    """What `make` returns. mr: closed at the end; keep: held until after that (the mapping)."""

    mr: Any
    address: int
    keep: object = None


@dataclass(slots=True, eq=False)
class _Entry:
    made: Made
    memory: Memory
    users: int = 0


class Registrations:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[MemoryKey, _Entry] = {}
        # In the order in which they became idle.
        self._idle: dict[MemoryKey, None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def idle(self) -> int:
        """Those without a user."""
        return len(self._idle)

    def take(self, key: MemoryKey, make: Callable[[], Made]) -> Memory:
        """The registration of this memory, made where there is none. What `make` raises is passed on."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                made = make()
                mr = made.mr
                memory = Memory(made.address, int(mr.length), int(mr.lkey), int(mr.rkey))
                entry = self._entries[key] = _Entry(made, memory)
            self._idle.pop(key, None)
            entry.users += 1
            return entry.memory

    def give_back(self, memory: Memory, *, linger: bool = False) -> None:
        """One user less; the last one's ends it, or makes it idle (linger; memory named by an address never is). No
        work request may name it by then. Raises InvalidArgument."""
        with self._lock:
            key = next((k for k, item in self._entries.items() if item.memory == memory and item.users), None)
            if key is None:
                raise InvalidArgument("memory that is not registered")
            entry = self._entries[key]
            entry.users -= 1
            if entry.users:
                return
            if not linger or key.kind == "address":
                self._end(key)
                return
            self._idle[key] = None
            while len(self._idle) > MAX_IDLE:
                self._end(next(iter(self._idle)))

    def end_idle(self) -> int:
        """End those without a user; returns how many."""
        with self._lock:
            keys = list(self._idle)
            for key in keys:
                self._end(key)
            return len(keys)

    def end_all(self) -> None:
        """End every one, used or not."""
        with self._lock:
            for key in list(self._entries):
                self._end(key)

    def _end(self, key: MemoryKey) -> None:
        self._idle.pop(key, None)
        self._entries.pop(key).made.mr.close()
