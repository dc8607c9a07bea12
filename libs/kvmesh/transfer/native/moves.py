"""Copies of runs, runs through a socket, the look at the doorbells: natively, or in Python where nothing compiles.

Offsets and lengths are columns of 64-bit integers (`Columns`). A run outside of its memory is refused before a byte
moves: whatever a plan says, nothing is read or written beyond the region it names.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import socket
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.native import NativeUnavailable, load

log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("moves.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti")
_OUTSIDE = -4096
# Buffers of one system call; the kernel's limit is 1024.
_MAX_IOV = 256
# What ends a watch.
RUNG, EVENT = 1, 2
_P, _I64 = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native code, None where there is none (said once in the log). Compiles at the first call: not on a loop."""
    try:
        code = load(_SOURCE, _FLAGS)
    except NativeUnavailable as error:
        log.warning("bytes are moved by Python: %s", error)
        return None
    for name, result, arguments in (
        ("kvmesh_copy_runs", _I64, (_P, _I64, _P, _I64, _P, _P, _P, _I64)),
        ("kvmesh_send_runs", _I64, (ctypes.c_int, _P, _I64, _P, _P, _I64, _P, _I64)),
        ("kvmesh_recv_runs", _I64, (ctypes.c_int, _P, _I64, _P, _P, _I64)),
        ("kvmesh_watch", ctypes.c_int, (_P, _I64, _P, _I64, ctypes.c_uint64, _I64, _I64, _I64, _I64, _I64)),
    ):
        function = getattr(code, name)
        function.restype, function.argtypes = result, arguments
    return code


class Memory(NamedTuple):
    """Where mapped memory begins, and its bytes. Keeps nothing alive: the owner keeps it mapped."""

    address: int
    nbytes: int


def memory_of(region: Region) -> Memory:
    """Where a region is mapped. Keeps nothing alive: the caller keeps the region open."""
    return Memory(int(region.view().__array_interface__["data"][0]), region.nbytes)


def column(values: Sequence[int]) -> array[int]:
    """The values as 64-bit integers. Raises InvalidArgument for what does not fit."""
    try:
        return array("q", values)
    except (OverflowError, TypeError):
        raise InvalidArgument("a run is no pair of 64-bit integers") from None


def _at(values: array[int], index: int = 0) -> int:
    return values.buffer_info()[0] + 8 * index


def _refuse(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what} is outside of its regions")


def _check(offset: Sequence[int], length: Sequence[int], size: int) -> None:
    if min(offset) < 0 or min(length) < 1 or max(map(int.__add__, offset, length)) > size:
        raise _refuse("a run")


class Copy:
    """Runs from one memory into another. `move(first, last)` copies runs [first, last), and they have landed then."""

    def __init__(
        self, dst: Memory, src: Memory, dst_offset: Sequence[int], src_offset: Sequence[int], length: Sequence[int]
    ) -> None:
        self._dst, self._src = dst, src
        self._to, self._from, self._length = column(dst_offset), column(src_offset), column(length)
        self._native = library()

    def move(self, first: int, last: int) -> int:
        """Bytes copied. Raises InvalidArgument, and has then copied nothing."""
        dst, src = self._dst, self._src
        if self._native is not None:
            columns = (_at(self._to, first), _at(self._from, first), _at(self._length, first))
            moved: int = self._native.kvmesh_copy_runs(*dst, *src, *columns, last - first)
            if moved < 0:
                raise _refuse("a write")
            return moved
        to, origin, length = self._to[first:last], self._from[first:last], self._length[first:last]
        _check(to, length, dst.nbytes)
        _check(origin, length, src.nbytes)
        move = ctypes.memmove
        for a, b, n in zip(origin, to, length, strict=True):
            move(dst.address + b, src.address + a, n)
        return sum(length)


class Sending:
    """Runs of a memory on their way into a non-blocking socket."""

    def __init__(self, src: Memory, view: memoryview, offset: Sequence[int], length: Sequence[int]) -> None:
        self._src, self._view = src, view
        self._offset, self._length = column(offset), column(length)
        self._place = array("q", [0, 0])
        self._native = library()
        _check(self._offset, self._length, src.nbytes)

    @property
    def done(self) -> bool:
        return self._place[0] == len(self._length)

    def send(self, sock: socket.socket, budget: int) -> int:
        """Send on, up to about `budget` bytes; bytes that the socket took. Raises BlockingIOError for none, OSError."""
        if self._native is None:
            return self._send(sock, budget)
        columns = (_at(self._offset), _at(self._length), len(self._length), _at(self._place))
        sent: int = self._native.kvmesh_send_runs(sock.fileno(), *self._src, *columns, budget)
        if sent < 0:
            code = errno.EFAULT if sent == _OUTSIDE else -sent
            raise OSError(code, os.strerror(code))
        return sent

    def _send(self, sock: socket.socket, budget: int) -> int:
        run, done = self._place
        batch: list[memoryview] = []
        for position in range(run, min(len(self._length), run + _MAX_IOV)):
            if budget <= 0:
                break
            begin = self._offset[position] + done
            end = self._offset[position] + self._length[position]
            batch.append(self._view[begin:end])
            budget, done = budget - (end - begin), 0
        try:
            sent = sock.sendmsg(batch, [], socket.MSG_NOSIGNAL)
        finally:
            for piece in batch:
                piece.release()
        left = sent
        while left:
            rest = self._length[self._place[0]] - self._place[1]
            if left < rest:
                self._place[1] += left
                break
            left -= rest
            self._place[0] += 1
            self._place[1] = 0
        return sent


def receive(sock: socket.socket, dst: Memory, view: memoryview, offset: Sequence[int], length: Sequence[int]) -> None:
    """All runs from a blocking socket into memory. Raises InvalidArgument, DataLoss (the stream ended), OSError."""
    native = library()
    to, sizes = column(offset), column(length)
    if native is not None:
        result: int = native.kvmesh_recv_runs(sock.fileno(), *dst, _at(to), _at(sizes), len(sizes))
        if result == _OUTSIDE:
            raise _refuse("a write")
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        if result:
            raise DataLoss("the data connection ended inside a write")
        return
    _check(to, sizes, dst.nbytes)
    for begin in range(0, len(to), _MAX_IOV):
        batch = [view[a : a + n] for a, n in zip(to[begin:][:_MAX_IOV], sizes[begin:][:_MAX_IOV], strict=True)]
        try:
            _fill(sock, batch)
        finally:
            for piece in batch:
                piece.release()


def _fill(sock: socket.socket, batch: list[memoryview]) -> None:
    done = 0
    while done < len(batch):
        received = sock.recvmsg_into(batch[done:])[0]
        if received == 0:
            raise DataLoss("the data connection ended inside a write")
        while received:
            first = batch[done]
            if received >= first.nbytes:
                received -= first.nbytes
                done += 1
            else:
                batch[done] = first[received:]
                first.release()
                received = 0


class Look(NamedTuple):
    """How to watch, in seconds: without a look for `quiet`, then looking without a pause (`spin`), then yielding the
    core between two looks (`rest`), then every `step`; `total` in all at most."""

    quiet: float
    spin: float
    rest: float
    step: float
    total: float


class Bells:
    """Words of shared memory that only grow. addresses: of each, 8-byte aligned; their owner keeps them mapped."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self._array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._native = library()

    @property
    def watchable(self) -> bool:
        """False where there is no native code: to look closely in Python would keep every other thread from running."""
        return self._native is not None

    def watch(self, fds: int, count: int, value: int, look: Look) -> int:
        """Wait until all have reached `value` (RUNG), one of the `count` pollfds at address `fds` has an event (EVENT),
        or the time is over (0). Raises OSError. Releases the GIL."""
        assert self._native is not None
        times = (int(seconds * 1e9) for seconds in look)
        result: int = self._native.kvmesh_watch(fds, count, self._array, len(self._array), value, *times)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result
