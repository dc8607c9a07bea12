"""ahead.sh: images are built beside a command, and nothing of that is left whatever becomes of the command.

A script stands in for Python, and so for the engine and the builds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

AHEAD = Path(__file__).with_name("ahead.sh")
# Called as python is: docker_kit.py up DIR, images.py …, docker_kit.py down DIR.
STAND_IN = """#!/bin/sh
case "$*" in
*docker_kit.py\\ up*) echo "export KVMESH_DOCKER=$ENGINE"; echo "$KVMESH_DOCKER_CACHE" >"$SEEN/up" ;;
*docker_kit.py\\ down*) touch "$SEEN/down" ;;
*images.py*--sizes*) touch "$SEEN/sizes" ;;
*images.py*) echo $$ >>"$SEEN/builds"; [ -z "$HANGS" ] || exec sleep 300; exit "${FAILS:-0}" ;;
*) echo "$@" >"$SEEN/tests" ;;
esac
"""
# The command waits until a build is under way or, unless builds hang, over.
BUILDING = 'n=0; until [ -s "$SEEN/builds" ]; do n=$((n + 1)); [ $n -lt 600 ] || exit 99; sleep 0.1; done'
OVER = 'timeout 60 tail --pid="$KVMESH_AHEAD_PID" -f /dev/null'

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes control groups")


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert list((tmp_path / "tmp").iterdir()) == [], "folders are left"
    groups = [*Path("/sys/fs/cgroup").glob("kvmesh-ahead-*"), *Path("/sys/fs/cgroup").glob("*/kvmesh-ahead-*")]
    mine = (tmp_path / "group").read_text().strip() if (tmp_path / "group").exists() else "none"
    assert mine not in [group.name for group in groups]


def start(seen: Path, command: str, hangs: bool = False, engine: str = "private") -> subprocess.Popen[str]:
    # What a CI run of these tests has set is not theirs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVMESH_")}
    environment |= {"SEEN": str(seen), "HANGS": "1" if hangs else "", "TMPDIR": str(seen / "tmp"), "ENGINE": engine}
    script = f'echo "kvmesh-ahead-$PPID" >"$SEEN/group"; [ -n "$KVMESH_AHEAD_PID" ] || exit 98; {command}'
    return subprocess.Popen(
        [str(AHEAD), str(seen / "python"), "sh", "-c", script],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=120)[0]
    if process.returncode == 98:
        pytest.skip("no control groups can be made here")
    return process.returncode, output


def gone(pid: int) -> bool:
    """Within a while: whoever is killed with its group is waited for by another."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


def test_builds_only_and_the_status_is_the_commands(seen: Path) -> None:
    assert ended(start(seen, f"{OVER}; exit 3"))[0] == 3
    assert (seen / "builds").exists()
    assert (seen / "down").exists()
    assert not (seen / "tests").exists(), "tests are run where the suite's turn is"
    assert (seen / "up").read_text().startswith(str(seen / "tmp")), "the engine's data outlives its first run"


def test_an_engine_of_the_users_builds_nothing_ahead(seen: Path) -> None:
    assert ended(start(seen, OVER, engine="own"))[0] == 0
    assert not (seen / "builds").exists()


def test_the_suite_takes_the_images(seen: Path) -> None:
    run = AHEAD.with_name("run.sh")
    status, output = ended(start(seen, f'{run} "$SEEN/python" some/test'))
    assert status == 0, output
    assert "images, ahead" in output
    assert len((seen / "builds").read_text().split()) == 1
    assert (seen / "sizes").exists()
    assert "some/test" in (seen / "tests").read_text()


def test_the_suite_builds_what_could_not_be_built_ahead(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    run = AHEAD.with_name("run.sh")
    assert ended(start(seen, f'{run} "$SEEN/python" some/test'))[0] == 1
    assert len((seen / "builds").read_text().split()) == 2
    assert not (seen / "tests").exists()


def test_a_command_that_fails_ends_the_build(seen: Path) -> None:
    assert ended(start(seen, f"{BUILDING}; exit 2", hangs=True))[0] == 2
    assert (seen / "down").exists()
    assert gone(int((seen / "builds").read_text()))


@pytest.mark.parametrize("how", ["terminal", "kill"])
def test_a_signal_ends_both(seen: Path, how: str) -> None:
    process = start(seen, f'{BUILDING}; touch "$SEEN/ready"; exec sleep 300', hangs=True)
    until = time.monotonic() + 60
    while not (seen / "ready").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    if how == "terminal":  # to all that are in the foreground
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    assert ended(process)[0] == (130 if how == "terminal" else 143)
    assert (seen / "down").exists()
    assert gone(int((seen / "builds").read_text()))
