"""Two gateway processes behind one port: one address, one Abort, one /metrics; a process that ends is no event for
clients that connect once more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvmesh.client import Client
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc import open_channel
from mesh_kit import until
from services.gateway.processes.ports import HeldPort
from services.gateway.processes.runtime import runtime_folder
from test_gateway_process import ROOT, START_S, Process, wait_health

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 90.0


class Fleet:
    """A worker, and two gateway processes with their parent."""

    def __init__(self, worker: Process, gateway: Process) -> None:
        self.worker, self.gateway = worker, gateway

    @property
    def ready(self) -> dict[str, Any]:
        info: dict[str, Any] = json.loads(self.gateway.ready_file.read_text())
        return info

    async def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        url = f"http://{self.ready['metrics']}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=LIMIT_S).read().decode())
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"kvmesh:{name}"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: Any) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("processes")
    worker = Process(
        "decode", folder, role="unified", runner="scripted", model="scripted", scripted_step_ms=20, num_pages=1024
    )
    gateway = Process("gateway", folder, processes=2, model="scripted", heartbeat_s=2, drain_timeout_s=60)
    gateway._argv += ["--metrics-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"]
    try:
        await worker.start()
        gateway._argv.append(f"--workers={worker.address}")
        await gateway.start()
        await wait_health(gateway.address, True)
        yield Fleet(worker, gateway)
        assert await gateway.end() == 0
        for info in await asyncio.to_thread(pids_left, folder):
            raise AssertionError(f"process {info} is left")
    finally:
        for process in (gateway, worker):
            if hasattr(process, "process"):
                await process.end(signal.SIGKILL)


def pids_left(folder: Path) -> list[int]:
    """Processes that were started for this folder and still live; the worker aside."""
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().decode(errors="replace")
            if "services.gateway" in line and str(folder) in line:
                left.append(int(path.parent.name))
    return left


class Links:
    """Connections of their own to the shared port, sorted by the process that took them."""

    def __init__(self) -> None:
        self.channels: list[Any] = []

    async def stub(self, fleet: Fleet) -> tuple[Any, str]:
        """A stub on a new connection, and the prefix of the ids of the process behind it."""
        channel = open_channel(fleet.gateway.address)
        self.channels.append(channel)
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(model="scripted", text="x", sampling=pb.SamplingParams(max_tokens=1)), timeout=LIMIT_S
        )
        request_id = (await call.read()).event.accepted.request_id
        call.cancel()
        return stub, request_id.partition("-")[0]

    async def to_both(self, fleet: Fleet) -> dict[str, Any]:
        """A stub to each of the two processes."""
        found: dict[str, Any] = {}
        async with asyncio.timeout(LIMIT_S):
            while len(found) < 2:
                stub, prefix = await self.stub(fleet)
                if found.setdefault(prefix, stub) is not stub:
                    # A successor may still be starting.
                    await asyncio.sleep(0.1)
        return found

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()


@contextlib.asynccontextmanager
async def links() -> AsyncIterator[Links]:
    made = Links()
    try:
        yield made
    finally:
        await made.close()


def long(request_id: str = "") -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=2000, ignore_eos=True)
    return pb.GenerateRequest(model="scripted", text="x", request_id=request_id, sampling=sampling)


async def test_processes_do_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    gateway = Process("gateway", tmp_path, processes=2, model="scripted", workers="127.0.0.1:1", drain_timeout_s=1)
    try:
        await gateway.start()
        assert len(pids_left(tmp_path)) == 3
        os.kill(gateway.process.pid, signal.SIGKILL)
        await until(lambda: not pids_left(tmp_path), "all are gone", every_s=0.5)
        # Its port is free, and what it left is swept by the next one.
        with contextlib.closing(HeldPort(gateway.address)), runtime_folder() as folder:
            mine = str(os.getpid())
            pids = [path.read_text() for path in folder.parent.glob("kvmesh-gateway-*/pid")]
            assert mine in pids
            assert str(gateway.process.pid) not in pids
    finally:
        await gateway.end(signal.SIGKILL)


async def test_an_abort_on_one_process_ends_a_request_of_the_other(fleet: Fleet) -> None:
    async with links() as made:
        (_, one), (_, other) = (await made.to_both(fleet)).items()
        for chosen in ("", "chosen-by-the-client"):
            call = one.Generate(long(chosen), timeout=LIMIT_S)
            request_id = (await call.read()).event.accepted.request_id
            reply = await other.Abort(pb.AbortRequest(request_id=request_id), timeout=LIMIT_S)
            assert reply.found
            last = None
            async with asyncio.timeout(LIMIT_S):
                while (response := await call.read()) is not grpc.aio.EOF:
                    last = response.event
            assert last is not None
            assert last.error.reason == "CANCELLED"
            assert not (await other.Abort(pb.AbortRequest(request_id=request_id), timeout=LIMIT_S)).found


async def test_the_port_is_taken_for_others(fleet: Fleet) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway", f"--listen={fleet.gateway.address}", "--processes=2"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(START_S):
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert f"cannot listen on {fleet.gateway.address}" in output.decode()


async def test_a_process_that_leaves_under_load_is_no_event(fleet: Fleet) -> None:
    """Its streams end whole; new calls go elsewhere; what it counted stays counted; another one takes its place.

    A client connects once more when a connection is refused or said goodbye on, as gRPC does by itself; nothing is
    asked twice once it was accepted.
    """
    before = {info["pid"] for info in fleet.ready["processes"]}
    counted = await fleet.metric('rpc_handled_total{code="OK",method="kvmesh.v1.Inference/Generate"}')
    done, stop = 0, asyncio.Event()

    async def client() -> None:
        nonlocal done
        async with Client(fleet.gateway.address) as one:
            while not stop.is_set():
                for left in (1, 0):
                    try:
                        stream = one.generate("hello", model="scripted", max_tokens=4, ignore_eos=True)
                        await stream.result()
                    except Exception:
                        if not left:
                            raise
                    else:
                        done += 1
                        break

    async with links() as made, asyncio.TaskGroup() as group:
        both = await made.to_both(fleet)
        streams = [
            stub.Generate(
                pb.GenerateRequest(
                    model="scripted", text="x", sampling=pb.SamplingParams(max_tokens=100, ignore_eos=True)
                ),
                timeout=LIMIT_S,
            )
            for stub in both.values()
            for _ in range(2)
        ]
        for stream in streams:
            assert (await stream.read()).event.HasField("accepted")
        clients = [group.create_task(client()) for _ in range(4)]
        await until(lambda: done > 8, "clients are served")
        os.kill(min(before), signal.SIGTERM)
        tokens = []
        for stream in streams:
            events = []
            async with asyncio.timeout(LIMIT_S):
                while (response := await stream.read()) is not grpc.aio.EOF:
                    events.append(response.event)
            assert events[-1].HasField("finished"), events[-1]
            tokens.append(events[-1].finished.usage.completion_tokens)
        assert tokens == [100] * 4
        served = done
        await until(lambda: done > served + 8, "clients are served on")
        stop.set()
        await asyncio.gather(*clients)

    await until(lambda: len(pids_left(fleet.gateway.ready_file.parent)) == 3, "a successor", every_s=0.5)
    async with links() as made:
        await made.to_both(fleet)
    handled = await fleet.metric('rpc_handled_total{code="OK",method="kvmesh.v1.Inference/Generate"}')
    assert handled >= counted + 4 + done


async def test_a_process_that_was_killed_is_started_again(fleet: Fleet) -> None:
    total = await fleet.metric("rpc_handled_total")
    victims = [pid for pid in pids_left(fleet.gateway.ready_file.parent) if pid != fleet.ready["pid"]]
    os.kill(victims[0], signal.SIGKILL)
    await until(
        lambda: len(set(pids_left(fleet.gateway.ready_file.parent)) - {*victims, fleet.ready["pid"]}) == 1,
        "another",
        every_s=0.5,
    )
    async with links() as made:
        await made.to_both(fleet)
    assert await fleet.metric("rpc_handled_total") > total
    host, _, port = fleet.ready["http"].removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT_S):
        pass
