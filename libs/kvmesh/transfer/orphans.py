"""Processes that hold this engine's memory, by pidfd, and what waits for them when a sidecar is lost.

While a sidecar lives it decides when a slot is drained. When its connection is lost, this does: a slot is drained once
every writer that had joined by then has unmapped (told through the successor) or exited. The sidecar itself counts too:
a lost connection is no proof that it has stopped moving bytes; its exit is, and so is the next registration on the same
socket, since a sidecar takes an engine in only when everything of the one before is let go of. A registration on
another socket proves nothing about the sidecar before.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    links: set[int]
    done: Callable[[], None]


class Writers:
    """Lives on one asyncio loop and outlasts any one sidecar."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        self._waiting: list[_Waiting] = []
        self._sidecars = 0
        self._places: dict[str, int] = {}

    @property
    def links(self) -> list[int]:
        """Links whose writers may still hold the memory; sidecars aside."""
        return [link for link in self._pidfds if link > 0]

    def sidecar_joined(self, pidfd: int, place: str = "") -> int:
        """We have registered with the sidecar that listens at `place`. Takes its pidfd over; returns the name to wait
        for it by."""
        if place in self._places:
            self.gone(self._places.pop(place))
        self._places = {other: link for other, link in self._places.items() if link in self._pidfds}
        self._sidecars += 1
        self._places[place] = -self._sidecars
        self.joined(-self._sidecars, pidfd)
        return -self._sidecars

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
                waiting.done()

    def when_gone(self, done: Callable[[], None], *, only: int | None = None) -> None:
        """Call `done` once every process of now (or that one) is gone; at once where there is none."""
        links = set(self._pidfds) if only is None else {only} & set(self._pidfds)
        if not links:
            done()
        else:
            self._waiting.append(_Waiting(links, done))

    def close(self) -> None:
        """The memory itself comes to its end: nobody will use it again, so whoever waits may go on."""
        for link_id in list(self._pidfds):
            self.gone(link_id)
