"""The gateway as a process, with a scripted unified worker and no router."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli.ports import free_port
from kvmesh.client import Client
from kvmesh.errors import NotFound, Unavailable
from kvmesh.rpc import open_channel

START_S = 180.0
ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A service of ours, known by its ready file."""

    def __init__(self, service: str, folder: Path, **flags: Any) -> None:
        self.service = service
        self.ready_file = folder / f"{service}.ready"
        given = {"listen": f"127.0.0.1:{free_port()}", "ready_file": self.ready_file} | flags
        self._argv = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        self.address = ""
        self.process: asyncio.subprocess.Process

    async def start(self) -> Process:
        self.ready_file.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{self.service}",
            *self._argv,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        async with asyncio.timeout(START_S):
            while not self.ready_file.exists():
                assert self.process.returncode is None, f"{self.service} ended with {self.process.returncode}"
                await asyncio.sleep(0.05)
        self.address = json.loads(self.ready_file.read_text())["address"]
        return self

    async def restart(self) -> None:
        """Start again at the same address, as a supervisor would."""
        self._argv = [flag for flag in self._argv if not flag.startswith("--listen=")] + [f"--listen={self.address}"]
        await self.start()

    async def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(START_S):
            return await self.process.wait()


async def wait_health(address: str, serving: bool) -> None:
    """Follow the readiness of the public service until it is as wanted; who does not listen any more is not ready."""
    wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    async with open_channel(address) as channel, asyncio.timeout(START_S):
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="kvmesh.v1.Inference"), timeout=START_S
        )
        try:
            while (await call.read()).status != wanted:
                pass
        except grpc.aio.AioRpcError as exc:
            if serving or exc.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        call.cancel()


class Pair:
    """A gateway and its worker."""

    def __init__(self, gateway: Process, worker: Process) -> None:
        self.gateway = gateway
        self.worker = worker


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    worker = Process(
        "decode", tmp_path, role="unified", runner="scripted", model="scripted", scripted_step_ms=20, num_pages=512
    )
    gateway: Process | None = None
    try:
        await worker.start()
        gateway = Process(
            "gateway",
            tmp_path,
            model="scripted",
            workers=worker.address,
            heartbeat_s=2,
            drain_timeout_s=60,
            heal_wait_s=90,
        )
        # Ends with the test as well.
        await gateway.start()
        await wait_health(gateway.address, True)
        yield Pair(gateway, worker)
    finally:
        for process in (gateway, worker):
            if process is not None and hasattr(process, "process"):
                await process.end(signal.SIGKILL)


async def test_serves_without_a_router_and_heals_after_its_worker_was_killed(pair: Pair) -> None:
    async with Client(pair.gateway.address) as client:
        stream = client.chat([("user", "hello")], max_tokens=5, seed=1, temperature=0.0)
        first = await stream.result()
        assert stream.finished is not None
        assert stream.finished.served.degraded
        assert stream.finished.usage.completion_tokens <= 5

        whole = await client.chat([("user", "hello")], max_tokens=100, ignore_eos=True, seed=2).result()
        running = client.chat([("user", "hello")], max_tokens=100, ignore_eos=True, seed=2)
        async for event in running:
            if event.HasField("delta"):
                break
        await pair.worker.end(signal.SIGKILL)
        await wait_health(pair.gateway.address, False)
        with pytest.raises(Unavailable):
            await client.chat([("user", "hello")]).result()

        # What had begun waits for the worker, and goes on where it was.
        await pair.worker.restart()
        assert await running.result() == whole
        assert running.finished is not None
        assert running.finished.served.heals == 1
        await wait_health(pair.gateway.address, True)
        assert await client.chat([("user", "hello")], max_tokens=5, seed=1, temperature=0.0).result() == first


async def test_sigterm_lets_running_streams_end_whole_and_refuses_new_ones(pair: Pair) -> None:
    async with Client(pair.gateway.address) as client:
        stream = client.chat([("user", "hello")], max_tokens=300, ignore_eos=True)
        async for event in stream:
            if event.HasField("delta"):
                break
        pair.gateway.process.send_signal(signal.SIGTERM)
        await wait_health(pair.gateway.address, False)
        with pytest.raises(Unavailable):
            await client.chat([("user", "late")]).result()
        await stream.result()
        assert stream.finished is not None
        assert stream.finished.usage.completion_tokens == 300
    # Not `end()`: a second SIGTERM would hurry it.
    async with asyncio.timeout(START_S):
        assert await pair.gateway.process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"model": "no-such-model"}, "no-such-model"),
        ({"model": "no-such-model", "processes": "2"}, "no-such-model"),
        ({"credentials_file": "/nonexistent/keys.toml"}, "mesh_token_file"),
        ({"credentials_file": "/nonexistent/keys.toml", "mesh_token_file": "{token}"}, "No such file"),
        ({"ttft_limit_s": "-1"}, "ttft-limit-s"),
    ],
)
async def test_a_wrong_setting_is_told_and_ends_the_process(
    flags: dict[str, str], problem: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-long-enough\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.gateway", "--listen=127.0.0.1:0"),
        *(f"--{key.replace('_', '-')}={value.format(token=token)}" for key, value in flags.items()),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(START_S):
        output, _ = await process.communicate()
    assert process.returncode not in (0, None)
    assert problem in output.decode()
    assert "Traceback" not in output.decode()


async def test_nobody_is_served_before_a_worker_is_there(tmp_path: Path) -> None:
    gateway = await Process("gateway", tmp_path, model="scripted", workers="127.0.0.1:1").start()
    try:
        async with open_channel(gateway.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            live = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=60)
            assert live.status == health_pb2.HealthCheckResponse.SERVING
            ready = await stub.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.Inference"), timeout=60)
            assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with Client(gateway.address) as client:
            with pytest.raises((Unavailable, NotFound)):
                await client.chat([("user", "x")]).result()
    finally:
        assert await gateway.end() == 0
