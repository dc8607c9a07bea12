"""The thread that takes completions for all links into this sidecar, on machines that can spare a core for it.

It spins while there is traffic and for a moment after, then sleeps on the links' channels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time

from kvmesh.transfer.transports.verbs.receiver import RdmaInbound

log = logging.getLogger(__name__)
SPIN_S = 0.002
SLEEP_S = 0.5
JOIN_S = 5.0


class InboundPoller:
    """Life: `start`, links are added and fall out when they end, `stop`."""

    def __init__(self) -> None:
        self._inbounds: list[RdmaInbound] = []
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvmesh-verbs", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def native_id(self) -> int | None:
        """Of the thread, for pinning."""
        return self._thread.native_id

    def add(self, inbound: RdmaInbound) -> None:
        """Serve a link until it ends. Any thread."""
        with self._lock:
            self._inbounds = [*self._inbounds, inbound]
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(JOIN_S)
        os.close(self._wake)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping:
            try:
                found = False
                for inbound in self._inbounds:
                    found |= inbound.progress()
                if found:
                    last = time.monotonic()
                elif time.monotonic() - last < SPIN_S:
                    # Lets the loop's thread have the interpreter.
                    time.sleep(0)
                else:
                    self._sleep()
            except Exception:
                log.exception("verbs: a turn of the polling thread failed")
                time.sleep(0.05)

    def _sleep(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._lock:
            self._inbounds = [inbound for inbound in self._inbounds if inbound.usable]
            for inbound in self._inbounds:
                assert inbound.queue is not None
                poll.register(inbound.queue.fd, select.POLLIN)
        poll.poll(int(SLEEP_S * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
