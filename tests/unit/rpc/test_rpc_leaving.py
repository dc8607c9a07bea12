"""Servers that share a port, and one that leaves first: clients go elsewhere while its streams end whole."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvmesh.config import ServiceSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.rpc import Access, RpcServer, open_channel
from kvmesh.rpc.server import ServerOptions
from rpc_echo import Echo, Text, add_echo

LIMIT_S = 60.0


class Served:
    """A server that echoes streams until told to end them, and knows who it is."""

    def __init__(self, name: str, listen: str, **options: bool) -> None:
        async def unary(request: Any, context: Any) -> Text:
            return Text(value=name)

        async def bidi(requests: Any, context: Any) -> Any:
            async for request in requests:
                yield request

        self.name = name
        self.server = RpcServer(
            ServiceSettings(listen=listen, drain_timeout_s=LIMIT_S), options=ServerOptions(**options)
        )
        add_echo(self.server, Access.PUBLIC, unary=unary, bidi=bidi)


async def test_a_port_can_be_shared_by_those_who_all_say_so() -> None:
    one = Served("one", "127.0.0.1:0", shared_port=True)
    address = await one.server.start()
    two = Served("two", address, shared_port=True)
    other = Served("other", address)
    try:
        assert await two.server.start() == address
        with pytest.raises(FailedPrecondition):
            await other.server.start()
        seen = set()
        async with asyncio.timeout(LIMIT_S):
            while seen != {"one", "two"}:
                async with open_channel(address) as channel:
                    seen.add((await Echo(channel).unary(Text(), timeout=LIMIT_S)).value)
    finally:
        for served in (one, two, other):
            await served.server.close()


async def test_who_leaves_first_is_found_no_more_and_ends_its_streams() -> None:
    served = Served("one", "127.0.0.1:0", leaves_first=True)
    address = await served.server.start()
    served.server.set_ready(True)
    successor: Served | None = None
    channel = open_channel(address)
    try:
        echo = Echo(channel)
        stream = echo.bidi(timeout=LIMIT_S)
        await stream.write(Text(value="a"))
        assert (await stream.read()).value == "a"
        drain = asyncio.create_task(served.server.drain())
        # Its port is free at once, though it does not end before its stream does.
        async with asyncio.timeout(LIMIT_S):
            while successor is None:
                made = Served("two", address)
                try:
                    await made.server.start()
                    successor = made
                except FailedPrecondition:
                    await made.server.close()
                    await asyncio.sleep(0.01)
        assert not drain.done()
        # The old connection was said goodbye on: the next call of the same channel goes to the successor, by itself.
        reply = await echo.unary(Text(), timeout=LIMIT_S, wait_for_ready=True)
        assert reply.value == "two"
        await stream.write(Text(value="b"))
        assert (await stream.read()).value == "b"
        assert not drain.done()
        await stream.done_writing()
        async with asyncio.timeout(LIMIT_S):
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
            await drain
    finally:
        await channel.close()
        await served.server.close()
        if successor is not None:
            await successor.server.close()


async def test_the_end_of_the_grace_is_the_end() -> None:
    served = Served("one", "127.0.0.1:0", leaves_first=True)
    served.server.settings = served.server.settings.model_copy(update={"drain_timeout_s": 0.2})
    address = await served.server.start()
    async with open_channel(address) as channel:
        stream = Echo(channel).bidi(timeout=LIMIT_S)
        await stream.write(Text(value="a"))
        assert (await stream.read()).value == "a"
        async with asyncio.timeout(LIMIT_S):
            await served.server.drain()
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
