"""Sorts the frames of one worker to the requests they belong to. Nothing here ever waits."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import engine_pb2
from services.gateway.inbox import Inbox

Key = tuple[str, int]
"""(request id, attempt)."""


class Demux:
    """Open attempts on one worker. What belongs to none of them is late, and `on_stray` hears of it."""

    def __init__(self, on_stray: Callable[[Key], None]) -> None:
        self._open: dict[Key, Inbox] = {}
        self._on_stray = on_stray

    def __len__(self) -> int:
        return len(self._open)

    def add(self, key: Key, inbox: Inbox) -> None:
        """Open an attempt; before `Submit`, since frames may overtake its answer."""
        assert key not in self._open, key
        self._open[key] = inbox

    def remove(self, key: Key) -> bool:
        """Close an attempt; False when it was closed already."""
        return self._open.pop(key, None) is not None

    def feed(self, frame: engine_pb2.FramesResponse) -> None:
        """Deliver one frame. Within a frame, a request's tokens come before its end."""
        for scored in frame.prompts:
            inbox = self._find(scored.request_id, scored.attempt)
            if inbox is not None:
                inbox.prompt(scored)
        for delta in frame.deltas:
            inbox = self._find(delta.request_id, delta.attempt)
            if inbox is not None:
                inbox.delta(delta)
        for end in frame.ends:
            # Popped first: the worker forgets a request with its end, so there is nothing left to abort there.
            inbox = self._open.pop((end.request_id, end.attempt), None)
            if inbox is not None:
                inbox.end(end)

    def lost(self, error: Callable[[], KvmeshError]) -> None:
        """The worker is gone: every attempt fails, each with an error of its own."""
        inboxes = list(self._open.values())
        self._open.clear()
        for inbox in inboxes:
            inbox.fail(error())

    def _find(self, request_id: str, attempt: int) -> Inbox | None:
        key = (request_id, attempt)
        inbox = self._open.get(key)
        if inbox is None:
            self._on_stray(key)
        return inbox
