"""The plan, the child processes and the supervisor of `kvmesh up`, on tiny stand-in services."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmesh.cli.main import app
from kvmesh.cli.plan import MeshOptions, MeshPlan, plan_mesh, unknown_setting
from kvmesh.cli.ports import Ports, free_port, quiet_ports
from kvmesh.cli.process import Process, ProcessSpec
from kvmesh.cli.state import MeshState, read_state, remove_state, write_state
from kvmesh.cli.supervisor import StartFailed, Supervisor
from kvmesh.cli.up import _sweep, with_ports
from kvmesh.rpc.credentials import Credentials

# A stand-in service: writes its ready file, serves grpc.health.v1, ends on SIGTERM.
SERVICE = textwrap.dedent(
    """
    import asyncio, json, os, signal, sys
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    async def main():
        server = grpc.aio.server()
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await servicer.set("stand.In", health_pb2.HealthCheckResponse.SERVING)
        path = sys.argv[1]
        open(path + ".tmp", "w").write(json.dumps({"pid": os.getpid(), "address": f"127.0.0.1:{port}", "metrics": ""}))
        os.replace(path + ".tmp", path)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await server.stop(0)
    asyncio.run(main())
    """
)


def stand_in(tmp_path: Path, name: str, code: str = SERVICE) -> ProcessSpec:
    ready = tmp_path / f"{name}.ready"
    return ProcessSpec(name, (sys.executable, "-c", code, str(ready)), ready_file=ready, serving="stand.In")


async def wait_for(condition, timeout_s: float = 90.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_plan_starts_router_and_sidecars_then_engines_and_gateway(tmp_path: Path) -> None:
    options = MeshOptions(prefill=2, decode=3, unified=1, router_port=7001, gateway_port=7002)
    plan = plan_mesh(
        options, tmp_path, free_port=itertools.count(9000).__next__, redis=("redis-server",), redis_url="unix:///x"
    )
    names = [[spec.name for spec in stage] for stage in plan.stages]
    assert names[0][:2] == ["redis", "router"]
    assert len(names[0]) == 2 + 6
    assert all(name.startswith("kvtransfer-") for name in names[0][2:])
    assert names[1] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "unified-0", "gateway"]
    engine = next(spec for spec in plan.specs if spec.name == "unified-0")
    assert "services.decode" in engine.argv
    assert "--role=unified" in engine.argv
    assert f"--sidecar-socket={tmp_path / 'unified-0.sock'}" in engine.argv
    assert plan.gateway_address == "127.0.0.1:7002"


def test_processes_of_the_gateway_are_a_setting(tmp_path: Path) -> None:
    for count, expected in ((1, []), (3, ["--processes=3"])):
        options = MeshOptions(gateway_processes=count)
        plan = plan_mesh(options, tmp_path, free_port=itertools.count(9000).__next__)
        gateway = next(spec for spec in plan.specs if spec.name == "gateway")
        assert [flag for flag in gateway.argv if flag.startswith("--processes")] == expected


def test_no_cache_turns_every_cache_of_answers_off(tmp_path: Path) -> None:
    for cache, expected in ((True, set()), (False, {"--cache=off", "--embedder=none"})):
        plan = plan_mesh(MeshOptions(cache=cache), tmp_path, free_port=itertools.count(9000).__next__)
        router = next(spec for spec in plan.specs if spec.name == "router")
        assert {flag for flag in router.argv if flag.startswith(("--cache", "--embedder=none"))} == expected


def test_every_flag_of_the_plan_is_a_setting(tmp_path: Path) -> None:
    """The plan speaks in flags; the services' own schemas judge them."""
    from kvmesh.config import DecodeSettings, GatewaySettings, KvTransferSettings, PrefillSettings, RouterSettings
    from kvmesh.config.load import build_settings

    schemas = {
        "gateway": GatewaySettings,
        "router": RouterSettings,
        "prefill": PrefillSettings,
        "decode": DecodeSettings,
        "kvtransfer": KvTransferSettings,
    }
    options = MeshOptions(router_port=7001, gateway_port=7002, threads=2, unified=1, settings={"decode.max_batch": "7"})
    plan = plan_mesh(options, tmp_path, free_port=lambda: 9000, redis_url="unix:///x/redis.sock")
    for spec in plan.specs:
        service = spec.argv[2].removeprefix("services.")
        settings = build_settings(schemas[service], spec.argv[3:])
        assert settings.instance == spec.name
        if service == "decode":
            assert settings.max_batch == 7


def test_a_taken_port_is_replaced() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (0, port)
    assert free_port(0) > 0


def test_one_port_is_not_taken_for_two_services() -> None:
    port = free_port()
    options = with_ports(MeshOptions(gateway_port=port, router_port=port, http_port=port))
    assert len({options.gateway_port, options.router_port, options.http_port}) == 3
    assert with_ports(MeshOptions(gateway_port=0)).http_port == -1


@pytest.mark.parametrize(
    ("local", "ports"),
    [
        ("32768\t60999\n", range(10_000, 32_768)),
        ("1024 20000", range(20_001, 65_000)),
        ("1024 65535", range(10_000, 65_000)),
        ("nonsense", range(10_000, 32_768)),
    ],
)
def test_ports_are_not_those_of_outgoing_connections(local: str, ports: range) -> None:
    assert quiet_ports(local) == ports


def test_no_port_is_named_twice_or_while_it_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        named = Ports(range(taken_port, taken_port + 1))
        with pytest.raises(OSError, match="no free TCP port"):
            named.free()
    ports = Ports()
    drawn = [ports.free() for _ in range(50)]
    assert len(set(drawn)) == 50
    assert set(drawn) <= set(quiet_ports())


async def test_supervisor_starts_restarts_and_stops(tmp_path: Path) -> None:
    plan = MeshPlan(((stand_in(tmp_path, "one"),), (stand_in(tmp_path, "two"),)), "", "")
    events: list[tuple[str, str]] = []
    supervisor = Supervisor(plan, tmp_path, lambda name, what: events.append((name, what)))
    await supervisor.start()
    try:
        assert ("one", "up") in events
        assert ("two", "up") in events
        first = supervisor.processes["one"].pid
        os.kill(first, signal.SIGKILL)
        await wait_for(lambda: supervisor.restarts.get("one") == 1 and supervisor.processes["one"].read_ready())
        assert supervisor.processes["one"].pid != first
    finally:
        await supervisor.stop()
    assert all(not process.alive for process in supervisor.processes.values())
    assert supervisor.restarts == {"one": 1}


async def test_a_service_that_dies_at_start_is_named_with_its_log(tmp_path: Path) -> None:
    bad = stand_in(tmp_path, "bad", "import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    supervisor = Supervisor(MeshPlan(((bad,),), "", ""), tmp_path)
    with pytest.raises(StartFailed, match=r"(?s)bad ended with code 3.*no such model"):
        await supervisor.start()
    await supervisor.stop()


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal as s, sys; s.signal(s.SIGTERM, s.SIG_IGN); open(sys.argv[1], 'w'); s.pause()"
    spec = ProcessSpec("deaf", (sys.executable, "-c", code, str(tmp_path / "up")), stop_timeout_s=0.2)
    process = await Process.start(spec, tmp_path)
    await wait_for((tmp_path / "up").exists)
    assert await process.stop() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names of Linux")
def test_a_port_that_somebody_was_given_is_not_given_again_before_it_is_used() -> None:
    port = free_port()
    with pytest.raises(OSError, match="no free TCP port"):
        Ports(range(port, port + 1)).free()
    for _ in range(200):
        free_port()
    assert Ports(range(port, port + 1)).free() == port


def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    """kill -9 of the supervisor takes its children along."""
    code = textwrap.dedent(
        f"""
        import asyncio, os, signal, sys
        from pathlib import Path
        from kvmesh.cli.process import Process, ProcessSpec
        async def main():
            spec = ProcessSpec("child", (sys.executable, "-c", "import signal; signal.pause()"))
            process = await Process.start(spec, Path({str(tmp_path)!r}))
            print(process.pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    gone = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    import select

    assert select.select([gone], [], [], 10)[0], "the child outlived its parent"
    os.close(gone)
    parent.stdout.close()


def test_state_of_a_dead_mesh_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_STATE", str(tmp_path / "mesh.json"))
    assert read_state() is None
    alive = MeshState(os.getpid(), "127.0.0.1:1", "127.0.0.1:2", "/run", "/run/token", "m")
    path = write_state(alive)
    assert path.stat().st_mode & 0o077 == 0
    assert read_state() == alive
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_state(MeshState(child.pid, "a", "b", "c", "d", "m"))
    assert read_state() is None
    remove_state(os.getpid())
    assert path.exists(), "another mesh's file is not ours to remove"
    path.write_text("{broken")
    assert read_state() is None


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("decode.max_batch", ""),
        ("gateway.tls.cert", ""),
        ("decode.max-batch", ""),
        ("decoder.max_batch", "no service 'decoder'"),
        ("decode.max_bach", "no setting 'max_bach'"),
        ("redis.port", "no service"),
    ],
)
def test_a_setting_that_does_not_exist_is_said_so(key: str, problem: str) -> None:
    found = unknown_setting(key)
    assert (problem in found) if problem else not found


def test_a_drain_is_shorter_than_the_patience_of_the_supervisor(tmp_path: Path) -> None:
    plan = plan_mesh(MeshOptions(), tmp_path, free_port=lambda: 9000)
    for spec in plan.specs:
        (drain,) = [float(arg.partition("=")[2]) for arg in spec.argv if arg.startswith("--drain-timeout-s=")]
        assert drain + 5 <= spec.stop_timeout_s


async def test_hurry_ends_a_child_that_drains(tmp_path: Path) -> None:
    """The first SIGTERM drains, the second ends: as the services do."""
    code = SERVICE.replace("await server.stop(0)", "stop.clear(); await stop.wait(); await server.stop(0)")
    supervisor = Supervisor(MeshPlan(((stand_in(tmp_path, "slow", code),),), "", ""), tmp_path)
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    process = supervisor.processes["slow"]
    done, _ = await asyncio.wait({stopping}, timeout=0.5)
    assert not done
    supervisor.hurry()
    async with asyncio.timeout(60):
        await stopping
    assert await process.exited == 0


def test_a_new_key_is_a_record_that_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow screen too: no line is broken."""
    monkeypatch.setenv("COLUMNS", "30")
    made = CliRunner().invoke(app, ["key", "acme"])
    first, _, record = made.output.partition("\n")
    file = tmp_path / "keys.toml"
    file.write_text(record)
    assert asyncio.run(Credentials(file).identify(f"Bearer {first.rpartition(' ')[2]}")).tenant == "acme"
    for bad in ('a"b', "a b", "", "x" * 129):
        assert CliRunner().invoke(app, ["key", bad]).exit_code == 2


def test_status_with_an_unusable_token_file_says_so(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    for file in (tmp_path / "missing", empty):
        result = CliRunner().invoke(app, ["status", "--router=127.0.0.1:1", f"--token-file={file}"])
        assert result.exit_code == 2
        assert "mesh token" in result.output


def test_the_folder_of_a_killed_mesh_is_swept_and_others_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name, pid in (("kvmesh-dead", dead.pid), ("kvmesh-alive", os.getpid()), ("other-dead", dead.pid)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pid").write_text(str(pid))
        (tmp_path / name / "mesh.token").write_text("secret")
    (tmp_path / "kvmesh-kept").mkdir()
    _sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvmesh-alive", "kvmesh-kept", "other-dead"]
