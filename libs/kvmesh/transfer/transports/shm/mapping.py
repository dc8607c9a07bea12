"""Mapped memory: where it is, and its page tables filled before the first copy needs them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvmesh.kv.region import Region
from kvmesh.transfer.native.moves import memory_of

# Memory beyond this is left to be faulted in by the copies: filling its page tables would hold up the hello.
MAX_PREFAULT_BYTES = 2 << 30
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def host_id() -> str:
    """Names the running kernel: two processes with one boot id can share memory if a socket reaches."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def prefault(regions: Sequence[Region], *, write: bool) -> None:
    """Fill the page tables now rather than one fault a page during the first copies. Best effort, releases the GIL."""
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    left = MAX_PREFAULT_BYTES
    for region in regions:
        _libc.madvise(memory_of(region).address, min(left, region.nbytes), advice)
        left -= min(left, region.nbytes)
