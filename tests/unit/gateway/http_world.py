"""A gateway with its HTTP face on a socket, and clients of it that see every byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from gateway_fakes import MODEL, WAIT_S
from gateway_world import World

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Reply:
    """An answer as it came over the wire."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body; fails where a name is there twice or a number is none."""

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            assert len(dict(pairs)) == len(pairs), pairs
            return dict(pairs)

        return json.loads(self.body, object_pairs_hook=unique)

    @property
    def error(self) -> Any:
        return self.json()["error"]


async def start_http(world: World, **settings: Any) -> str:
    """Start the gateway with HTTP; returns its base URL."""
    given = {"http_listen": "127.0.0.1:0", "static": True} | settings
    await world.start(**given)
    assert world.gateway.http is not None
    return world.gateway.http.address


@asynccontextmanager
async def client(url: str, **kwargs: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False, **kwargs) as made:
        yield made


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | fields


async def post(url: str, path: str, value: Any = None, **kwargs: Any) -> Reply:
    """POST; `value` as JSON unless `content` is given."""
    async with client(url) as http:
        if "content" not in kwargs:
            kwargs["json"] = value
        found = await http.post(path, **kwargs)
        return Reply(found.status_code, dict(found.headers), found.content)


async def get(url: str, path: str, **kwargs: Any) -> Reply:
    async with client(url) as http:
        found = await http.get(path, **kwargs)
        return Reply(found.status_code, dict(found.headers), found.content)


def events(body: bytes) -> list[Any]:
    """Data of a stream's events, JSON parsed, "[DONE]" as it is; fails on anything that is no event or comment."""
    assert body.endswith(b"\n\n"), body[-40:]
    out: list[Any] = []
    for block in body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert len(block.splitlines()) == 1, block
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else Reply(0, {}, data.encode()).json())
    return out


def text_of(chunks: list[Any], choice: int = 0) -> str:
    """Content of a chat's choice over its chunks."""
    return "".join(
        one["delta"].get("content") or ""
        for chunk in chunks
        if isinstance(chunk, dict)
        for one in chunk.get("choices", ())
        if one["index"] == choice
    )


class Wire:
    """A bare connection: what is written is what is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, url: str, *, receive_buffer: int = 0) -> Wire:
        host, port = url.removeprefix("http://").rsplit(":", 1)
        made = socket.socket()
        made.setblocking(False)
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=made))

    def stall(self) -> None:
        """Read no more."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def post(self, path: str, value: Any, *headers: str) -> None:
        raw = json.dumps(value).encode() if not isinstance(value, bytes) else value
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(raw)}"]
        self.writer.write("\r\n".join([*head, *headers, "", ""]).encode() + raw)

    async def until(self, mark: bytes) -> bytes:
        """Read up to a mark."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Read until the server closes."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()

    async def reply(self) -> Reply:
        """One answer with a Content-Length."""
        head = (await self.until(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        async with asyncio.timeout(WAIT_S):
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Reply(int(head[0].split()[1]), headers, body)

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()
