"""Native posting and polling, on C structures that are laid out by hand."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.transfer.transports.verbs.native.pointers import find_handle, find_pair, find_queue
from kvmesh.transfer.transports.verbs.native.rings import NativePair, NativeQueue, library

_P, _U32, _U64, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
FD = 77
NUMBER = 0x1234
WC_BYTES = 48


class Driver:
    """What libibverbs and a driver would have in memory. said: what was posted, in the words of QPEx."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.completions: list[bytes] = []
        self.result = 0
        self._kept: list[Any] = []
        self.context = self._words(40)
        self.channel = self._words(2)
        self.queue = self._words(8)
        self.domain = self._words(4)
        self.pair = self._words(48)
        self.handle = self._words(3)
        self._set(self.context, 12, self._call(_INT, (_P, _INT, _P), self._poll))
        self._set(self.channel, 0, self.context)
        self._set(self.channel, 1, FD)
        self._set(self.queue, 0, self.context)
        self._set(self.queue, 1, self.channel)
        for at, value in enumerate((self.context, 0, self.domain, self.queue, self.queue, 0, NUMBER << 32)):
            self._set(self.pair, at, value)
        say = self.said.append
        for at, result, arguments, action in (
            (224, None, (_P, _U32, _U64), lambda _, rkey, to: say(("write", self._head(), rkey, to))),
            (232, None, (_P, _U32, _U64, _U32), lambda _, k, to, imm: say(("imm", self._head(), k, to, imm))),
            (272, None, (_P, _P, _U32, _U32), lambda _, *where: say(("address", *where))),
            (304, None, (_P, _U32, _U64, _U32), lambda _, lkey, at, n: say(("sge", lkey, at, n))),
            (320, None, (_P,), lambda _: say(("start",))),
            (328, _INT, (_P,), lambda _: (say(("complete",)), self.result)[1]),
        ):
            self._set(self.pair, at // 8, self._call(result, arguments, action))
        self._set(self.handle, 0, self.context)
        self._set(self.handle, 1, self.domain)

    def thing(self, *words: int) -> int:
        """The address of a Python object with these fields, at the end of what is mapped."""
        pages = mmap.mmap(-1, mmap.PAGESIZE)
        view = (ctypes.c_uint64 * (mmap.PAGESIZE // 8)).from_buffer(pages)
        self._kept += [pages, view]
        at = len(view) - len(words)
        view[at:] = words
        return ctypes.addressof(view) + 8 * at - 16

    def _words(self, count: int) -> int:
        made = (ctypes.c_uint64 * count)()
        self._kept.append(made)
        return ctypes.addressof(made)

    def _set(self, base: int, index: int, value: int) -> None:
        ctypes.c_uint64.from_address(base + 8 * index).value = value

    def _call(self, result: Any, arguments: tuple[Any, ...], action: Callable[..., Any]) -> int:
        made = ctypes.CFUNCTYPE(result, *arguments)(action)
        self._kept.append(made)
        return int(ctypes.cast(made, _P).value or 0)

    def _head(self) -> tuple[int, int]:
        """Number and flags of the work request that comes."""
        return _U64.from_address(self.pair + 168).value, _U32.from_address(self.pair + 176).value

    def _poll(self, queue: int, limit: int, into: int) -> int:
        assert queue == self.queue
        if self.result:
            return self.result
        found, self.completions = self.completions[:limit], self.completions[limit:]
        for at, raw in enumerate(found):
            ctypes.memmove(into + WC_BYTES * at, raw, WC_BYTES)
        return len(found)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def code() -> ctypes.CDLL:
    found = library()
    if found is None:
        pytest.skip("nothing compiles C++ here")
    return found


def wc(number: int, **fields: int) -> bytes:
    names = ("status", "opcode", "vendor_err", "byte_len", "imm_data", "qp_num", "src_qp", "wc_flags")
    raw = number.to_bytes(8, "little")
    raw += b"".join(fields.get(name, 0).to_bytes(4, "little") for name in names)
    return raw + (7).to_bytes(2, "little") + fields.get("slid", 0).to_bytes(2, "little") + bytes(4)


# --- finding ----------------------------------------------------------------------------------------------------------


def test_a_queue_is_found_by_its_channel_among_what_is_none(driver: Driver) -> None:
    # Small numbers, unmapped and odd addresses, other objects; and it is the last word before unmapped memory.
    fields = (1, 0, 0xDEAD_BEEF_0000, 3 << 50, driver.context + 1, driver.channel, id(driver) & ~7, driver.queue)
    assert find_queue(driver.thing(*fields), FD) == driver.queue
    assert find_queue(driver.thing(*fields), FD + 1) is None
    assert find_queue(driver.thing(*fields[:-1]), FD) is None


def test_a_pair_is_found_by_number_and_queue_where_it_is_named_twice(driver: Driver) -> None:
    both = driver.thing(5, driver.pair, driver.channel, driver.pair)
    assert find_pair(both, driver.queue, NUMBER) == driver.pair
    assert find_pair(both, driver.queue, NUMBER + 1) is None
    assert find_pair(both, driver.channel, NUMBER) is None
    assert find_pair(driver.thing(5, driver.pair, driver.channel), driver.queue, NUMBER) is None, "no extended pair"


def test_a_handle_is_found_by_its_domain(driver: Driver) -> None:
    assert find_handle(driver.thing(driver.queue, driver.handle), driver.pair) == driver.handle
    assert find_handle(driver.thing(driver.queue, driver.channel), driver.pair) is None


def test_nothing_is_found_where_memory_cannot_be_read(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    at = driver.thing(driver.queue)

    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert find_queue(at, FD) is None


def test_python_does_it_where_nothing_compiles_or_nothing_is_found(driver: Driver, code: ctypes.CDLL) -> None:
    assert NativeQueue.of(None, object(), FD, OSError) is None
    assert NativeQueue.of(code, object(), FD, OSError) is None
    queue = NativeQueue(code, driver.queue, OSError)
    assert NativePair.of(code, object(), queue, NUMBER) is None
    assert NativePair.of(code, object(), None, NUMBER) is None


# --- polling and posting ----------------------------------------------------------------------------------------------


def test_completions_have_their_fields(driver: Driver, code: ctypes.CDLL) -> None:
    queue = NativeQueue(code, driver.queue, ValueError)
    assert queue.poll(4) == (0, [])
    driver.completions = [
        wc(n, status=n % 3, opcode=129, byte_len=1 << 31, imm_data=0xF0E0_D0C0, src_qp=9, slid=0xFFFF, qp_num=4)
        for n in ((1 << 64) - 1, 2, 3)
    ]
    count, found = queue.poll(2)
    assert count == 2
    first = found[0]
    assert (first.wr_id, first.status, first.opcode) == ((1 << 64) - 1, ((1 << 64) - 1) % 3, 129)
    assert (first.byte_len, first.imm_data, first.src_qp) == (1 << 31, 0xF0E0_D0C0, 9)
    assert (first.slid, first.qp_num, first.pkey_index) == (0xFFFF, 4, 7)
    assert [item.wr_id for item in queue.poll(64)[1]] == [3]
    driver.result = -22
    with pytest.raises(ValueError, match="poll"):
        queue.poll(1)


def test_a_run_is_posted_as_pyverbs_would(driver: Driver, code: ctypes.CDLL) -> None:
    pair = NativePair(code, driver.pair)
    top = (1 << 64) - 64
    rows = [*(top, 11, 0x2000, 12, 64), *(0x3000, 13, 0x4000, 0xFFFF_FFFF, (1 << 31) + 1)]
    assert pair.post_run(rows, 5, 6, 2, 0x5000, 14, 0x6000, 15, 0x0102_0304) == 0
    assert driver.said == [
        ("start",),
        ("write", (5, 0), 12, 0x2000),
        ("sge", 11, top, 64),
        ("write", (5, 0), 0xFFFF_FFFF, 0x4000),
        ("sge", 13, 0x3000, (1 << 31) + 1),
        ("imm", (6, 2), 15, 0x6000, socket.htonl(0x0102_0304)),
        ("sge", 14, 0x5000, 8),
        ("complete",),
    ]
    driver.result = 12
    assert pair.post_run(rows, 5, 6, 2, 0x5000, 14, 0x6000, 15, 1) == 12


def test_writes_are_posted_as_pyverbs_would(driver: Driver, code: ctypes.CDLL) -> None:
    pair = NativePair(code, driver.pair)
    parts = [(4, 0x0102_0304, [0x1000, 11, 0x2000, 12, 64]), (8, 5, [0x3000, 13, 0x4000, 14, 1 << 30] * 2)]
    assert pair.post_writes(driver.handle, 0xFFFF, 0x7FFF_FFFF, 2, parts) == 0
    address = ("address", driver.handle, 0xFFFF, 0x7FFF_FFFF)
    second = [("imm", (8, 2), 14, 0x4000, socket.htonl(5)), address, ("sge", 13, 0x3000, 1 << 30)]
    assert driver.said == [
        ("start",),
        ("imm", (4, 2), 12, 0x2000, socket.htonl(0x0102_0304)),
        address,
        ("sge", 11, 0x1000, 64),
        *second,
        *second,
        ("complete",),
    ]
    driver.result = 22
    assert pair.post_writes(driver.handle, 1, 1, 2, parts) == 22
