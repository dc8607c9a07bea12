"""A listening socket that survives a process without descriptors, and the Unix socket of this user alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvmesh.errors import FailedPrecondition

log = logging.getLogger(__name__)
BACKLOG = 64
# Out of descriptors or memory: the socket stays readable, and accepting at once again would spin.
PAUSE_S = 0.25
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Hands accepted, non-blocking sockets to `on_socket` on the loop it was made on. Takes the server socket over."""

    def __init__(self, server: socket.socket, on_socket: Callable[[socket.socket], None]) -> None:
        server.setblocking(False)
        self._server = server
        self._on_socket = on_socket
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(server.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._server.fileno() >= 0:
            self._loop.remove_reader(self._server.fileno())
            self._server.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                log.error("nobody can be accepted for %g s: %s", PAUSE_S, error.strerror)
                self._loop.remove_reader(self._server.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
            return
        sock.setblocking(False)
        self._on_socket(sock)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._server.fileno(), self._accept)


def listen_unix(path: Path, group: int | None = None) -> socket.socket:
    """A listening non-blocking Unix socket that only this user, or a group, may open; a dead one's is replaced.

    Raises FailedPrecondition where somebody listens there, OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            else:
                raise FailedPrecondition(f"somebody listens on {path} already")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        server.setblocking(False)
        server.bind(os.fspath(path))
        if group is not None:
            os.chown(path, -1, group)
        os.chmod(path, 0o600 if group is None else 0o660)
        server.listen(BACKLOG)
    except BaseException:
        server.close()
        raise
    return server
