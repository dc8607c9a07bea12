"""What clients of HTTP see of a gateway that leaves: first nothing but `Connection: close`, then an end to listening.

A request that was on its way on an open connection is answered: HTTP/1 has no goodbye, and a client that finds the
connection closed under its request cannot tell whether it was taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway_fakes import WAIT_S
from gateway_world import World
from http_world import CHAT, Wire, chat, get, start_http
from services.gateway.http import server as http_server

LONG_S = 600.0


@pytest_asyncio.fixture
async def leaving(world: World) -> AsyncIterator[Any]:
    """Begin the drain of the world's gateway; it is waited for at the end."""
    begun: list[asyncio.Task[None]] = []

    def begin() -> asyncio.Task[None]:
        begun.append(asyncio.create_task(world.server.drain(world.gateway.drain)))
        return begun[-1]

    yield begin
    for task in begun:
        task.cancel()


async def test_before_the_drain_all_is_served_and_connections_are_given_up(world: World, leaving: Any) -> None:
    await world.worker(text="an answer")
    url = await start_http(world, drain_delay_s=LONG_S)
    kept = await Wire.to(url)
    kept.post(CHAT, chat())
    assert "connection" not in (await kept.reply()).headers
    drain = leaving()
    await world.until(lambda: not world.server.ready)
    assert (await get(url, "/readyz")).status == 503
    assert (await get(url, "/livez")).status == 200
    # On a connection from before, and on a new one.
    for wire in (kept, await Wire.to(url)):
        wire.post(CHAT, chat())
        reply = await wire.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await wire.rest() == b""
    assert not world.server.draining
    # The workers' comings and goings do not make it ready again.
    world.gateway._on_change()
    assert not world.server.ready
    # A second signal waits for nothing.
    world.server.request_stop()
    world.server.request_stop()
    async with asyncio.timeout(WAIT_S):
        await drain


async def test_a_request_on_its_way_is_answered_after_the_end_of_listening(
    world: World, leaving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LAST_CALL_S", LONG_S)
    await world.worker(text="an answer")
    url = await start_http(world, drain_timeout_s=LONG_S)
    used, fresh = await Wire.to(url), await Wire.to(url)
    used.post(CHAT, chat())
    assert (await used.reply()).status == 200
    http = world.gateway.http
    assert http is not None
    await world.until(lambda: len(http.connections) == 2)
    drain = leaving()
    await world.until(lambda: http._server is not None and not http._server.is_serving())
    with pytest.raises(httpx.ConnectError):
        await get(url, "/livez")
    for wire in (used, fresh):
        assert not drain.done()
        wire.post(CHAT, chat())
        reply = await wire.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await wire.rest() == b""
    # Nobody is left who could ask, so nothing is waited for.
    async with asyncio.timeout(WAIT_S):
        await drain


async def test_who_does_not_ask_is_not_waited_for_long(world: World, leaving: Any) -> None:
    await world.worker()
    url = await start_http(world, drain_timeout_s=LONG_S)
    wire = await Wire.to(url)
    drain = leaving()
    async with asyncio.timeout(WAIT_S):
        assert await wire.rest() == b""
        await drain
