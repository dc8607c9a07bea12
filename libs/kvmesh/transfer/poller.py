"""ppoll: a wait on descriptors with a timeout of microseconds. Python's own poll has milliseconds, and select's
descriptors end at 1024; a mover that waits for the next layer needs the one and may outlive the other."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Mapping

from kvmesh.transfer.native.moves import EVENT, Bells, Look

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
_libc = ctypes.CDLL(None, use_errno=True)


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc.ppoll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)


def sharpen_timers() -> None:
    """Let this thread's waits end within a microsecond of their time instead of 50. Best effort."""
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))


class Poller:
    """A set of descriptors with event masks; one thread's."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._array: ctypes.Array[_PollFd] | None = None
        self._time = _Timespec()

    @property
    def masks(self) -> Mapping[int, int]:
        """What is waited for now."""
        return self._masks

    def set(self, fd: int, mask: int) -> None:
        """Wait for these events too (or instead)."""
        if self._masks.get(fd) != mask:
            self._masks[fd] = mask
            self._array = None

    def remove(self, fd: int) -> None:
        """Forget a descriptor; call it before closing it. Idempotent."""
        if self._masks.pop(fd, None) is not None:
            self._array = None

    def wait(self, seconds: float) -> list[int]:
        """Descriptors with events (errors and hang-ups included), [] after `seconds` or a signal."""
        array = self._prepared()
        whole = int(seconds)
        self._time.tv_sec = whole
        self._time.tv_nsec = int((seconds - whole) * 1e9)
        count = _libc.ppoll(ctypes.addressof(array), len(array), ctypes.addressof(self._time), None)
        if count < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                return []
            raise OSError(code, os.strerror(code))
        return self._ready() if count else []

    def watch(self, bells: Bells, value: int, look: Look) -> list[int]:
        """Like `wait`, and back at once, with [], when the bells have reached the value."""
        array = self._prepared()
        found = bells.watch(ctypes.addressof(array), len(array), value, look)
        return self._ready() if found == EVENT else []

    def _prepared(self) -> ctypes.Array[_PollFd]:
        if self._array is None:
            self._array = (_PollFd * len(self._masks))(*(_PollFd(fd, mask, 0) for fd, mask in self._masks.items()))
        return self._array

    def _ready(self) -> list[int]:
        array = self._prepared()
        ready = [entry.fd for entry in array if entry.revents]
        for entry in array:
            if entry.revents & select.POLLNVAL:
                # Closed behind our back: waiting on it would spin.
                self.remove(entry.fd)
        return ready
