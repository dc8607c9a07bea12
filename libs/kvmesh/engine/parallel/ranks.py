"""The leader's hold on the other ranks: starts their processes, talks to them, notices at once when one is gone.

A rank that is lost cannot be replaced: its part of the KV is gone, and the others wait for it in a collective. So the
first loss ends the group: every other rank is killed, which also frees a leader that waits in a collective, since its
connections break. The owner is told once and is expected to end the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.parallel.slots import SLOT_BYTES, StepSlots, bytes_for
from kvmesh.engine.parallel.wire import Frame, Kind, recv_frame, send_frame
from kvmesh.engine.runner import Runner
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.region import Region
from kvmesh.loading.sharding import check_parallel
from kvmesh.loading.source import open_checkpoint, resolve

log = logging.getLogger(__name__)

STOP_S = 5.0
# To a rank that does not read what it is sent.
SEND_S = 30
_REAP_S = 2.0
# Between two looks at a slot that a rank has yet to read.
_SLOT_POLL_S = 0.001
PROGRAM = "kvmesh.engine.parallel.rank"
_WAITING_FRAMES = 64


@dataclass(slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    frames: queue.Queue[Frame | None] = field(default_factory=lambda: queue.Queue(_WAITING_FRAMES))
    thread: threading.Thread | None = None


class RankGroup:
    """Processes of ranks 1 .. size - 1. `gather` is for one thread at a time; all else is thread-safe."""

    def __init__(self, size: int, threads: int, program: str = PROGRAM) -> None:
        """Start the processes; `threads` is for OpenMP in each of them, `program` the module that they run. Raises
        Unavailable."""
        self.size = size
        self._region = Region.create("kvmesh-steps", bytes_for(size))
        self._slots = StepSlots(self._region, size)
        self._lock = threading.Lock()
        # Frames of two threads must not mix. Not `_lock`: a rank that does not read holds a sender up.
        self._sending = threading.Lock()
        self._reason: str | None = None
        self._lost = threading.Event()
        self._closing = False
        self._listeners: list[Callable[[str], None]] = []
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, size):
                self._ranks.append(_spawn(rank, threads, program, self._region.fd))
        except OSError as error:
            self.kill()
            self._slots.close()
            self._region.close()
            raise Unavailable(f"cannot start rank {len(self._ranks) + 1}: {error.strerror}") from error
        for member in self._ranks:
            member.thread = threading.Thread(target=self._read, args=(member,), name=f"rank-{member.rank}", daemon=True)
            member.thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 .. size - 1."""
        return [member.process.pid for member in self._ranks]

    @property
    def lost(self) -> str | None:
        """Why the group is of no further use, None while it is."""
        return self._reason

    def check(self) -> None:
        """Raises Unavailable once a rank is lost."""
        if self._reason is not None:
            raise Unavailable(self._reason)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Call `listener(reason)` once, from any thread, when the group is lost; at once if it already is."""
        with self._lock:
            reason = self._reason
            if reason is None:
                self._listeners.append(listener)
        if reason is not None:
            listener(reason)

    def fail(self, reason: str) -> KvmeshError:
        """The group is lost: kill every rank, tell the listeners. Returns the error to raise, with the first reason."""
        with self._lock:
            first = self._reason is None
            if self._reason is None:
                self._reason = reason
            told = self._reason
            self._lost.set()
            listeners = self._listeners if first and not self._closing else []
        if first:
            log.error("tensor parallel group lost: %s", told)
            self._kill()
            for listener in listeners:
                listener(told)
            self._reap()
        return Unavailable(told)

    def broken(self, reason: str) -> KvmeshError:
        """`fail`, unless a rank turns out to be gone: what failed then failed because of it."""
        self._lost.wait(_REAP_S)
        return self.fail(reason)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """The same frame to every rank. Raises Unavailable, after which the group is lost."""
        self._send_each(kind, [body] * len(self._ranks))

    def send_step(self, body: bytes, timeout_s: float) -> None:
        """A packed step to every rank, through shared memory where it fits. For one thread at a time. Raises
        Unavailable, after which the group is lost."""
        if len(body) > SLOT_BYTES:
            self.send(Kind.STEP, body)
            return
        self.check()
        deadline = time.monotonic() + timeout_s
        # At once, unless steps are sent faster than they are collected.
        while (number := self._slots.put(body)) is None:
            self._lost.wait(_SLOT_POLL_S)
            self.check()
            if time.monotonic() > deadline:
                raise self.fail(f"ranks take no step within {timeout_s:g} s")
        self.send(Kind.SLOT, number.to_bytes(8, "little"))

    def _send_each(self, kind: Kind, bodies: Sequence[bytes]) -> None:
        self.check()
        with self._sending:
            for member, body in zip(self._ranks, bodies, strict=True):
                try:
                    send_frame(member.sock, kind, body)
                except OSError as error:
                    raise self.broken(f"rank {member.rank} takes no message: {error.strerror or error}") from error

    def note(self, kind: Kind, note: Mapping[str, Any]) -> None:
        """`send` with a JSON object."""
        self.send(kind, json.dumps(note).encode())

    def setup(self, note: Mapping[str, Any]) -> None:
        """SETUP to every rank, with its number in it."""
        self._send_each(Kind.SETUP, [json.dumps({**note, "rank": each.rank}).encode() for each in self._ranks])

    def gather(self, kind: Kind, timeout_s: float) -> list[Frame]:
        """The next frame of every rank, by rank. Raises Unavailable, after which the group is lost."""
        deadline = time.monotonic() + timeout_s
        frames = []
        for member in self._ranks:
            try:
                frame = member.frames.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self.fail(f"rank {member.rank} does not answer ({kind.name}) within {timeout_s:g} s") from None
            if frame is None:
                self.check()
            if frame is None or frame.kind is not kind:
                got = "nothing" if frame is None else frame.kind.name
                raise self.fail(f"rank {member.rank} answers {got} where {kind.name} was due")
            frames.append(frame)
        return frames

    def close(self) -> None:
        """Tell the ranks to end, wait a little, kill what is left. Idempotent; blocks up to STOP_S."""
        with self._lock:
            self._closing = True
            if self._reason is None:
                self._reason = "the engine is stopping"
        for member in self._ranks:
            with contextlib.suppress(OSError):
                send_frame(member.sock, Kind.STOP)
        deadline = time.monotonic() + STOP_S
        for member in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for member in self._ranks:
            if member.thread is not None and member.thread is not threading.current_thread():
                member.thread.join(_REAP_S)
            member.sock.close()
        self._slots.close()
        self._region.close()

    def kill(self) -> None:
        """SIGKILL to every rank that still runs, and reap them."""
        self._kill()
        self._reap()

    def _kill(self) -> None:
        for member in self._ranks:
            member.process.kill()

    def _reap(self) -> None:
        for member in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(_REAP_S)

    def _read(self, member: _Rank) -> None:
        """One rank's frames, until it is gone. Its socket's end is its life: the kernel closes it with the process."""
        why = ""
        try:
            while (frame := recv_frame(member.sock)) is not None:
                if frame.kind is Kind.FAILED:
                    why = str(frame.note().get("reason", ""))
                    continue
                member.frames.put(frame, timeout=_REAP_S)
        except (KvmeshError, OSError, queue.Full) as error:
            why = why or str(error) or type(error).__name__
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(_REAP_S)
        if not self._closing:
            code = member.process.returncode
            ended = f"ended with code {code}" if code is not None else "closed its connection"
            self.fail(f"rank {member.rank} (pid {member.process.pid}) {ended}{': ' if why else ''}{why}")
        with contextlib.suppress(queue.Full):
            member.frames.put_nowait(None)


def start_ranks(spec: str, size: int, threads: int, program: str = PROGRAM) -> RankGroup:
    """Ranks for a model, once it is clear that it can be shared by so many: InvalidArgument where it cannot, and as
    `open_checkpoint`. Before torch is imported here, so that all processes import it at the same time."""
    checkpoint = open_checkpoint(resolve(spec))
    try:
        check_parallel(checkpoint.config, size)
    finally:
        checkpoint.close()
    return RankGroup(size, threads, program)


def ranks_of(runner: Runner) -> RankGroup | None:
    """The processes that a runner leads, None for a runner of one rank."""
    ranks = getattr(runner, "ranks", None)
    return ranks if isinstance(ranks, RankGroup) else None


def _spawn(rank: int, threads: int, program: str, steps: int) -> _Rank:
    """A new process with its end of a socket pair, and the descriptor `steps`. It is no fork: torch's threads are not
    safe to fork."""
    ours, theirs = socket.socketpair()
    try:
        # Only for sending: reading waits as long as the rank lives.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        # What this process can import, the other can.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-m", program, str(theirs.fileno()), str(steps)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), steps],
        )
    except BaseException:
        ours.close()
        raise
    finally:
        # Held by the rank alone, so that its end is seen here.
        theirs.close()
    return _Rank(rank, process, ours)
