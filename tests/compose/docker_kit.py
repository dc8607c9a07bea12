#!/usr/bin/env python3
"""A Docker engine for tests: `docker_kit.py up DIR` and `docker_kit.py down DIR`.

Where the user's own `docker info` works and compose is version 2, that engine is used and pulls the base images itself.
Elsewhere (root on Debian, no registry needed) Debian's packages are installed and a private engine runs with everything
it has under DIR; what it changes outside (packet filter, ip_forward, bridges, mounts) is taken back by `down`, and no
more. Both may be called twice. None is started beside an engine that runs already: they would share a bridge.

`up` prints shell lines that choose the engine: eval "$(tests/compose/docker_kit.py up DIR)". Exit status 77 means
"cannot run here"; the reason is on standard error.

    KVMESH_DOCKER_CACHE  a folder that keeps the private engine's data (images, build cache) from one run to the next
    KVMESH_DOCKER_PRIVATE=1  never the user's engine
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
        self.log = folder / "dockerd.log"
        self.scratch = folder / "scratch"

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
        try:
            return self.socket.exists() and self.docker("info", check=False, timeout_s=20).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def up(self) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        _install()
        docker_base.plugins(self.config / "cli-plugins", self.scratch)
        if not self.alive():
            self._start()
        if self.docker("compose", "version", check=False).returncode:
            raise CannotRun("the compose plugin does not start here")
        docker_base.images(self.docker, self.scratch)

    def _start(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        self._stop()  # one that does not answer
        with docker_host.alone():
            if others := docker_host.engines():
                raise CannotRun(
                    f"a Docker engine runs already (process {others[0]}), without compose 2 or out of reach"
                )
            if not self.state.exists():
                fresh = self.state.with_suffix(".new")
                fresh.write_text(json.dumps(docker_host.save()))
                fresh.replace(self.state)
            self.pidfile.unlink(missing_ok=True)
            with self.log.open("ab") as output:
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
                why = _tail(self.log)  # before it goes with the folder
                self.down()
                raise CannotRun(f"dockerd does not start here:\n{why}")
            time.sleep(0.1)

    def down(self) -> None:
        """Stops everything, takes back what it did to the host, removes its own files. May be called twice."""
        if self.state.exists():
            saved = json.loads(self.state.read_text())
            docker_host.check(saved)
            self._empty()
            with docker_host.alone():
                self._stop()
                docker_host.unmount(self.folder, self.data)
                docker_host.restore(saved)
            self.state.unlink()
        for path in (self.scratch, self.config, self.exec_root, self.folder / "engine"):
            if path != self.data or "KVMESH_DOCKER_CACHE" not in os.environ:
                _remove_tree(path)
        for path in (self.socket, self.pidfile, self.log, self.state.with_suffix(".new")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # whatever else is there is not ours
            self.folder.rmdir()

    def _empty(self) -> None:
        """No container, network or volume is left, as far as the engine still answers."""
        kinds = [("ps -aq", "rm -f -v"), ("network ls -q --filter type=custom", "network rm")]
        if "KVMESH_DOCKER_CACHE" in os.environ:
            kinds.append(("volume ls -q", "volume rm -f"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self.alive():
                return
            for listed, removed in kinds:
                found = self.docker(*listed.split(), check=False, timeout_s=60).stdout.split()
                if found:
                    self.docker(*removed.split(), *found, check=False, timeout_s=120)

    def _stop(self) -> None:
        """Ends dockerd, and whatever it has left of itself. Raises RuntimeError where it does not end."""
        _end(self._processes("dockerd"), signal.SIGTERM, _STOP_S)
        rest = self._processes("dockerd", "containerd")
        _end([child for process in rest for child in (*_children(process), process)], signal.SIGKILL, _STOP_S)
        if rest := self._processes("dockerd", "containerd"):
            raise RuntimeError(f"the private engine's processes do not end: {rest}")

    def _processes(self, *names: str) -> list[int]:
        """Of this engine: their command lines name its folder. A number in a file could be somebody else's by now."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                ours = any(word == str(self.exec_root) or word.startswith(f"{self.exec_root}/") for word in words)
                if ours and Path(words[0]).name.startswith(names) and not _is_zombie(int(process.name)):
                    found.append(int(process.name))
        return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            yield from map(int, path.read_text().split())


def _end(processes: Sequence[int], how: signal.Signals, timeout_s: float) -> None:
    """Signals them and waits until they are gone, `timeout_s` at most."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
    deadline = time.monotonic() + timeout_s
    while not all(map(_is_zombie, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    """Whether it has ended, or was never there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (OSError, IndexError):
        return True


def _remove_tree(path: Path) -> None:
    """Raises RuntimeError where something is mounted there still, which may be anybody's files."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if busy := [mount for mount in mounts if mount == str(path) or mount.startswith(f"{path}/")]:
        raise RuntimeError(f"not removed, as something is mounted there: {busy[0]}")
    if path.exists():
        shutil.rmtree(path)


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
        wait = ("-o", "DPkg::Lock::Timeout=120")
        run("apt-get", *wait, "update", "-q", env=quiet)
        run("apt-get", *wait, "install", "-y", "-q", "--no-install-recommends", *_PACKAGES, env=quiet)
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
    except (CannotRun, TimeoutError) as error:
        say(f"cannot run here: {error}")
        return CANNOT
    lines = {**engine.env, "KVMESH_DOCKER": "private"}
    lines.pop("DOCKER_CONTEXT")
    print("unset DOCKER_CONTEXT; export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in lines.items()))
    return 0


if __name__ == "__main__":
    # Told to end, it puts things back as when it fails.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
