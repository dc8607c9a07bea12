"""Passing descriptors over a Unix socket (SCM_RIGHTS): bounded, close-on-exec, and never leaked.

Best over SOCK_SEQPACKET, which keeps messages apart. Over SOCK_STREAM the descriptors arrive with the first byte of
their message and the reader must do its own framing.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Sequence

from kvmesh.errors import DataLoss, DeadlineExceeded, InvalidArgument, TooLarge

# The kernel's SCM_MAX_FD.
MAX_FDS = 253
_INT = array.array("i").itemsize


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send `data` (at least one byte) with the descriptors, which stay open here and are the caller's.

    The socket must have a timeout or be non-blocking. Raises InvalidArgument, DeadlineExceeded, or OSError from the
    socket (a BlockingIOError of a non-blocking one means that nothing was sent).
    """
    _check_socket(sock)
    if not data:
        raise InvalidArgument("descriptors need at least one byte of data to travel with")
    if len(fds) > MAX_FDS:
        raise InvalidArgument(f"at most {MAX_FDS} descriptors a message, got {len(fds)}")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
    try:
        sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        if sent < len(data):
            # Only a stream socket does this; the descriptors left with the first part.
            sock.sendall(memoryview(data)[sent:], socket.MSG_NOSIGNAL)
    except TimeoutError as error:
        raise DeadlineExceeded("sending descriptors took too long") from error


def recv_with_fds(sock: socket.socket, maxbytes: int, maxfds: int) -> tuple[bytes, list[int]]:
    """Receive one message: (data, descriptors), which the caller must close. (b"", []) is the end of the stream.

    Whatever goes wrong, every descriptor that arrived is closed before the error is raised: TooLarge for more than
    `maxfds` or a packet over `maxbytes`, DataLoss for an ancillary part that was cut, DeadlineExceeded, OSError.
    The socket must have a timeout or be non-blocking.
    """
    _check_socket(sock)
    if maxbytes < 1 or not 0 <= maxfds <= MAX_FDS:
        raise InvalidArgument(f"maxbytes must be positive and maxfds in 0..{MAX_FDS}, got {maxbytes} and {maxfds}")
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            maxbytes, socket.CMSG_SPACE(max(1, maxfds) * _INT), socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError as error:
        raise DeadlineExceeded("no descriptors arrived in time") from error
    fds: list[int] = []
    foreign = False
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received = array.array("i")
            received.frombytes(payload[: len(payload) // _INT * _INT])
            fds += received
        else:
            foreign = True
    try:
        # The space for n descriptors has room for n + 1 by its padding, so the count is checked as well.
        if len(fds) > maxfds:
            raise TooLarge(f"{len(fds)} descriptors arrived, at most {maxfds} are taken")
        if flags & socket.MSG_CTRUNC:
            raise TooLarge(f"more descriptors arrived than the {maxfds} that are taken")
        if flags & socket.MSG_TRUNC:
            raise TooLarge(f"a packet of more than {maxbytes} bytes arrived")
        if foreign:
            raise DataLoss("a message came with ancillary data that is no descriptor")
    except BaseException:
        close_fds(fds)
        raise
    return data, fds


def close_fds(fds: Sequence[int]) -> None:
    """Close each; one that is already closed does not keep the others open."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _check_socket(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        raise InvalidArgument("descriptors travel over Unix sockets only")
    if sock.gettimeout() is None:
        raise InvalidArgument("the socket needs a timeout: every wait has a deadline")
