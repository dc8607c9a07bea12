#!/usr/bin/env python3
"""A Docker engine for tests: `docker_kit.py up DIR` and `docker_kit.py down DIR`.

Where the user's own `docker info` works and compose is version 2, that engine is used and pulls the base images itself.
Elsewhere (root on Debian, no registry needed) a private engine runs with everything it has under DIR; what it changes
outside (packet filter, ip_forward, bridges, mounts) is saved by `up` and put back by `down`. Both may be called twice.

`up` prints shell lines that choose the engine: eval "$(tests/compose/docker_kit.py up DIR)". Exit status 77 means
"cannot run here"; the reason is on standard error.

    KVMESH_DOCKER_CACHE  a folder that keeps the private engine's data (images, build cache) from one run to the next
    KVMESH_DOCKER_PRIVATE=1  never the user's engine
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import docker_base
import docker_host

CANNOT = 77
_PACKAGES = ("docker.io", "containerd", "runc", "iptables", "mmdebstrap", "ca-certificates")
_TOOLS = ("dockerd", "containerd", "runc", "iptables", "mmdebstrap", "docker")
_START_S = 60.0
_STOP_S = 30.0


class CannotRun(Exception):
    """Docker cannot run here; the message says why."""


def run(
    *command: str, check: bool = True, env: dict[str, str] | None = None, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs a command with its output kept. Raises RuntimeError with the end of its output when it fails."""
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done


def say(text: str) -> None:
    print(f"docker kit: {text}", file=sys.stderr, flush=True)


class PrivateEngine:
    """dockerd with its data, sockets, plugins and state under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cache = os.environ.get("KVMESH_DOCKER_CACHE")
        self.data = Path(cache).resolve() if cache else folder / "engine"
        self.socket = folder / "docker.sock"
        self.config = folder / "config"
        self.exec_root = folder / "exec"
        self.pidfile = folder / "dockerd.pid"
        self.state = folder / "host.json"

    @property
    def env(self) -> dict[str, str]:
        return {
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_CONFIG": str(self.config),
            "DOCKER_BUILDKIT": "1",
            "DOCKER_CONTEXT": "",
        }

    def docker(self, *arguments: str, check: bool = True, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        return run("docker", *arguments, env=self.env, check=check, timeout_s=timeout_s)

    def alive(self) -> bool:
        return self.socket.exists() and self.docker("info", check=False, timeout_s=20).returncode == 0

    def up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _install()
        docker_base.plugins(self.config / "cli-plugins", self.folder)
        if not self.alive():
            self._start()
        if self.docker("compose", "version", check=False).returncode:
            raise CannotRun("the compose plugin does not start here")
        docker_base.images(self.docker, self.folder)

    def _start(self) -> None:
        if not self.state.exists():
            self.state.write_text(json.dumps(docker_host.save()))
        self.pidfile.unlink(missing_ok=True)
        log = self.folder / "dockerd.log"
        self.data.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    "dockerd",
                    *("--data-root", str(self.data), "--exec-root", str(self.exec_root)),
                    *("-H", f"unix://{self.socket}", "--pidfile", str(self.pidfile)),
                    *("--storage-driver", "overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs"),
                    *("--bip", "172.30.255.1/24", "--default-address-pool", "base=172.30.0.0/17,size=24"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self.alive():
            if process.poll() is not None or time.monotonic() > deadline:
                self.down()
                raise CannotRun(f"dockerd does not start here:\n{_tail(log)}")
            time.sleep(0.1)

    def down(self) -> None:
        """Stops everything and puts the host back. Does nothing where nothing runs."""
        if self.alive():
            everything = self.docker("ps", "-aq", check=False).stdout.split()
            if everything:
                self.docker("rm", "-f", "-v", *everything, check=False)
            for name in self.docker("network", "ls", "-q", "--filter", "type=custom", check=False).stdout.split():
                self.docker("network", "rm", name, check=False)
            if "KVMESH_DOCKER_CACHE" in os.environ:
                volumes = self.docker("volume", "ls", "-q", check=False).stdout.split()
                if volumes:
                    self.docker("volume", "rm", "-f", *volumes, check=False)
        self._stop()
        docker_host.unmount(self.folder, self.data)
        if self.state.exists():
            docker_host.restore(json.loads(self.state.read_text()))
        keep = self.data if "KVMESH_DOCKER_CACHE" in os.environ else None
        if self.folder.exists():
            for entry in sorted(self.folder.iterdir()):
                if keep is None or (keep != entry and entry not in keep.parents):
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            if keep is None:
                self.folder.rmdir()

    def _stop(self) -> None:
        try:
            pid = int(self.pidfile.read_text())
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError):
            return
        if name != "dockerd":
            return  # the number belongs to somebody else by now
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while Path(f"/proc/{pid}/stat").exists() and not _is_zombie(pid):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline += _STOP_S
            time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (OSError, IndexError):
        return True


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-10:]) if path.exists() else ""


def own_engine() -> bool:
    """Whether the user's engine answers and has compose 2 and buildx."""
    if os.environ.get("KVMESH_DOCKER_PRIVATE") == "1" or not shutil.which("docker"):
        return False
    try:
        if run("docker", "info", check=False, timeout_s=20).returncode:
            return False
        version = run("docker", "compose", "version", "--short", check=False, timeout_s=20).stdout.strip().lstrip("v")
        return version.split(".")[0].isdigit() and int(version.split(".")[0]) >= 2
    except subprocess.TimeoutExpired:
        return False


def _install() -> None:
    """The engine's packages. Raises CannotRun where a private engine is impossible."""
    if sys.platform != "linux" or not Path("/etc/debian_version").exists() or not shutil.which("apt-get"):
        raise CannotRun("no Docker engine with compose 2 answers, and a private one is only made on Debian")
    if os.geteuid():
        raise CannotRun("no Docker engine with compose 2 answers, and only root can start a private one")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    os.environ["PATH"] = path
    if all(shutil.which(tool) for tool in _TOOLS):
        return
    say(f"installing {' '.join(_PACKAGES)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    # The engine is started by this kit, with a data folder of its own, not by the package.
    policy = Path("/usr/sbin/policy-rc.d")
    mine = not policy.exists()
    try:
        if mine:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        run("apt-get", "update", "-q", env=quiet)
        run("apt-get", "install", "-y", "-q", "--no-install-recommends", *_PACKAGES, env=quiet)
    except RuntimeError as error:
        raise CannotRun(f"the engine's packages cannot be installed: {error}") from error
    finally:
        if mine:
            policy.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A Docker engine for tests.")
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    engine = PrivateEngine(options.folder.resolve())
    try:
        if options.action == "down":
            engine.down()
            return 0
        if own_engine():
            say("using the engine that `docker info` finds")
            print("export DOCKER_BUILDKIT=1 KVMESH_DOCKER=own")
            return 0
        engine.up()
    except CannotRun as error:
        say(f"cannot run here: {error}")
        return CANNOT
    lines = {**engine.env, "KVMESH_DOCKER": "private"}
    lines.pop("DOCKER_CONTEXT")
    print("unset DOCKER_CONTEXT; export " + " ".join(f"{name}={value}" for name, value in lines.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
