"""Masks of a step, computed beside its forward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from kvmesh.grammar.match import Match

# The library recurses over what users write.
_STACK_BYTES: Final = 64 << 20
_lock = threading.Lock()


def threads(count: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads have room for deep recursion, all started."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    go = threading.Event()
    with _lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            started: list[Future[Any]] = [pool.submit(go.wait) for _ in range(count)]
        finally:
            threading.stack_size(before)
    go.set()
    for future in started:
        future.result()
    return pool


class MaskThread:
    """One thread for one engine: the library releases the GIL, and a step's masks take less than its forward pass."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, matches: Sequence[Match]) -> None:
        """Start on the masks; `Match.mask` waits for them all."""
        if self._pool is None:
            self._pool = threads(1, "grammar-masks")
        done = self._pool.submit(_fill, matches)
        for match in matches:
            match.filling(done)

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _fill(matches: Sequence[Match]) -> None:
    for match in matches:
        match.fill()
