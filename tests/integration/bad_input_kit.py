"""What tests of bad input share: one sentence that a client may read, and a gateway that nobody holds up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

WAIT_S = 60.0
MAX_SENTENCE_BYTES = 512
# Of a processor in one turn of the gateway's loop: while it computes, nobody else is served. What the machine does
# besides does not count.
MAX_TURN_CPU_S = 1.0
# Of the clock: on a busy machine everything waits, but not for ever.
MAX_TURN_S = 30.0
_INSIDE = re.compile(r"Traceback|File \"|\b[A-Z]\w*(?:Error|Exception)\b|\bobject at 0x|site-packages|\.py\b")


def check_sentence(name: str, sentence: str) -> None:
    """One clear sentence, and nothing of the inside."""
    shown = f"{name}: {sentence[:1000]!r}"
    assert sentence.strip(), shown
    assert len(sentence.encode()) <= MAX_SENTENCE_BYTES, shown
    assert "\n" not in sentence, shown
    assert not _INSIDE.search(sentence), shown


@dataclass(slots=True)
class Answer:
    """Of HTTP, as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


async def raw_http(url: str, data: bytes) -> Answer | None:
    """Write bytes, then read one answer; None when the server closed without one."""
    parts = urlsplit(url)
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            return Answer(int(head[0].split()[1]), headers, body)
        finally:
            writer.transport.abort()


def request_bytes(
    path: str, body: bytes = b"", *headers: str, method: str = "POST", kind: str = "application/json"
) -> bytes:
    """An HTTP request; headers may be as wrong as they like."""
    head = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


class Watch:
    """Asks the gateway for a sign of life all the time, from a thread of its own, and notes how long its loop was
    busy with others before it gave one."""

    def __init__(self, url: str, pid: int) -> None:
        self._parts = urlsplit(url)
        self._main = pid
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self.looks = 0
        self.worst_cpu_s = self.worst_s = 0.0
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def _spent(self) -> float:
        """Seconds of a processor that the loop's thread has had."""
        return next(float(one.user_time + one.system_time) for one in self._process.threads() if one.id == self._main)

    def _run(self) -> None:
        import http.client

        try:
            client = http.client.HTTPConnection(self._parts.hostname or "", self._parts.port, timeout=WAIT_S)
            with contextlib.closing(client):
                while not self._stop.wait(0.05):
                    cpu_s, begun = self._spent(), time.monotonic()
                    client.request("GET", "/livez")
                    assert client.getresponse().read()
                    self.worst_cpu_s = max(self.worst_cpu_s, self._spent() - cpu_s)
                    self.worst_s = max(self.worst_s, time.monotonic() - begun)
                    self.looks += 1
        except Exception as error:
            self.failed = error

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(2 * WAIT_S)

    def check(self) -> None:
        print(f"{self.looks} looks; worst {self.worst_cpu_s:.2f} s of a processor, {self.worst_s:.2f} s of the clock")
        assert self.failed is None, f"{self.failed!r}"
        assert self.looks > 0
        assert self.worst_cpu_s <= MAX_TURN_CPU_S, f"the loop computed for {self.worst_cpu_s:.2f} s in one turn"
        assert self.worst_s <= MAX_TURN_S, f"a sign of life took {self.worst_s:.1f} s"


@contextlib.asynccontextmanager
async def good_streams(read: Any) -> AsyncIterator[list[str]]:
    """Streams, one after the other, while the body runs: what each said is in the list. `read()` → text of one."""
    texts: list[str] = []
    stop = asyncio.Event()

    async def run() -> None:
        while not stop.is_set():
            texts.append(await read())

    task = asyncio.create_task(run())
    try:
        yield texts
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)
