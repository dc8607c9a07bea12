"""One process of clients: `python client.py` takes a JSON `Work` on standard input and prints a JSON result.

A process of its own, so that reading answers takes nothing from the gateway that is measured. It reads as little as it
can: gRPC messages are parsed (in C), of an HTTP answer only the marks that are counted are looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "libs"), str(ROOT)]

import grpc.aio  # noqa: E402

from kvmesh.proto.v1 import inference_pb2 as pb  # noqa: E402

CONTENT = re.compile(rb'"(?:content|text)":"[^"]')
DONE = b"data: [DONE]"
# An answer that ended by a stop is remembered, one that was cut is not; the scripted words hold one of these soon.
STOPS = [" ", "e", "a", "i", "o", "n", "s", "t", "r"]


@dataclass(slots=True)
class Work:
    """`face`: grpc, http or litellm (an HTTP server that is not ours). `streams`: at a time (closed), or 0: `rate` a
    second, open loop. `requests`: in all. `gaps`: note the time between tokens. `stop_after`: cancel after so many."""

    face: str
    address: str
    model: str
    tokens: int
    requests: int
    streams: int = 0
    rate: float = 0.0
    seed: int = 0
    prompt_tokens: int = 16
    same_prompt: bool = False
    gaps: bool = False
    stop_after: int = 0
    temperature: float = 1.0
    connections: int = 4
    extra: str = ""


@dataclass(slots=True)
class Seen:
    """One request: when it was due, its first and last token (on this machine's monotonic clock), tokens, error.
    late: seconds that it was begun late. accepted_ms, told_ms: until a worker had it and until the gateway had its
    first token, as it tells (gRPC)."""

    due: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str = ""
    late: float = 0.0
    accepted_ms: float = 0.0
    told_ms: float = 0.0


class Grpc:
    """Generate over gRPC, on several connections."""

    def __init__(self, work: Work) -> None:
        self.work = work
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [grpc.aio.insecure_channel(work.address, options=options) for _ in range(work.connections)]
        self.calls = [
            channel.unary_stream(
                "/kvmesh.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            for channel in self.channels
        ]

    async def tokens(self, number: int, rng: random.Random, seen: Seen) -> AsyncIterator[int]:
        """Tokens of each message."""
        work = self.work
        seed = 0 if work.same_prompt else rng.getrandbits(48)
        ids = [1 + (seed >> (index % 6) * 8 & 0xFF) for index in range(work.prompt_tokens)]
        request = pb.GenerateRequest(
            model=work.model,
            sampling=pb.SamplingParams(max_tokens=work.tokens, ignore_eos=True, temperature=work.temperature),
        )
        if work.same_prompt:
            request.sampling.stop.extend(STOPS)
            request.text = "the same question"
            request.sampling.seed = 7
        else:
            request.tokens.ids.extend(ids)
        call = self.calls[number % len(self.calls)](request, timeout=600)
        try:
            async for response in call:
                event = response.event
                kind = event.WhichOneof("event")
                if kind == "delta":
                    yield len(event.delta.token_ids)
                elif kind == "finished":
                    served = event.finished.served
                    seen.accepted_ms, seen.told_ms = served.queue_ms, served.ttft_ms
                elif kind == "error":
                    raise RuntimeError(event.error.message)
        finally:
            call.cancel()

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()


class Http:
    """Completions (ours) or chat completions (LiteLLM's) over HTTP, streamed; a connection is used again."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def tokens(self, number: int, rng: random.Random, seen: Seen) -> AsyncIterator[int]:
        """The same; tokens that came together in one event are known at the end, from the length that was asked for."""
        work = self.work
        told = 0
        text = "the same question" if work.same_prompt else f"question {rng.getrandbits(48):x}"
        body: dict[str, Any] = {"model": work.model, "max_tokens": work.tokens, "stream": True}
        if work.face == "litellm":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": text}]
        else:
            path = "/v1/completions"
            body |= {"prompt": text, "ignore_eos": True, "temperature": work.temperature}
            if work.same_prompt:
                body |= {"seed": 7, "stop": STOPS}
        data = json.dumps(body).encode()
        host, _, port = work.address.rpartition(":")
        reader, writer = self.free.pop() if self.free else await asyncio.open_connection(host, int(port))
        whole = False
        try:
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: {work.address}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            tail = b""
            begun = False
            while True:
                chunk = await reader.read(1 << 16)
                if not chunk:
                    raise RuntimeError("the connection ended")
                if not begun:
                    begun = True
                    if b" 200 " not in chunk[:40]:
                        raise RuntimeError(chunk[:300].decode("utf-8", "replace"))
                data = tail + chunk
                marks = [match.end() for match in CONTENT.finditer(data)]
                if marks:
                    told += len(marks)
                    yield len(marks)
                # What may be the beginning of a mark is looked at again with the next chunk.
                last = max(marks, default=0)
                if DONE in data:
                    # The last bytes of the answer may come apart from its mark.
                    if not data.endswith(b"0\r\n\r\n"):
                        await reader.readuntil(b"0\r\n\r\n")
                    whole = True
                    if not work.same_prompt:
                        yield work.tokens - told
                    return
                tail = data[max(last, len(data) - 32) :]
        finally:
            if whole:
                self.free.append((reader, writer))
            else:
                writer.close()

    async def close(self) -> None:
        for _, writer in self.free:
            writer.close()


async def run(work: Work) -> dict[str, Any]:
    rng = random.Random(work.seed)
    client = Grpc(work) if work.face == "grpc" else Http(work)
    seen: list[Seen] = []
    gaps: list[float] = []

    async def one(number: int, due: float) -> None:
        found = Seen(due, late=time.monotonic() - due)
        seen.append(found)
        try:
            async with contextlib.aclosing(client.tokens(number, random.Random(rng.getrandbits(64)), found)) as stream:
                async for count in stream:
                    if not count:
                        continue
                    now = time.monotonic()
                    if not found.first:
                        found.first = now
                    elif work.gaps:
                        gaps.append(now - found.last)
                    found.last = now
                    found.tokens += count
                    if work.stop_after and found.tokens >= work.stop_after:
                        break
        except Exception as exc:
            found.error = f"{type(exc).__name__}: {exc}"[:200]

    begun = time.monotonic()
    if work.rate:
        tasks = []
        due = begun
        for number in range(work.requests):
            due += rng.expovariate(work.rate)
            # Open loop: what comes late is due all the same.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(one(number, due)))
        await asyncio.gather(*tasks)
    else:
        numbers = iter(range(work.requests))

        async def loop() -> None:
            for number in numbers:
                await one(number, time.monotonic())

        await asyncio.gather(*(loop() for _ in range(min(work.streams, work.requests))))
    await client.close()
    return {"begun": begun, "ended": time.monotonic(), "seen": [asdict(item) for item in seen], "gaps": gaps}


def main() -> int:
    work = Work(**json.load(sys.stdin))
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    # As services do: else the collector walks all modules, again and again, for tens of milliseconds each.
    gc.collect()
    gc.freeze()
    json.dump(asyncio.run(run(work)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
