"""A client that leaves at any step of its request leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from gateway_fakes import MODEL
from gateway_world import World
from http_world import CHAT, Wire, chat, start_http
from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Principal
from services.gateway.job import Job
from services.gateway.limits.contract import NoHold

STEPS = range(0, 120, 1 if os.environ.get("KVMESH_SOAK") else 6)


class Counting:
    """A limiter that knows what was taken and not settled."""

    def __init__(self) -> None:
        self.held = self.taken = 0

    async def take(self, principal: Principal, job: Job, stop: Callable[[KvmeshError], None]) -> Counted:
        await asyncio.sleep(0)
        self.taken += 1
        self.held += 1
        return Counted(self)


class Counted(NoHold):
    def __init__(self, counting: Counting) -> None:
        self._counting: Counting | None = counting

    def settle(self, usage: pb.Usage, served: pb.Served | None, code: int) -> None:
        if self._counting is not None:
            self._counting.held -= 1
            self._counting = None


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": (CHAT, chat(stream=True)),
    "whole": (CHAT, chat()),
    "several": ("/v1/completions", {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True}),
    "best": ("/v1/completions", {"model": MODEL, "prompt": "a", "n": 1, "best_of": 2}),
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", list(BODIES))
async def test_leaving_at_any_step(world: World, kind: str, full: bool) -> None:
    worker = await world.worker(text="some answer")
    url = await start_http(world)
    http = world.gateway.http
    assert http is not None
    counting = Counting()
    world.gateway.front.limiter = counting
    path, body = BODIES[kind]
    for steps in STEPS:
        if full:
            worker.fill()
        wire = await Wire.to(url)
        wire.post(path, body)
        # From the step in which its task begins.
        await world.until(lambda: http.connections)
        (connection,) = http.connections
        for _ in range(steps):
            await asyncio.sleep(0)
        if steps % 8:
            wire.abort()
        else:
            connection.abort()
        await world.until(lambda: not http.connections and not http._state.tasks)
        await world.until(world.idle)
        if full:
            worker.empty()
        assert counting.held == 0, steps
        assert http.live_streams == 0
        assert not [one for one in asyncio.all_tasks() if one.get_name() in ("decide", "place")], steps
        wire.abort()
    # Nothing is in the way of the next.
    wire = await Wire.to(url)
    wire.post(CHAT, chat())
    assert (await wire.reply()).status == 200
    wire.close()
