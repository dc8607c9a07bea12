"""SIGTERM on a real process: readiness off, new calls refused, the stream in flight ends whole, then the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh import errors
from kvmesh.rpc import cancelling, open_channel, raising
from rpc_echo import SERVICE, Echo, Text

HERE = Path(__file__).parent
LIBS = HERE.parents[2] / "libs"


class Process:
    def __init__(self, process: asyncio.subprocess.Process, ready: Path) -> None:
        self.process = process
        self.ready = ready

    async def line(self, containing: str, stream: str = "stderr") -> str:
        reader = getattr(self.process, stream)
        async with asyncio.timeout(60):
            while True:
                line = (await reader.readline()).decode()
                assert line, f"the process ended without {containing!r}"
                if containing in line:
                    return line

    async def up(self) -> dict:
        await self.line("addresses are in")
        return json.loads(self.ready.read_text())

    async def wait(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 60)


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator:
    made: list[Process] = []

    async def run(*flags: str) -> Process:
        ready = tmp_path / "run" / "ready.json"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "rpc_drain_service.py"),
            "--ready-file",
            str(ready),
            *flags,
            env={**os.environ, "PYTHONPATH": f"{LIBS}:{HERE}"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        made.append(Process(process, ready))
        return made[-1]

    yield run
    for item in made:
        if item.process.returncode is None:
            item.process.kill()
            await item.process.wait()


async def test_sigterm_lets_the_stream_in_flight_finish(start) -> None:
    process = await start("--metrics-listen", "127.0.0.1:0")
    info = await process.up()
    assert info["pid"] == process.process.pid
    assert info["extra"] == SERVICE
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{info['metrics']}/metrics").read())
    assert b"kvmesh:build_info" in page
    async with open_channel(info["address"]) as channel:
        echo, health = Echo(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        with cancelling(watch), cancelling(echo.bidi(timeout=60)) as call:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await call.write(Text(value="before"))
            assert (await call.read()).value == "before"
            process.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await process.line("drain", "stdout")
            with pytest.raises(errors.Unavailable, match="shutting down"), raising():
                await echo.unary(Text())
            live = await health.Check(health_pb2.HealthCheckRequest())
            assert live.status == health_pb2.HealthCheckResponse.SERVING
            await call.write(Text(value="after"))
            assert (await call.read()).value == "after"
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
    assert await process.wait() == 0
    await process.line("close", "stdout")
    assert not process.ready.exists()


async def test_a_second_signal_cuts_the_drain_short(start) -> None:
    process = await start("--drain-timeout-s", "600")
    info = await process.up()
    async with open_channel(info["address"]) as channel:
        with cancelling(Echo(channel).bidi(timeout=60)) as call:
            await call.write(Text(value="x"))
            await call.read()
            process.process.send_signal(signal.SIGTERM)
            await process.line("drain", "stdout")
            process.process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
            assert await asyncio.wait_for(call.code(), 60) is not grpc.StatusCode.OK


async def test_the_drain_timeout_ends_a_stream_that_does_not(start) -> None:
    process = await start("--drain-timeout-s", "0.3")
    info = await process.up()
    async with open_channel(info["address"]) as channel:
        with cancelling(Echo(channel).bidi(timeout=60)) as call:
            await call.write(Text(value="x"))
            await call.read()
            process.process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_long_lived_streams_do_not_hold_the_drain_up(start) -> None:
    process = await start("--instance", "long-lived", "--drain-timeout-s", "600")
    info = await process.up()
    async with open_channel(info["address"]) as channel:
        with cancelling(Echo(channel).bidi(timeout=60)) as call:
            await call.write(Text(value="x"))
            await call.read()
            process.process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_a_signal_while_starting_ends_in_good_order(start) -> None:
    process = await start("--instance", "block-start")
    await process.line("building", "stdout")
    process.process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert not process.ready.exists()


async def test_a_taken_port_exits_with_the_reason(start, mesh, tmp_path) -> None:
    async def nothing(request, context):
        return Text()

    server = await mesh.serve(unary=nothing)
    others = tmp_path / "run" / "ready.json"
    others.parent.mkdir()
    others.write_text("{}")
    process = await start("--listen", server.address)
    assert f"cannot listen on {server.address}" in await process.line("cannot run")
    assert await process.wait() == 1
    assert others.exists()


async def test_before_the_drain_everything_is_served(start) -> None:
    process = await start("--drain-delay-s", "600")
    info = await process.up()
    async with open_channel(info["address"]) as channel, open_channel(info["address"]) as late:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        with cancelling(watch):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            process.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for known in (channel, late):
            assert (await Echo(known).unary(Text())).value == "pong"
        # The second signal ends the wait as it ends a drain.
        process.process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
