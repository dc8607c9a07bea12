"""What the readers of a link's streams share: where writes may land, and what has."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.native.moves import Memory, memory_of
from kvmesh.transfer.transports.base import Arrival, EngineMemory, GrantedPages

Column = npt.NDArray[np.uint64]


class Landing:
    """Safe to use from several threads."""

    def __init__(self, memory: EngineMemory) -> None:
        self.targets: Sequence[Memory] = [memory_of(region) for region in memory.regions]
        self.views = [region.buf for region in memory.regions]
        self._memory = memory
        self._pages = [memory.pages(position) for position in range(len(memory.regions))]
        self._lock = threading.Lock()
        self._grants: dict[int, GrantedPages] = {}
        self._arrivals: list[Arrival] = []

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        with self._lock:
            self._grants[immediate] = pages

    def revoke(self, immediate: int) -> None:
        with self._lock:
            self._grants.pop(immediate, None)

    def granted(self, immediate: int) -> GrantedPages | None:
        """Where a generation may land now; None where it may not."""
        with self._lock:
            return self._grants.get(immediate)

    def landed(self, immediate: int, nbytes: int) -> None:
        """Count an arrival."""
        with self._lock:
            self._arrivals.append(Arrival(immediate, nbytes))

    def taken(self) -> list[Arrival]:
        """What has been counted since the last call."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def release(self) -> None:
        """Let go of the memory. No reader runs any more."""
        for view in self.views:
            view.release()

    def check(self, grant: GrantedPages, region: int, offset: Column, length: Column) -> None:
        """Every byte of every run is in a granted page of one layer. Raises InvalidArgument."""
        page_bytes, pages_of_layer = self._pages[region]
        size, num_pages = np.uint64(page_bytes), np.uint64(pages_of_layer)
        total = np.uint64(self.targets[region].nbytes)
        if int(length.min()) < 1 or bool((offset >= total).any()) or bool((length > total - offset).any()):
            raise InvalidArgument("a write reaches outside of its region")
        first, last = offset // size, (offset + length - np.uint64(1)) // size
        if bool((first // num_pages != last // num_pages).any()):
            raise InvalidArgument("a run of a write reaches over a layer's end")
        allowed = grant.pages.get(region, np.zeros(0, dtype=np.int64))
        counts = (last - first + np.uint64(1)).astype(np.int64)
        # A run of n pages is granted when its first and last are, n - 1 places apart in the ascending list.
        start = np.searchsorted(allowed, (first % num_pages).astype(np.int64))
        end = start + counts - 1
        if len(allowed) == 0 or bool((end >= len(allowed)).any()):
            raise InvalidArgument("a write names a page that was not granted to it")
        wrong = (allowed[start] != (first % num_pages).astype(np.int64)) | (
            allowed[end] != (last % num_pages).astype(np.int64)
        )
        if bool(wrong.any()):
            raise InvalidArgument("a write names a page that was not granted to it")
