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


if __name__ == "__main__":
    _life(Path(sys.argv[1]))
