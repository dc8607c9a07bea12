"""The least that an OpenAI server can be: every chat completion is streamed at once, `max_tokens` chunks, no model.

It stands behind LiteLLM's proxy and costs nearly nothing. `python backend.py PORT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(delta: dict[str, str], finish: str | None) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "bench",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n" % len(data) + data + b"\r\n"


TOKEN = _chunk({"role": "assistant", "content": " word"}, None)
END = _chunk({}, "stop") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            wanted = re.search(rb'"max_tokens": *(\d+)', body)
            writer.write(HEAD + TOKEN * (int(wanted[1]) if wanted else 1) + END)
            await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print("up", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
