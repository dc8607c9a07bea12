"""What a process knows when it is one of several, and its line to the parent.

The line is a socket pair, a word a line. The child says `up` (bound; its ready file is written), `ready` and `unready`;
the parent says `all` once every process has been ready. A line that ends means that the other side is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "KVMESH_GATEWAY_CHILD"
TOKEN_FILE = "token"


@dataclass(frozen=True, slots=True)
class Child:
    """Of one process. `runtime`: the folder that all share; `control`: descriptor of the line to the parent; the
    others: the shared addresses, with the ports that the parent holds."""

    index: int
    runtime: Path
    control: int
    listen: str
    http_listen: str = ""
    client_listen: str = ""

    @classmethod
    def from_environment(cls) -> Child | None:
        """None for a process that stands alone."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text)
        return cls(**{**values, "runtime": Path(values["runtime"])})

    def environment(self) -> dict[str, str]:
        """What the parent gives the process."""
        return {VARIABLE: json.dumps({**asdict(self), "runtime": str(self.runtime)})}

    @property
    def token_file(self) -> Path:
        """Secret of the hop between the processes."""
        return self.runtime / TOKEN_FILE

    @property
    def ready_file(self) -> Path:
        """Where this process tells its addresses."""
        return self.runtime / f"{self.index}.ready"


class Line:
    """The child's end. `on_all` when every process has been ready, `on_gone` when the parent is gone."""

    def __init__(self, control: int, on_all: Callable[[], None], on_gone: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=control)
        self._socket.setblocking(False)
        self._on_all = on_all
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def say(self, word: str) -> None:
        """Tell the parent; a few words fit without waiting."""
        try:
            self._socket.send(word.encode() + b"\n")
        except OSError:
            # It is gone, or stands still: the first is told by `on_gone`, the second ends.
            return

    def _read(self) -> None:
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if b"all" in data:
            self._on_all()
        if not data:
            self._loop.remove_reader(self._socket)
            self._on_gone()

    def close(self) -> None:
        """Hang up."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
