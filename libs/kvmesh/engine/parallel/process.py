"""A rank's process as its leader sees it: a child of its own, or one that another host's agent runs."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import Protocol

PROGRAM = "kvmesh.engine.parallel.rank"
# To a rank that does not read what it is sent.
SEND_S = 30
# In place of a descriptor: the rank shares no memory with its leader.
NO_STEPS = -1


class RankProcess(Protocol):
    """What the leader's hold on a rank needs of its process."""

    pid: int

    @property
    def where(self) -> str:
        """For messages: "pid 12", with its host where that is another."""

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it is not known."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended by then."""

    def kill(self) -> None:
        """End it, at once."""


class LocalProcess:
    """A child program with its end of a socket."""

    def __init__(self, theirs: socket.socket, steps: int, threads: int, program: str) -> None:
        """theirs: the rank's socket; the caller closes its own copy. steps: descriptor of the region of steps, or
        NO_STEPS. threads: for OpenMP. It is no fork: torch's threads are not safe to fork. Raises OSError."""
        # What this process can import, the other can.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, str(theirs.fileno()), str(steps)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *([steps] if steps != NO_STEPS else [])],
        )
        self.pid = self._process.pid

    @property
    def where(self) -> str:
        """See `RankProcess`."""
        return f"pid {self.pid}"

    @property
    def returncode(self) -> int | None:
        """See `RankProcess`."""
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `RankProcess`; None: as long as it takes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def kill(self) -> None:
        """See `RankProcess`."""
        self._process.kill()


class RemoteProcess:
    """A rank on another host. Its agent tells how it ended; the end of its connection ends it."""

    def __init__(self, sock: socket.socket, pid: int, host: str) -> None:
        self.pid = pid
        self._sock = sock
        self._host = host
        self._ended = threading.Event()
        self._code: int | None = None

    @property
    def where(self) -> str:
        """See `RankProcess`."""
        return f"pid {self.pid} on {self._host}"

    @property
    def returncode(self) -> int | None:
        """See `RankProcess`."""
        return self._code

    def settle(self, code: int | None) -> None:
        """Its agent says how it ended, or (None) will say nothing any more."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """See `RankProcess`."""
        return self._ended.wait(timeout_s)

    def kill(self) -> None:
        """See `RankProcess`: a thread of the rank watches for the end of its connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def limit_sends(sock: socket.socket, seconds: int = SEND_S) -> None:
    """Let a send fail that takes so long. Receiving still waits as long as the other side lives."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))


def spawn_rank(steps: int, threads: int, program: str = PROGRAM) -> tuple[LocalProcess, socket.socket]:
    """A rank on this host, and the leader's end of a socket pair to it. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        limit_sends(ours)
        return LocalProcess(theirs, steps, threads, program), ours
    except BaseException:
        ours.close()
        raise
    finally:
        # Held by the rank alone, so that its end is seen here.
        theirs.close()
