"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): the checks of this service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import schemathesis

# 503 and 504 are honest answers of a busy machine, or of a request that gives itself no time; these two never are.
FAULTS = (500, 502)
MAX_SENTENCE_BYTES = 512
SEEN = Path("statuses.txt")
# In two pieces: hypothesis sends the strings of this file as ids and prompts, and what was sent may be said again.
TRACEBACK = "Trace" + "back (most recent"


@schemathesis.check
def no_fault(ctx: Any, response: Any, case: Any) -> None:
    """No status says that something went wrong inside, and an error is one plain sentence."""
    assert response.status_code not in FAULTS, f"{response.status_code}: {response.text[:300]}"
    with SEEN.open("a") as file:
        file.write(f"{case.operation.label} {response.status_code}\n")
    text = response.text
    assert TRACEBACK not in text, text[:600]
    if response.status_code >= 400 and "error" in text:
        message = response.json()["error"]["message"]
        assert message, text[:300]
        assert len(message.encode()) <= MAX_SENTENCE_BYTES, text[:600]


@schemathesis.check
def streams_are_whole(ctx: Any, response: Any, case: Any) -> None:
    """A stream is events of JSON and then [DONE], or an error at its end."""
    if response.status_code != 200 or "text/event-stream" not in str(response.headers.get("content-type")):
        return
    with SEEN.open("a") as file:
        file.write(f"{case.operation.label} stream\n")
    text = response.text
    assert not response.stream_cut_short, f"a stream without an end: {text[-300:]}"
    assert text.endswith("\n\n"), text[-300:]
    events = [block.removeprefix("data: ") for block in text.split("\n\n")[:-1] if not block.startswith(":")]
    last = events.pop()
    parts = [json.loads(event) for event in events]
    assert all(part["object"].endswith((".chunk", "_completion")) for part in parts), text[:600]
    assert last == "[DONE]" or set(json.loads(last)) == {"error"}, text[-300:]
