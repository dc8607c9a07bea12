"""One rank's process: `python -m kvmesh.engine.parallel.rank FD`, started by its leader with a socket as FD.

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
from typing import TYPE_CHECKING, Any

from kvmesh.engine.parallel.wire import Kind, expect, recv_frame, send_frame, send_note, unpack_step
from kvmesh.errors import DataLoss, KvmeshError, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.telemetry import setup_logs
from kvmesh.transfer.rank import RankLink

if TYPE_CHECKING:
    from kvmesh.engine.torch_runner import TorchRunner

log = logging.getLogger(__name__)

LEADER_GONE = 4
_CLOSE_S = 2.0


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
    """Does what the leader says, in its order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rank = 0
        self._runner: TorchRunner | None = None
        self._layout: KvLayout | None = None
        self._regions: dict[str, Region] = {}
        self._sidecar: SidecarThread | None = None

    def run(self) -> None:
        """Until STOP. Raises whatever fails: this rank is then of no further use."""
        try:
            self._load()
            while True:
                frame = recv_frame(self._sock)
                if frame is None:
                    raise Unavailable("the leader is gone")
                if frame.kind is Kind.STEP:
                    self._step(frame.body)
                elif frame.kind is Kind.BIND:
                    self._bind(frame.note())
                elif frame.kind is Kind.JOIN:
                    self._join(frame.note())
                elif frame.kind is Kind.STOP:
                    return
                else:
                    raise DataLoss(f"the leader sent {frame.kind.name}")
        finally:
            if self._sidecar is not None:
                self._sidecar.close()

    def _load(self) -> None:
        # The first import of torch, at the same time as the leader's; its end is watched meanwhile.
        from kvmesh.engine.torch_runner import TorchRunner
        from kvmesh.layers.parallel import GlooParallel, member_store

        note = expect(recv_frame(self._sock), Kind.SETUP).note()
        self._rank = int(note["rank"])
        if logs := note["logs"]:
            service, name = logs["service"], f"{logs['instance']}/{self._rank}"
            if logs["fmt"] == "text":
                # A line of text has no instance.
                service = f"{service}/{self._rank}"
            setup_logs(service, instance=name, level=logs["level"], fmt=logs["fmt"])
        send_frame(self._sock, Kind.HELLO)
        store = member_store(int(note["port"]), note["timeout_s"])
        group = GlooParallel(store, self._rank, int(note["size"]), note["timeout_s"])
        self._runner = TorchRunner.load(
            note["model"], note["dtype"], int(note["threads"]), None, note["backend"], group
        )
        send_note(self._sock, Kind.READY, {"revision": self._runner.info.revision})

    def _bind(self, note: dict[str, Any]) -> None:
        assert self._runner is not None
        layout = self._layout = KvLayout.from_dict(note["layout"])
        self._regions = {
            group.name: Region.create(f"kvmesh-kv-{group.name}-{self._rank}", layout.region_bytes(group))
            for group in layout.groups
        }
        views = {name: region.buf for name, region in self._regions.items()}
        # Nobody reads this one: the leader rings, after a collective that proves this rank's part.
        self._runner.bind(layout, views, Doorbell(bytearray(DOORBELL_BYTES)))
        send_frame(self._sock, Kind.BOUND)

    def _join(self, note: dict[str, Any]) -> None:
        assert self._layout is not None
        self._sidecar = SidecarThread(note, self._rank, self._layout, self._regions)

    def _step(self, body: bytes) -> None:
        assert self._runner is not None
        batch = unpack_step(body)
        self._runner.compute(batch, self._runner.prepare(batch), score=False)
        send_frame(self._sock, Kind.DONE)


def watch(sock: socket.socket) -> None:
    """End this process when the other side of the socket is closed."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    while not poller.poll():
        pass
    os._exit(LEADER_GONE)


def main(argv: list[str]) -> int:
    """Exit status: 0 after STOP, LEADER_GONE, else 1."""
    # Ctrl-C reaches the foreground group, a supervisor's SIGTERM often all processes of a service: the leader says
    # when this process ends, or what it still has to finish would die with this rank.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[0]))
    threading.Thread(target=watch, args=(sock,), name="leader-watch", daemon=True).start()
    try:
        Rank(sock).run()
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
