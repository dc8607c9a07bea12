"""The private engine starts, and its end leaves the host as it was. In a network namespace of its own, so that another
engine of this machine is not disturbed; there is no way out of it, so base images and plugins are not made here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import docker_base
import docker_host
import docker_kit
import pytest

TOOLS = ("dockerd", "containerd", "runc", "iptables", "unshare", "docker")
needs_engine = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(tool) for tool in TOOLS), reason="needs root and a Docker engine"
)


def _life(folder: Path) -> None:
    """Up, some use, down; prints what was there before, meanwhile and after. Runs in the namespace."""
    engine = docker_kit.PrivateEngine(folder)
    docker_base.plugins = lambda target, scratch: target.mkdir(parents=True)  # type: ignore[assignment]
    docker_base.images = lambda docker, scratch: None
    seen: dict[str, object] = {"before": docker_host.save()}
    folder.mkdir()
    try:
        engine._start()
        engine.docker("network", "create", "kit-test")
        seen["during"] = docker_host.save()
    finally:
        engine.down()
        engine.down()  # twice does no harm
    seen["after"] = docker_host.save()
    seen["mounts"] = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    seen["folder"] = folder.exists()
    print(json.dumps(seen))


def _rules(tables: object) -> dict[str, list[str]]:
    """Chains that somebody made, rules, and policies that refuse."""
    assert isinstance(tables, dict)
    return {
        name: [
            line
            for line in text.splitlines()
            if line.startswith("-A") or (line.startswith(":") and line.split()[1] != "ACCEPT")
        ]
        for name, text in tables.items()
    }


@needs_engine
def test_up_and_down_leave_nothing(tmp_path: Path) -> None:
    # The path of the engine's socket must be short.
    folder = Path(f"/tmp/kvmesh-kit-{os.getpid()}")
    environment = {name: value for name, value in os.environ.items() if name != "KVMESH_DOCKER_CACHE"}
    command = ["unshare", "--net", sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    if "cannot run" in done.stderr or "Operation not permitted" in done.stderr or "CannotRun" in done.stderr:
        pytest.skip(f"no second engine here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    before, during, after = seen["before"], seen["during"], seen["after"]
    assert "docker0" in during["links"]
    assert any("DOCKER" in rule for rule in _rules(during["filters"])["iptables"])
    assert after["links"] == before["links"]
    assert after["forward"] == before["forward"]
    assert _rules(after["filters"]) == _rules(before["filters"])
    assert after["made"] == before["made"]
    assert seen["mounts"] == []
    assert seen["folder"] is False


def test_a_user_without_root_is_told_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("KVMESH_DOCKER_PRIVATE", "1")
    monkeypatch.setattr(docker_kit.os, "geteuid", lambda: 1000)
    assert docker_kit.main(["up", str(tmp_path / "x")]) == docker_kit.CANNOT
    assert "cannot run here: no Docker engine" in capsys.readouterr().err


_BEFORE = """*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
-A INPUT -s 10.0.0.9/32 -j DROP
COMMIT
"""
_NOW = """*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
:THEIRS - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.30.255.0/24 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 192.168.0.0/24 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
COMMIT
*filter
:INPUT ACCEPT [7:9]
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
-A INPUT -s 10.0.0.9/32 -j DROP
-A INPUT -s 10.0.0.7/32 -m comment --comment "somebody's own" -j DROP
-A FORWARD -j DOCKER-USER
-A FORWARD -o br-0123456789ab -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
"""


def test_rules_that_others_made_meanwhile_stay() -> None:
    assert [" ".join(arguments) for arguments in docker_host.undo(_BEFORE, _NOW)] == [
        "-t nat -D PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
        "-t nat -D POSTROUTING -s 172.30.255.0/24 ! -o docker0 -j MASQUERADE",
        "-t nat -F DOCKER",
        "-t nat -X DOCKER",
        "-t filter -D FORWARD -j DOCKER-USER",
        "-t filter -D FORWARD -o br-0123456789ab -j ACCEPT",
        "-t filter -F DOCKER-USER",
        "-t filter -X DOCKER-USER",
        "-t filter -P FORWARD ACCEPT",
    ]
    assert docker_host.undo(_NOW, _NOW) == []


def test_no_engine_is_started_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMESH_DOCKER_CACHE", raising=False)
    monkeypatch.setattr(docker_host, "engines", lambda: [4711])
    engine = docker_kit.PrivateEngine(tmp_path)
    with pytest.raises(docker_kit.CannotRun, match="process 4711"):
        engine._start()
    assert not engine.state.exists()
    with docker_host.alone(), pytest.raises(TimeoutError), docker_host.alone(timeout_s=0):
        pass


def test_why_an_engine_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMESH_DOCKER_CACHE", raising=False)
    monkeypatch.setattr(docker_host, "engines", list)
    for name in ("save", "restore"):
        monkeypatch.setattr(docker_host, name, lambda *_: {})
    program = tmp_path / "bin/dockerd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no overlayfs here >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    with pytest.raises(docker_kit.CannotRun, match="no overlayfs here"):
        docker_kit.PrivateEngine(tmp_path / "kit")._start()
    assert not (tmp_path / "kit").exists()


def test_an_engine_of_another_network_is_not_taken_down_from_here(tmp_path: Path) -> None:
    engine = docker_kit.PrivateEngine(tmp_path)
    engine.state.write_text(json.dumps({**docker_host.save(), "network": "net:[1]"}))
    with pytest.raises(RuntimeError, match="another network namespace"):
        engine.down()
    assert engine.state.exists()


def test_down_removes_nothing_that_it_did_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMESH_DOCKER_CACHE", raising=False)
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "scratch").mkdir()
    assert docker_kit.main(["down", str(tmp_path)]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_engine_whose_number_is_lost_is_found_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_kit, "_STOP_S", 0.5)
    engine = docker_kit.PrivateEngine(tmp_path)
    # Deaf to SIGTERM, as a daemon that hangs.
    script = "trap '' TERM; echo ready; read -r _"
    command = ["bash", "-c", f'exec -a dockerd bash -c "{script}" x --exec-root {engine.exec_root}']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        engine.pidfile.write_text(str(os.getpid()))
        try:
            assert engine._processes("dockerd") == [process.pid]
            assert docker_kit.PrivateEngine(tmp_path / "other")._processes("dockerd") == []
            engine._stop()
            assert process.wait(10) < 0
        finally:
            process.kill()


if __name__ == "__main__":
    _life(Path(sys.argv[1]))
