"""Shared memory without a name: memfd regions that travel as descriptors and leave nothing behind after a kill."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument, Unavailable

# No more than 16 TiB: a bound on what a peer may claim, not a limit anybody should meet.
MAX_REGION_BYTES = 1 << 44

# Neither size may ever change, nor the seals: a peer that shrank the file would kill us with SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK


class DmaBuf(NamedTuple):
    """A GPU's memory as a NIC can be given it. fd: owned by the region whose memory it is; offset: where that begins in
    it; pci_address: the GPU's (0000:18:00.0), "" where it is not known."""

    fd: int
    offset: int = 0
    pci_address: str = ""


class Region:
    """`nbytes` bytes of shared memory, mapped writable. `fd` stays open for passing on until `close`.

    A fork shares it; a process that receives `fd` maps it with `adopt`. Not safe to use from another thread during
    `close`.
    """

    # As in RegionInfo, of memory that is made here.
    memory = "host"
    device = ""

    def __init__(self, name: str, fd: int, nbytes: int, mapping: mmap.mmap | None) -> None:
        self.name = name
        self.nbytes = nbytes
        self._fd = fd
        self._map: mmap.mmap | None = mapping
        # Only of memory that is held.
        self.dmabuf: DmaBuf | None = None

    @classmethod
    def create(cls, name: str, nbytes: int) -> Region:
        """A new zeroed region. `name` is only for people (/proc/PID/maps). Raises InvalidArgument, Unavailable."""
        _check_size(nbytes)
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Unavailable(f"cannot create region {name!r}: {error.strerror}") from error
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(fd)
            raise Unavailable(f"cannot create region {name!r} of {nbytes} bytes: {error.strerror}") from error
        return cls(name, fd, nbytes, mapping)

    @classmethod
    def adopt(cls, fd: int, nbytes: int, name: str = "") -> Region:
        """Map a region that a peer created and says to be `nbytes` long.

        Takes the descriptor over: it is closed on any failure. Raises InvalidArgument where it is no memfd sealed
        against shrinking or has another size.
        """
        try:
            _check_size(nbytes)
            try:
                regular = stat.S_ISREG(os.fstat(fd).st_mode)
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise InvalidArgument(f"region {name!r}: the descriptor is no memory file") from None
            if not regular:
                raise InvalidArgument(f"region {name!r}: the descriptor is no memory file")
            if seals & _REQUIRED_SEALS != _REQUIRED_SEALS:
                raise InvalidArgument(f"region {name!r} is not sealed against shrinking")
            # After the seals: from here on the size cannot fall.
            size = os.fstat(fd).st_size
            if size != nbytes:
                raise InvalidArgument(f"region {name!r} was announced with {nbytes} bytes and has {size}")
            os.set_inheritable(fd, False)
            try:
                mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
            except OSError as error:
                raise InvalidArgument(f"region {name!r} cannot be mapped: {error.strerror}") from error
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        return cls(name, fd, nbytes, mapping)

    @classmethod
    def hold(cls, fd: int, nbytes: int, name: str = "") -> Region:
        """Keep a descriptor of memory that cannot be mapped here (a GPU's), for passing it on. Takes it over; its size
        is believed. Raises InvalidArgument."""
        try:
            _check_size(nbytes)
            os.set_inheritable(fd, False)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
        return cls(name, fd, nbytes, None)

    def attach(self, dmabuf: DmaBuf) -> None:
        """Keep a dma-buf of held memory with it, until `close`. Takes its descriptor over. Raises InvalidArgument where
        it does not hold all of the region."""
        try:
            if self.mapped or self.closed or self.dmabuf is not None:
                raise InvalidArgument(f"region {self.name!r} takes no dma-buf")
            try:
                # What the kernel says of a dma-buf's size; a pipe or a socket has none.
                size = os.lseek(dmabuf.fd, 0, os.SEEK_END)
            except OSError:
                raise InvalidArgument(f"region {self.name!r}: the descriptor is no dma-buf") from None
            if not 0 <= dmabuf.offset <= size - self.nbytes:
                raise InvalidArgument(
                    f"region {self.name!r}: {self.nbytes} bytes from {dmabuf.offset} on are not in a dma-buf of {size}"
                )
            os.set_inheritable(dmabuf.fd, False)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(dmabuf.fd)
            raise
        self.dmabuf = dmabuf

    @property
    def mapped(self) -> bool:
        """False for memory that is only held, and after `close`."""
        return self._map is not None

    @property
    def fd(self) -> int:
        """The descriptor, owned by the region: duplicate it to keep it longer."""
        if self._fd < 0:
            raise InvalidArgument(f"region {self.name!r} is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    @property
    def buf(self) -> memoryview:
        """A new writable view of all bytes. The memory stays mapped while a view lives."""
        if self._map is None:
            raise InvalidArgument(f"region {self.name!r} is closed")
        return memoryview(self._map)

    def view(self, dtype: npt.DTypeLike = np.uint8, offset: int = 0, count: int = -1) -> npt.NDArray[Any]:
        """`count` elements from byte `offset` (all by default) as a writable flat array over the memory itself."""
        return np.frombuffer(self.buf, dtype=dtype, offset=offset, count=count)

    def close(self) -> None:
        """Close the descriptor and unmap; idempotent. Where views are still alive the unmapping waits for the last.

        (The mmap object keeps a duplicate of the descriptor for as long as it maps.)
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        dmabuf, self.dmabuf = self.dmabuf, None
        if dmabuf is not None:
            os.close(dmabuf.fd)
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_size(nbytes: int) -> None:
    if not 1 <= nbytes <= MAX_REGION_BYTES:
        raise InvalidArgument(f"a region has 1..{MAX_REGION_BYTES} bytes, got {nbytes}")
