"""Process lives as descriptors: a pidfd names one process for ever, also across PID namespaces."""

from __future__ import annotations

import errno
import os
import select
import time
import weakref

from kvmesh.errors import InvalidArgument, NotFound


def open_pidfd(pid: int | None = None) -> int:
    """A pidfd (close-on-exec) of this process or of `pid`. Raises NotFound where there is no such process."""
    try:
        return os.pidfd_open(os.getpid() if pid is None else pid)
    except ProcessLookupError as error:
        raise NotFound(f"no process {pid}") from error


def check_pidfd(fd: int) -> None:
    """Raises InvalidArgument where a descriptor that a peer sent is no pidfd: any other would never report an exit."""
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            is_pidfd = any(line.startswith("Pid:") for line in info)
    except OSError:
        is_pidfd = False
    if not is_pidfd:
        raise InvalidArgument(f"descriptor {fd} is no pidfd")


def is_alive(pidfd: int) -> bool:
    """False once the process has exited, reaped or not."""
    return not wait_exit(pidfd, 0.0)


class Life:
    """A process's life by a pidfd of its own, which is closed with the last reference at the latest."""

    def __init__(self, pidfd: int) -> None:
        """pidfd: duplicated. Raises OSError."""
        self._fd = os.dup(pidfd)
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def alive(self) -> bool:
        """False once it has exited, and after `close`."""
        return self._close.alive and is_alive(self._fd)

    def copy(self) -> Life:
        """Another one, with its own pidfd. Raises OSError after `close`."""
        if not self._close.alive:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return Life(self._fd)

    def close(self) -> None:
        """Close the pidfd. Idempotent."""
        self._close()


def wait_exit(pidfd: int, timeout: float) -> bool:
    """Wait up to `timeout` seconds; True if the process has exited."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.0, deadline - time.monotonic())
        # Rounded up: poll's clock has milliseconds, and 0 would spin to the deadline.
        for _, events in poller.poll(int(left * 1000) + (1 if left else 0)):
            if events & select.POLLNVAL:
                raise InvalidArgument(f"descriptor {pidfd} is not open")
            return True
        if time.monotonic() >= deadline:
            return False
