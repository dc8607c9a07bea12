"""`kvmesh ask`: stream one answer and say how it was served."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.cli.options import lenient, shown, write
from kvmesh.cli.tls import PLAINTEXT, Secure
from kvmesh.client import Client
from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb

DEFAULT_SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 256}


async def ask(
    address: str,
    question: str,
    *,
    model: str,
    console: Console,
    system: str = "",
    api_key: str = "",
    sampling: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    secure: Secure = PLAINTEXT,
) -> int:
    """Stream the answer to stdout and the summary to `console`. Returns 0 after a finished answer, else 1."""
    lenient(sys.stdout)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    try:
        async with (
            Client(address, api_key=api_key or None, tls=secure.tls, server_name=secure.server_name or None) as client,
            client.chat(messages, model=model, timeout_s=timeout_s, **dict(sampling or DEFAULT_SAMPLING)) as stream,
        ):
            async for event in stream:
                if event.HasField("delta"):
                    write(sys.stdout, event.delta.text)
                elif event.HasField("finished"):
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    console.print(summary(event.finished))
                    return 0
                elif event.HasField("error"):
                    sys.stdout.write("\n")
                    console.print(Text(f"error {event.error.reason}: {shown(event.error.message)}", style="red"))
                    return 1
    except KvmeshError as error:
        console.print(Text(f"error {error.reason}: {shown(error.message)}", style="red"))
        return 1
    console.print(Text("the stream ended without a terminal event", style="red"))
    return 1


def summary(finished: pb.Finished) -> Table:
    """TTFT, TPOT, workers, bytes moved, transport and cache of one answer."""
    served, usage = finished.served, finished.usage
    table = Table.grid(padding=(0, 1))
    decode_tokens = usage.completion_tokens - 1
    tpot = (served.total_ms - served.ttft_ms) / decode_tokens if decode_tokens > 0 else 0.0
    cached = f" ({usage.cached_tokens} from the prefix cache)" if usage.cached_tokens else ""
    cache = served.cache or "none"
    if cache in ("exact", "semantic"):
        cache += f", {served.cache_age_s:.0f} s old, cosine {served.cache_similarity:.3f}, {served.cache_purge_id}"
    rows = [
        ("cache", cache),
        ("tokens", f"{usage.prompt_tokens} in{cached}, {usage.completion_tokens} out"),
        ("TTFT", f"{served.ttft_ms:.0f} ms"),
        ("TPOT", f"{tpot:.1f} ms" if tpot else "–"),
        ("decode", served.decode_worker or "–"),
        ("prefill", served.prefill_worker or ("on decode" if served.decode_worker else "–")),
        ("transport", served.transport or "–"),
        ("bytes moved", f"{served.transfer_bytes:,}"),
    ]
    if served.degraded:
        rows.append(("degraded", "placed without the router"))
    if served.heals:
        rows.append(("heals", f"went on elsewhere {served.heals} time(s)"))
    if served.retries:
        rows.append(("retries", str(served.retries)))
    for key, value in rows:
        table.add_row(Text(f"{key}:", style="dim"), value)
    return table
