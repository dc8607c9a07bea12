"""A process without descriptors pauses instead of spinning, and accepts again when it has some."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from kvmesh.transfer.transports.sockets import listener
from kvmesh.transfer.transports.sockets.listener import Listener, listen_unix


class Exhausted(socket.socket):
    """Accepts nobody `left` times."""

    left = 0
    refusals = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.left:
            self.left -= 1
            self.refusals += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_without_descriptors_it_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PAUSE_S", 0.05)
    path = tmp_path / "door"
    server = Exhausted(fileno=listen_unix(path).detach())
    server.left = 3
    came: asyncio.Queue[socket.socket] = asyncio.Queue()
    door = Listener(server, came.put_nowait)
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, os.fspath(path))
    async with asyncio.timeout(60):
        sock = await came.get()
    assert server.refusals == 3
    sock.close()
    client.close()
    door.close()
    door.close()


async def test_closing_in_the_pause_is_the_end(tmp_path: Path) -> None:
    server = Exhausted(fileno=listen_unix(tmp_path / "door").detach())
    server.left = 1 << 30
    door = Listener(server, lambda sock: sock.close())
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, os.fspath(tmp_path / "door"))
    async with asyncio.timeout(60):
        while not server.refusals:
            await asyncio.sleep(0.001)
    pause = door._pause
    assert pause is not None
    assert not pause.cancelled()
    door.close()
    assert pause.cancelled()
    assert server.fileno() < 0
    client.close()


def test_a_socket_is_its_user_s_alone_or_a_group_s_too(tmp_path: Path) -> None:
    for group, mode in ((None, 0o600), (os.getegid(), 0o660)):
        path = tmp_path / f"door-{group}"
        with listen_unix(path, group):
            found = path.stat()
            assert found.st_mode & 0o777 == mode
            assert found.st_gid == os.getegid()
