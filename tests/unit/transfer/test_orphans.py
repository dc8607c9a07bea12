"""Who may still write, when nobody is there to say so."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from kvmesh.kv.pidfd import open_pidfd
from kvmesh.transfer.orphans import Writers


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


async def test_exit_and_word_release_what_waits() -> None:
    writers = Writers()
    first, second = sleeper(), sleeper()
    writers.joined(11, open_pidfd(first.pid))
    writers.joined(12, open_pidfd(second.pid))
    done = asyncio.Event()
    writers.when_gone(done.set)
    assert sorted(writers.links) == [11, 12]
    writers.gone(11)
    writers.gone(11)
    await asyncio.sleep(0)
    assert not done.is_set()
    second.kill()
    async with asyncio.timeout(60):
        await done.wait()
    assert not writers.links
    # Nobody is there any more: at once.
    again = asyncio.Event()
    writers.when_gone(again.set)
    assert again.is_set()
    first.kill()
    first.wait()
    second.wait()
    writers.close()


async def test_later_writers_are_not_waited_for_and_sidecars_follow_each_other() -> None:
    writers = Writers()
    process = sleeper()
    sidecar = writers.sidecar_joined(open_pidfd(process.pid))
    slot, transfer = asyncio.Event(), asyncio.Event()
    writers.when_gone(slot.set)
    writers.when_gone(transfer.set, only=sidecar)
    writers.joined(5, open_pidfd(process.pid))
    assert writers.links == [5]
    # The successor has let us in: its predecessor moves nothing any more.
    writers.sidecar_joined(open_pidfd(process.pid))
    assert slot.is_set()
    assert transfer.is_set()
    assert writers.links == [5]
    process.kill()
    process.wait()
    writers.close()


async def test_close_lets_everybody_go_on() -> None:
    writers = Writers()
    process = sleeper()
    writers.joined(5, open_pidfd(process.pid))
    done = asyncio.Event()
    writers.when_gone(done.set)
    writers.close()
    assert done.is_set()
    process.kill()
    process.wait()
