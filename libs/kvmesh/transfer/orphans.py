"""Writers that hold this engine's memory, by pidfd, and the slots of a dead sidecar that wait for them.

While a sidecar lives it decides when a slot is drained. When it dies, this does: a slot of the dead sidecar is drained
once every writer that had joined by then has unmapped (told through the successor) or exited.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    links: set[int]
    drained: Callable[[], None] = field(repr=False)


class Writers:
    """Lives on one asyncio loop and outlasts any one sidecar."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        self._waiting: list[_Waiting] = []

    @property
    def links(self) -> list[int]:
        """Links whose writers may still hold the memory."""
        return list(self._pidfds)

    def joined(self, link_id: int, pidfd: int) -> None:
        """A writer was let in. Takes the pidfd over."""
        if link_id in self._pidfds:
            os.close(pidfd)
            return
        self._pidfds[link_id] = pidfd
        self._loop.add_reader(pidfd, self.gone, link_id)

    def gone(self, link_id: int) -> None:
        """It has unmapped, or exited. Idempotent."""
        pidfd = self._pidfds.pop(link_id, None)
        if pidfd is None:
            return
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        for waiting in list(self._waiting):
            waiting.links.discard(link_id)
            if not waiting.links:
                self._waiting.remove(waiting)
                waiting.drained()

    def when_gone(self, drained: Callable[[], None]) -> None:
        """Call `drained` once every writer of now is gone; at once where there is none."""
        if not self._pidfds:
            drained()
        else:
            self._waiting.append(_Waiting(set(self._pidfds), drained))

    def retain(self, links: Iterable[int]) -> None:
        """Forget writers that nobody waits for any more, except these."""
        wanted = set(links).union(*(waiting.links for waiting in self._waiting)) if self._waiting else set(links)
        for link_id in [link for link in self._pidfds if link not in wanted]:
            self.gone(link_id)

    def close(self) -> None:
        """Forget everything; what waits is told never."""
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        self._waiting.clear()
