"""`kvmesh cache|router|workers` against routers and workers that are played: replicas that differ, hang or are gone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from rich.console import Console

from kvmesh.cli import cache, router, workers
from kvmesh.cli.options import Mesh, mesh_of
from kvmesh.cli.tls import PLAINTEXT
from kvmesh.errors import NotFound, Unavailable
from kvmesh.proto.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    router_admin_pb2,
    router_admin_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

GONE = "127.0.0.1:1"
SERVING = engine_pb2.WORKER_STATE_SERVING


class Played(router_admin_pb2_grpc.RouterAdminServicer, router_pb2_grpc.RouterServicer, engine_pb2_grpc.EngineServicer):
    """A router, or a worker, that knows what it was told."""

    def __init__(
        self, decided_at: float = 0.0, purged: int = 0, fleet: tuple[str, ...] = (), address: str = ""
    ) -> None:
        self.decided_at = decided_at
        self.purged = purged
        self.fleet = fleet
        self.worker_address = address
        self.calls: list[str] = []

    async def Explain(self, request: Any, context: Any) -> Any:
        if not self.decided_at:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return router_admin_pb2.ExplainResponse(request_id=request.request_id, decided_at=self.decided_at, model="m")

    async def CachePurge(self, request: Any, context: Any) -> Any:
        self.calls.append("purge")
        return router_admin_pb2.CachePurgeResponse(purged=self.purged, epoch=3)

    async def Watch(self, request: Any, context: Any) -> Any:
        infos = [
            engine_pb2.WorkerInfo(worker_id=name, address=self.worker_address, state=SERVING) for name in self.fleet
        ]
        yield router_pb2.WatchResponse(snapshot=True, workers=[router_pb2.WorkerStatus(info=info) for info in infos])

    async def Cordon(self, request: Any, context: Any) -> Any:
        self.calls.append("cordon")
        return engine_pb2.CordonResponse(info=engine_pb2.WorkerInfo(state=engine_pb2.WORKER_STATE_CORDONED))


@contextlib.asynccontextmanager
async def played(*players: Played, more: tuple[str, ...] = ()) -> AsyncIterator[Mesh]:
    servers, addresses = [], []
    for player in players:
        server = grpc.aio.server()
        router_admin_pb2_grpc.add_RouterAdminServicer_to_server(player, server)
        router_pb2_grpc.add_RouterServicer_to_server(player, server)
        engine_pb2_grpc.add_EngineServicer_to_server(player, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield Mesh((*more, *addresses), (), PLAINTEXT)
    finally:
        for server in servers:
            await server.stop(None)


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    view: Callable[[Any], Any] = router.explained_view

    def spy(explained: Any) -> Any:
        seen.append(explained)
        return view(explained)

    monkeypatch.setattr(router, "explained_view", spy)
    return seen


async def test_the_decisions_of_all_replicas_are_explained(views: list[Any]) -> None:
    request = router_admin_pb2.ExplainRequest(request_id="q")
    async with played(Played(5.0), Played(), Played(9.0), Played(7.0), more=(GONE,)) as mesh:
        assert await router.explain_one(mesh, request) == 0
    assert [each.decided_at for each in views] == [5.0, 7.0, 9.0]


async def test_a_replica_that_is_away_might_have_decided() -> None:
    request = router_admin_pb2.ExplainRequest(request_id="q")
    async with played(Played()) as mesh:
        with pytest.raises(NotFound):
            await router.explain_one(mesh, request)
    async with played(Played(), more=(GONE,)) as mesh:
        with pytest.raises(Unavailable) as caught:
            await router.explain_one(mesh, request)
    assert GONE in caught.value.message
    assert "NOT_FOUND" in caught.value.message


async def test_every_replica_purges(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Played(purged=2), Played(purged=1)
    request = router_admin_pb2.CachePurgeRequest(all=True)
    async with played(first, second) as mesh:
        assert await cache.purge_all(mesh, request) == 0
    assert "purged 3 answer(s); epoch 3" in capsys.readouterr().out
    assert first.calls == second.calls == ["purge"]
    async with played(first, more=(GONE,)) as mesh:
        assert await cache.purge_all(mesh, request) == 1
    assert GONE in capsys.readouterr().err


async def test_workers_are_those_that_any_replica_knows(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Played()
    async with played(worker) as there:
        address = there.routers[0]
        async with played(Played(), Played(fleet=("a", "b"), address=address)) as mesh:
            assert sorted(await workers.read_fleet(mesh)) == ["a", "b"]
            assert await workers.set_cordon(mesh, ["b", "a"], True) == 0
            with pytest.raises(NotFound):
                await workers.set_cordon(mesh, ["a", "c"], True)
    assert worker.calls == ["cordon", "cordon"]
    assert capsys.readouterr().out.split() == ["b:", "cordoned", "a:", "cordoned"]


async def test_one_worker_that_is_gone_does_not_spare_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Played()
    async with played(worker) as there:
        gone = Played(fleet=("gone",), address=GONE)
        async with played(gone, Played(fleet=("here",), address=there.routers[0])) as mesh:
            assert await workers.set_cordon(mesh, ["gone", "here"], True) == 1
            told = capsys.readouterr()
            assert await workers.drain_all(mesh, ["gone"], 1.0) == 1
    assert worker.calls == ["cordon"]
    assert told.err.startswith("gone at 127.0.0.1:1: UNAVAILABLE")
    assert capsys.readouterr().err.startswith("gone at 127.0.0.1:1: UNAVAILABLE")


def test_words_of_others_are_neither_markup_nor_commands() -> None:
    candidate = router_admin_pb2.ExplainedCandidate(text="what closes [b] but [/i]?\x1b[2J\a")
    explained = router_admin_pb2.ExplainResponse(
        cache=router_admin_pb2.ExplainedCache(candidates=[candidate]),
        workers=[router_admin_pb2.ExplainedWorker(worker_id="w[/x]")],
    )
    console = Console(width=240, force_terminal=False)
    with console.capture() as capture:
        console.print(router.explained_view(explained))
    assert "what closes [b] but [/i]?" in capture.get()
    assert "w[/x]" in capture.get()
    assert not {"\x1b", "\a"} & set(capture.get())


def test_no_address_is_an_error_of_the_command_line() -> None:
    import typer

    with pytest.raises(typer.Exit) as caught:
        mesh_of(" , ", "", PLAINTEXT)
    assert caught.value.exit_code == 2
