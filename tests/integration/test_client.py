"""The Python client and `kvmesh chat` against a mesh of real processes; the examples of docs/client.md run."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from kvmesh.client import Client, Retry
from mesh_kit import Mesh, mesh_up, settled, until

DOCUMENT = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def test_the_examples_the_chat_and_a_gateway_that_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    """One mesh for all of it: starting one is what such a test takes longest for."""
    async with mesh_up(cache=False) as mesh:
        assert len(EXAMPLES) >= 6
        for number, example in enumerate(EXAMPLES):
            program = example.replace("127.0.0.1:8080", mesh.gateway)
            await asyncio.to_thread(exec, compile(program, f"docs/client.md, example {number}", "exec"), {})
            assert capsys.readouterr().out.strip(), f"example {number} said nothing"
        await asyncio.to_thread(chat_in_a_terminal, mesh)
        await settled(mesh, "decode-0", "prefill-0")
        await a_gateway_restarts(mesh)


def chat_in_a_terminal(mesh: Mesh) -> None:
    """Ctrl-C ends the answer alone, the next one works, and the program ends well."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(
            sys.executable,
            [sys.executable, "-m", "kvmesh.cli.main", "chat", "--address", mesh.gateway, "--max-tokens", "8000"],
        )
    seen = b""

    def expect(words: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while words not in seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} did not come; seen: {seen!r}"
            if select.select([terminal], [], [], left)[0]:
                try:
                    seen += os.read(terminal, 65536)
                except OSError:
                    raise AssertionError(f"it ended before {words!r}; seen: {seen!r}") from None
        seen = seen[seen.index(words) + len(words) :]

    try:
        expect(b"/help")
        expect(b"> ")
        os.write(terminal, b"go on for ever\n")
        expect(b"go on for ever\r\n")
        while not seen:
            select.select([terminal], [], [], 60)
            seen += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        expect(b"stopped")
        expect(b"> ")
        os.write(terminal, b"/params max_tokens=3\n")
        expect(b"max_tokens=3")
        os.write(terminal, b"/stats\n")
        expect(b"statistics on")
        os.write(terminal, b"again\n")
        expect(b"3 out")
        os.write(terminal, b"/quit\n")
        assert os.waitpid(pid, 0)[1] == 0
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(terminal)


async def a_gateway_restarts(mesh: Mesh) -> None:
    """A client that may wait asks on, whatever moment of the restart its call falls into."""
    async with Client(mesh.gateway, retry=Retry(attempts=400, pause_s=0.2, max_pause_s=0.2)) as client:
        assert await client.generate("before", max_tokens=3).result()
        before = mesh.pid("gateway")
        mesh.kill("gateway")
        assert await client.generate("after", max_tokens=3, timeout_s=90).result()
        await until(lambda: mesh.pid("gateway") != before, "another gateway")
