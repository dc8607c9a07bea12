"""The Python client and `kvmesh chat` against a mesh of real processes; the examples of docs/client.md run."""

from __future__ import annotations

import asyncio
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmesh.client import Client, Retry
from mesh_kit import Mesh, mesh_up, settled, until

DOCUMENT = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
# Letters that are no part of a command to the terminal.
FIRST_WORD = re.compile(rb"(?<![\x1b\[?0-9;a-zA-Z])[a-zA-Z]{2}")


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
    terminal, its_side = os.openpty()
    command = (sys.executable, "-m", "kvmesh.cli.main", "chat", "--address", mesh.gateway, "--max-tokens", "8000")
    # No fork of Python's own: gRPC's threads run here.
    program = subprocess.Popen(
        (sys.executable, "-c", OWN_TERMINAL, *command),
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        start_new_session=True,
    )
    os.close(its_side)
    seen = b""

    def expect(words: bytes | re.Pattern[bytes]) -> None:
        nonlocal seen
        pattern = re.compile(re.escape(words)) if isinstance(words, bytes) else words
        deadline = time.monotonic() + 60
        while (found := pattern.search(seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} did not come; seen: {seen!r}"
            if select.select([terminal], [], [], left)[0]:
                try:
                    seen += os.read(terminal, 65536)
                except OSError:
                    raise AssertionError(f"it ended before {words!r}; seen: {seen!r}") from None
        seen = seen[found.end() :]

    try:
        expect(b"/help")
        expect(b"> ")
        os.write(terminal, b"go on for ever\n")
        expect(b"go on for ever\r\n")
        # Not what the editor of lines sends behind a line: only then is it the answer that Ctrl-C ends.
        expect(FIRST_WORD)
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
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
        os.close(terminal)


async def a_gateway_restarts(mesh: Mesh) -> None:
    """A client that may wait asks on, whatever moment of the restart its call falls into."""
    async with Client(mesh.gateway, retry=Retry(attempts=400, pause_s=0.2, max_pause_s=0.2)) as client:
        assert await client.generate("before", max_tokens=3).result()
        before = mesh.pid("gateway")
        mesh.kill("gateway")
        assert await client.generate("after", max_tokens=3, timeout_s=90).result()
        await until(lambda: mesh.pid("gateway") != before, "another gateway")
