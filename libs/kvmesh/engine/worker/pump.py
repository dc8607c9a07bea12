"""From the core's thread to the event loop: events in order, one wake-up for whatever has gathered."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Protocol

from kvmesh.engine.events import CoreEvent, Ended, RequestKey, StepDone
from kvmesh.telemetry import about

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Who wants the events of a key. Called on the event loop; must not block."""

    def on_event(self, event: CoreEvent) -> None: ...


class LoadSink(Protocol):
    """Who wants the load after each batch of events."""

    def on_step(self, event: StepDone) -> None: ...


class EventPump:
    """`EngineCore`'s on_events. A key's sink is forgotten after its Ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._gathered: list[CoreEvent] = []
        self._scheduled = False
        self._sinks: dict[RequestKey, Sink] = {}
        self._load_sinks: list[LoadSink] = []

    def __call__(self, events: list[CoreEvent]) -> None:
        """On the core's thread."""
        with self._lock:
            self._gathered.extend(events)
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            log.debug("events after the loop was closed")

    def register(self, key: RequestKey, sink: Sink) -> None:
        """Before the key is submitted."""
        self._sinks[key] = sink

    def forget(self, key: RequestKey) -> None:
        """For a key whose submission the core refused: no Ended will come."""
        self._sinks.pop(key, None)

    def on_load(self, sink: LoadSink) -> None:
        """Tell `sink` of every StepDone."""
        self._load_sinks.append(sink)

    def _deliver(self) -> None:
        with self._lock:
            events, self._gathered = self._gathered, []
            self._scheduled = False
        last_load: StepDone | None = None
        for event in events:
            if isinstance(event, StepDone):
                last_load = event
                continue
            sink = self._sinks.pop(event.key, None) if isinstance(event, Ended) else self._sinks.get(event.key)
            if sink is None:
                continue
            try:
                sink.on_event(event)
            except Exception:
                told = about.about(event.key.request_id.partition("\0")[0], getattr(sink, "span", None))
                log.exception("handling %s failed", type(event).__name__, extra=told)
        if last_load is not None:
            for load_sink in self._load_sinks:
                load_sink.on_step(last_load)
