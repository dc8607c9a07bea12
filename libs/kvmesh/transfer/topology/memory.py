"""On which NUMA node memory lies, by the kernel's word."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

_NUMBERS = {"x86_64": 239, "aarch64": 236}
_MPOL_F_NODE_ADDR = 1 | 2
SAMPLES = 16


def node_of(address: int) -> int | None:
    """Node of one page of this process, which is brought in where it was not; None where it is not told (another
    architecture, a container that forbids the call)."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return None
    node = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.byref(node),
        ctypes.c_void_p(None),
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_MPOL_F_NODE_ADDR),
    )
    return None if failed or node.value < 0 else int(node.value)


def node_of_range(address: int, nbytes: int, ask: Callable[[int], int | None] = node_of) -> int | None:
    """The node that all of some pages of it are on; None where they are on several, or it is not told."""
    nodes = {ask(address + nbytes * step // SAMPLES) for step in range(SAMPLES)}
    return nodes.pop() if len(nodes) == 1 else None
