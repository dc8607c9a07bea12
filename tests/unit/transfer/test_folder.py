"""A folder of sidecars' sockets, without sidecars: names, order, and what the dead leave."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import pytest

from kvmesh.config import DecodeSettings
from kvmesh.engine.worker.posting import check_route
from kvmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.transfer.folder import Sockets, own_socket, publish, sockets
from kvmesh.transfer.orphans import Writers
from kvmesh.transfer.transports.sockets.listener import listen_unix
from kvmesh.transfer.wire import open_unix


async def visit(path: Path) -> Path:
    (await open_unix(path, 5)).close()
    return path


def dead(path: Path) -> Path:
    """A socket whose process was killed."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
    return path


def test_a_folder_gives_each_life_a_name_of_its_own_and_a_file_stays_itself(tmp_path: Path) -> None:
    assert own_socket(tmp_path / "engine.sock") == tmp_path / "engine.sock"
    first, second = own_socket(tmp_path), own_socket(tmp_path)
    assert first != second
    assert first.parent == second.parent == tmp_path
    assert {first.suffix, second.suffix} == {".sock"}


def test_a_socket_gets_its_name_once_it_listens(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    seen: list[list[Path]] = []

    def listen(hidden: Path) -> socket.socket:
        server = listen_unix(hidden)
        seen.append(sockets(tmp_path))
        return server

    with publish(listen, path):
        assert seen == [[]]
        assert sockets(tmp_path) == [path]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(path))


def test_nothing_is_left_where_it_cannot_get_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.sock").mkdir()
    with pytest.raises(IsADirectoryError):
        publish(listen_unix, tmp_path / "a.sock")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.sock"]


async def test_the_dead_are_cleared_away_and_the_living_are_found(tmp_path: Path) -> None:
    gone = [dead(tmp_path / f"{n}.sock") for n in range(5)]
    beside = dead(tmp_path / "0.sock.shm")
    (tmp_path / "note.txt").write_text("not a socket")
    living = tmp_path / "z.sock"
    found = Sockets(tmp_path)
    # In random order: each dead one is met sooner or later.
    with publish(listen_unix, living):
        for _ in range(200):
            assert await found.claim(visit) == living
            found._last = None
            if not any(path.exists() for path in gone):
                break
        assert not any(path.exists() for path in (*gone, beside))
        assert sorted(os.listdir(tmp_path)) == ["note.txt", "z.sock"]


async def test_what_is_no_socket_is_told_of_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.sock").write_text("somebody's file")
    (tmp_path / "b.sock").mkdir()
    (tmp_path / "c.sock").symlink_to(dead(tmp_path / "elsewhere"))
    caplog.set_level("INFO")
    with pytest.raises(Unavailable, match=r"a\.sock: .*; b\.sock: .*; c\.sock: "):
        await Sockets(tmp_path).claim(visit)
    assert sorted(os.listdir(tmp_path)) == ["a.sock", "b.sock", "c.sock", "elsewhere"]
    assert not caplog.records


async def test_each_refusal_is_told_and_the_last_sidecar_is_asked_first(tmp_path: Path) -> None:
    names = ["a.sock", "b.sock", "c.sock"]
    servers = [publish(listen_unix, tmp_path / name) for name in names]
    asked: list[str] = []
    free = {"b.sock"}

    async def register(path: Path) -> str:
        asked.append(path.name)
        if path.name not in free:
            raise FailedPrecondition(f"engine of {path.name} is registered here")
        return path.name

    found = Sockets(tmp_path)
    assert await found.claim(register) == "b.sock"
    free.update(names)
    for _ in range(10):
        asked.clear()
        assert await found.claim(register) == "b.sock"
        assert asked == ["b.sock"]
    free.clear()
    with pytest.raises(Unavailable, match=r"no free sidecar in .*: a\.sock: .*; b\.sock: .*; c\.sock: ") as first:
        await found.claim(register)
    with pytest.raises(Unavailable) as second:
        await found.claim(register)
    # The same words each time, whatever the order: a log tells them once.
    assert first.value.message == second.value.message
    assert sockets(tmp_path) == [tmp_path / name for name in names]
    for server in servers:
        server.close()


async def test_an_empty_folder_and_a_single_socket(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="none is there"):
        await Sockets(tmp_path).claim(visit)
    alone = tmp_path / "engine.sock"
    with pytest.raises(Unavailable, match="No such file"):
        await Sockets(alone).claim(visit)
    # A dead one that a setting names stays: its successor replaces it.
    dead(alone)
    with pytest.raises(Unavailable, match="refused"):
        await Sockets(alone).claim(visit)
    assert alone.exists()


async def test_only_a_successor_on_the_same_socket_proves_that_the_sidecar_before_let_go() -> None:
    writers = Writers()
    freed: list[str] = []
    first = writers.sidecar_joined(open_pidfd(), "/f/a.sock")
    writers.when_gone(partial(freed.append, "a"), only=first)
    second = writers.sidecar_joined(open_pidfd(), "/f/b.sock")
    writers.when_gone(partial(freed.append, "b"), only=second)
    # The process lives (it is this one), and it may still move bytes for us.
    assert freed == []
    writers.sidecar_joined(open_pidfd(), "/f/a.sock")
    assert freed == ["a"]
    writers.close()
    assert freed == ["a", "b"]


def test_ranks_need_a_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="folder"):
        check_route(DecodeSettings(sidecar_socket=tmp_path, tp=2))
    check_route(DecodeSettings(sidecar_socket=tmp_path))
    check_route(DecodeSettings(sidecar_socket=tmp_path / "engine.sock", tp=2))
