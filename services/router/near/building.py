"""Indices of large partitions, one at a time: asked for on the index's thread, trained elsewhere, taken in there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from services.router.near.arena import Arena
from services.router.near.search import Maker

log = logging.getLogger(__name__)

RETRY_S = 30.0

Post = Callable[[Callable[[], None]], None]


class IndexBuilding:
    """Has an index built where a partition needs one; searches go on by brute force until it is there.

    All but the building itself happens on the thread that owns the arena.
    """

    def __init__(self, post: Post) -> None:
        """post: runs a call on the arena's thread, later."""
        self._post = post
        self._maker: Maker | None = None
        self._not_before = 0.0
        self._closed = False
        self.built = 0
        """Indices taken in so far, and builds that failed."""
        self.failed = 0

    @property
    def running(self) -> bool:
        """Whether an index is being built."""
        return self._maker is not None

    def poll(self, arena: Arena) -> None:
        """Begin a build where one is due and none runs."""
        if self._closed or self.running or time.monotonic() < self._not_before:
            return
        name = arena.wanting()
        if name is None:
            return
        maker = self._maker = arena.maker
        rows, generations = arena.snapshot(name)

        def wait() -> None:
            try:
                built = maker.build(arena, rows)
            except Exception as exc:
                # Whatever it is, the partition goes on without.
                self._post(lambda error=exc: self._lost(error))  # type: ignore[misc]
            else:
                self._post(lambda: self._take(arena, name, lambda: arena.install(name, rows, generations, built)))

        threading.Thread(target=wait, name="kvmesh-index-build", daemon=True).start()

    def _take(self, arena: Arena, name: bytes, install: Callable[[], bool]) -> None:
        self._maker = None
        if not self._closed and install():
            self.built += 1
            log.info("an index for a partition of %d rows", arena.size(name))

    def _lost(self, error: BaseException) -> None:
        self._maker = None
        self._not_before = time.monotonic() + RETRY_S
        if not self._closed:
            self.failed += 1
            log.warning("a large partition stays without index: %s", error)

    def close(self) -> None:
        """End the build in progress, if any, and begin no other. From any thread."""
        self._closed = True
        maker = self._maker
        if maker is not None:
            maker.cancel()
