"""One rank's process: `python -m kvmesh.engine.parallel.rank SOCKET STEPS`, two descriptors from its leader.

On another host they come from that host's agent: the socket is a TCP connection to the leader, and there is no memory
of steps (-1).

It ends with its leader: a thread watches the socket, whose end the kernel closes with the leader's process, wherever
the main thread is (loading, or in a collective that nobody will finish).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.parallel.backends import RankBackend, backend_of
from kvmesh.engine.parallel.network import name_interface
from kvmesh.engine.parallel.process import NO_STEPS
from kvmesh.engine.parallel.slots import StepSlots, bytes_for
from kvmesh.engine.parallel.wire import Kind, expect, is_layered, recv_frame, send_frame, send_note, unpack_step
from kvmesh.errors import DataLoss, KvmeshError, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.telemetry import setup_logs
from kvmesh.transfer.rank import RankLink

log = logging.getLogger(__name__)

LEADER_GONE = 4
_CLOSE_S = 2.0
# Steps that are launched and not collected when the next one is.
AHEAD = 2


class SidecarThread:
    """This rank's connection to the sidecar, on a loop of its own: the main thread computes."""

    def __init__(self, note: dict[str, Any], rank: int, layout: KvLayout, regions: dict[str, Region]) -> None:
        self._arguments = (note, rank, layout, regions)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sidecar", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("the connection to the sidecar failed")
            # Without it the engine would wait for this rank for ever.
            os._exit(1)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        note, rank, layout, regions = self._arguments
        link = RankLink(
            note["path"],
            engine_id=note["engine_id"],
            incarnation=int(note["incarnation"]),
            rank=rank,
            layout=layout,
            regions=regions,
        )
        link.start()
        await self._stop.wait()
        await link.close()

    def close(self) -> None:
        """Leave the sidecar."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_S)


class Rank:
    """Does what the leader says, in its order. Made on the CPU over gloo; `AheadRank` launches steps on a device."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self._sock = sock
        self._rank = number
        self._runner: Any = None
        self._layout: KvLayout | None = None
        self._regions: dict[str, Any] = {}
        self._sidecar: SidecarThread | None = None

    def run(self, note: dict[str, Any], slots: StepSlots | None) -> None:
        """Until STOP. Raises whatever fails: this rank is then of no further use."""
        try:
            self.load(note)
            send_note(self._sock, Kind.READY, {"revision": self._runner.info.revision})
            while True:
                frame = recv_frame(self._sock)
                if frame is None:
                    raise Unavailable("the leader is gone")
                if frame.kind is Kind.SLOT and slots is not None:
                    self.step(slots.take(self._rank, int.from_bytes(frame.body, "little")))
                elif frame.kind is Kind.STEP:
                    self.step(frame.body)
                elif frame.kind is Kind.BIND:
                    layout = self._layout = KvLayout.from_dict(frame.note()["layout"])
                    self.bind(layout)
                    send_frame(self._sock, Kind.BOUND)
                elif frame.kind is Kind.JOIN:
                    self._join(frame.note())
                elif frame.kind is Kind.STOP:
                    self.stop()
                    return
                else:
                    raise DataLoss(f"the leader sent {frame.kind.name}")
        finally:
            if self._sidecar is not None:
                self._sidecar.close()

    def load(self, note: dict[str, Any]) -> None:
        """Meet the others, read this rank's part of the model."""
        from kvmesh.engine.torch_runner import TorchRunner
        from kvmesh.layers.parallel import GlooParallel, member_store

        store = member_store(int(note["port"]), note["timeout_s"], note["host"])
        group = GlooParallel(store, self._rank, int(note["size"]), note["timeout_s"], address=note["address"])
        self._runner = TorchRunner.load(
            note["model"], note["dtype"], int(note["threads"]), None, note["backend"], group
        )

    def bind(self, layout: KvLayout) -> None:
        """Make KV memory and give it to the runner."""
        self._regions = {
            group.name: Region.create(f"kvmesh-kv-{group.name}-{self._rank}", layout.region_bytes(group))
            for group in layout.groups
        }
        views = {name: region.buf for name, region in self._regions.items()}
        # Nobody reads this one: the leader rings, after a collective that proves this rank's part.
        self._runner.bind(layout, views, Doorbell(bytearray(DOORBELL_BYTES)))

    def _join(self, note: dict[str, Any]) -> None:
        assert self._layout is not None
        self._sidecar = SidecarThread(note, self._rank, self._layout, self._regions)

    def step(self, body: bytes) -> None:
        """Compute a packed step and say so."""
        batch = unpack_step(body)
        self._runner.compute(batch, self._runner.prepare(batch), score=False)
        send_frame(self._sock, Kind.DONE)

    def stop(self) -> None:
        """Nothing more will come."""


class AheadRank(Rank):
    """Steps are launched on a device and answered by nothing: their last collective tells the leader."""

    def __init__(self, sock: socket.socket, number: int, backend: RankBackend) -> None:
        super().__init__(sock, number)
        self._backend = backend
        self._flights: deque[Any] = deque()

    def load(self, note: dict[str, Any]) -> None:
        """See `Rank.load`."""
        from kvmesh.layers.parallel import member_store

        if note.get("several_hosts"):
            name_interface(note["address"])
        self._store = member_store(int(note["port"]), note["timeout_s"], note["host"])
        group = self._backend.group(self._store, self._rank, int(note["size"]), note["timeout_s"])
        self._runner = self._backend.load(note["model"], note["dtype"], group, None)

    def bind(self, layout: KvLayout) -> None:
        """See `Rank.bind`; the leader does the same meanwhile."""
        self._regions = self._backend.regions(layout, self._rank)
        self._runner.bind_cuda(layout, self._regions, None)

    def step(self, body: bytes) -> None:
        """Launch a packed step, once there is place for it: the leader has collected all but one of those before."""
        batch = unpack_step(body)
        while len(self._flights) >= AHEAD:
            self._collect()
        # A leader that is told of each layer may go another way through the model.
        on_layer = (lambda layer: None) if is_layered(body) else None
        self._flights.append(self._runner.launch_prepared(batch, self._runner.prepare(batch), on_layer))

    def _collect(self) -> None:
        # What was sampled is the leader's to judge.
        with contextlib.suppress(SequencesFailed):
            self._runner.collect(self._flights.popleft())

    def stop(self) -> None:
        """A device must not go while others still need it for a step that was launched."""
        while self._flights:
            self._collect()


def serve(sock: socket.socket, steps: int, make: Callable[[Mapping[str, Any]], RankBackend | None]) -> None:
    """A rank's life. steps: descriptor of the region of steps, or NO_STEPS. make: the backend that SETUP means, None =
    CPU.

    Raises whatever ends it before STOP.
    """
    # The first import of torch, at the same time as the leader's; its end is watched meanwhile.
    import kvmesh.layers.parallel  # noqa: F401

    note = expect(recv_frame(sock), Kind.SETUP).note()
    number = int(note["rank"])
    if logs := note["logs"]:
        service, name = logs["service"], f"{logs['instance']}/{number}"
        if logs["fmt"] == "text":
            # A line of text has no instance.
            service = f"{service}/{number}"
        setup_logs(service, instance=name, level=logs["level"], fmt=logs["fmt"])
    slots = None
    if steps != NO_STEPS:
        local = int(note["local"])
        slots = StepSlots(Region.adopt(steps, bytes_for(local), "kvmesh-steps"), local)
    backend = make(note)
    rank = Rank(sock, number) if backend is None else AheadRank(sock, number, backend)
    send_frame(sock, Kind.HELLO)
    rank.run(note, slots)


def watch(sock: socket.socket) -> None:
    """End this process when the other side of the socket is closed."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    while not poller.poll():
        pass
    os._exit(LEADER_GONE)


def main(argv: list[str], make: Callable[[Mapping[str, Any]], RankBackend | None] = backend_of) -> int:
    """argv: descriptors of the socket and of the region of steps. Exit status: 0 after STOP, LEADER_GONE, else 1."""
    # Ctrl-C reaches the foreground group, a supervisor's SIGTERM often all processes of a service: the leader says
    # when this process ends, or what it still has to finish would die with this rank.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[0]))
    threading.Thread(target=watch, args=(sock,), name="leader-watch", daemon=True).start()
    try:
        serve(sock, int(argv[1]), make)
    except Exception as error:
        log.exception("this rank ends")
        reason = error.message if isinstance(error, KvmeshError) else repr(error)
        with contextlib.suppress(OSError):
            send_note(sock, Kind.FAILED, {"reason": reason[:4096]})
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # At once: an orderly end of interpreter and torch takes seconds on a busy machine, and the leader waits.
    os._exit(status)
