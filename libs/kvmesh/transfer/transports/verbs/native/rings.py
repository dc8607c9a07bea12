"""The native code, and what Python calls of it."""

from __future__ import annotations

import ctypes
import functools
import logging
import socket
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvmesh.native import NativeUnavailable, load
from kvmesh.transfer.transports.verbs.native.pointers import find_handle, find_pair, find_queue
from kvmesh.transfer.transports.verbs.rows import ROW, Rows

log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("rings.cpp")
# No -march=native: there is nothing in it for a certain processor.
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti")
_P, _U32, _U64, _I64, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int
# struct ibv_wc
WC = struct.Struct("<QiiIIIIIIHHBB2x")


class Wc(NamedTuple):
    """A completion: the fields of ibv_wc under pyverbs' names. imm_data as it was on the wire."""

    wr_id: int
    status: int
    opcode: int
    vendor_err: int
    byte_len: int
    imm_data: int
    qp_num: int
    src_qp: int
    wc_flags: int
    pkey_index: int
    slid: int
    sl: int
    dlid_path_bits: int


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native code, None where there is none (said once in the log). Compiles at the first call: not on a loop."""
    try:
        code = load(_SOURCE, _FLAGS)
    except NativeUnavailable as error:
        log.warning("work requests are posted and polled by Python: %s", error)
        return None
    for name, arguments in (
        ("kvmesh_rdma_poll", (_P, _P, _INT)),
        ("kvmesh_rdma_run", (_P, _P, _I64, _U64, _U64, _U32, _U64, _U32, _U64, _U32, _U32)),
        ("kvmesh_rdma_writes", (_P, _P, _U32, _U32, _U32, _P, _P, _I64)),
    ):
        function = getattr(code, name)
        function.restype, function.argtypes = _INT, arguments
    return code


class NativeQueue:
    """Polls a completion queue. It lives while the CQ object does."""

    def __init__(self, code: ctypes.CDLL, address: int, error: type[Exception]) -> None:
        self.address = address
        self._error = error
        self._poll = code.kvmesh_rdma_poll
        self._found = ctypes.create_string_buffer(0)
        self._limit = 0

    @classmethod
    def of(cls, code: Any, queue: Any, channel_fd: int, error: type[Exception]) -> NativeQueue | None:
        """For a CQ object, None where Python must do. error: what pyverbs raises."""
        if code is None:
            return None
        address = find_queue(id(queue), channel_fd)
        return cls(code, address, error) if address is not None else None

    def poll(self, limit: int) -> tuple[int, list[Wc]]:
        """As a CQ object's."""
        if limit > self._limit:
            self._found = ctypes.create_string_buffer(limit * WC.size)
            self._limit = limit
        count: int = self._poll(self.address, self._found, limit)
        if count <= 0:
            if count:
                raise self._error("Failed to poll CQ", -count)
            return 0, []
        return count, list(map(Wc._make, WC.iter_unpack(memoryview(self._found)[: count * WC.size])))


class NativePair:
    """Posts to a queue pair. It lives while the QPEx object does."""

    def __init__(self, code: ctypes.CDLL, address: int) -> None:
        self.address = address
        self._run = code.kvmesh_rdma_run
        self._writes = code.kvmesh_rdma_writes

    @classmethod
    def of(cls, code: Any, pair: Any, queue: NativeQueue | None, number: int) -> NativePair | None:
        """For a QPEx object on that queue, None where Python must do."""
        if code is None or queue is None:
            return None
        address = find_pair(id(pair), queue.address, number)
        return cls(code, address) if address is not None else None

    def handle(self, handle: Any) -> int | None:
        """The C object of an address handle of the same protection domain, None where it is not found."""
        return find_handle(id(handle), self.address)

    def post_run(
        self,
        rows: Rows,
        inner: int,
        closing: int,
        flags: int,
        entry: int,
        lkey: int,
        target: int,
        rkey: int,
        immediate: int,
    ) -> int:
        """Plain writes and their closing one; an errno, 0 for none."""
        # From a list it is fast, from anything else it is not.
        flat = array("Q", rows)
        at, count = flat.buffer_info()
        result: int = self._run(
            self.address, at, count // ROW, inner, closing, flags, entry, lkey, target, rkey, socket.htonl(immediate)
        )
        return abs(result)

    def post_writes(
        self, handle: int, remote: int, key: int, flags: int, parts: Sequence[tuple[int, int, Rows]]
    ) -> int:
        """Writes with immediate; an errno, 0 for none."""
        flat = array("Q")
        heads = array("Q")
        for number, immediate, rows in parts:
            flat.extend(array("Q", rows))
            heads.extend((number, socket.htonl(immediate), len(flat) // ROW))
        result: int = self._writes(
            self.address,
            handle,
            remote,
            key,
            flags,
            flat.buffer_info()[0],
            heads.buffer_info()[0],
            len(parts),
        )
        return abs(result)
