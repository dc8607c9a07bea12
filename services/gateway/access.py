"""One line for each request at its end: who asked for what, how it went, how long it took. Never what was said, unless
`log_prompts` asks for it; then no more than so many characters of it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.telemetry.flood import ACCESS

log = logging.getLogger(ACCESS)
# Of a model's name as it was asked for: a request that is refused has a line too.
MAX_ASKED_CHARS = 128


@dataclass(frozen=True, slots=True)
class AccessRules:
    """`lines`: write them. `texts`: with prompt and output, `chars` characters of each at most."""

    lines: bool = True
    texts: bool = False
    chars: int = 1000


@dataclass(slots=True)
class AccessLine:
    """What is known of a request; `write` at its end. `outcome`: ok, failed, refused, cancelled."""

    rules: AccessRules
    operation: str
    tenant: str
    asked: str
    model: str = ""
    inner_id: str = ""
    outcome: str = ""
    reason: str = ""
    ttft_ms: float | None = None
    usage: pb.Usage = field(default_factory=pb.Usage)
    served: pb.Served | None = None
    prompt: str = ""
    output: str = ""
    started: float = field(default_factory=time.monotonic)

    def said(self, request: pb.GenerateRequest | pb.ChatRequest) -> None:
        """The prompt, where it is wanted."""
        if self.rules.texts:
            if isinstance(request, pb.ChatRequest):
                self.prompt = _cut(
                    "\n".join(f"{one.role}: {one.content}" for one in request.messages), self.rules.chars
                )
            else:
                self.prompt = _cut(request.text, self.rules.chars)

    def sent(self, event: pb.GenerateEvent) -> None:
        """An event that the client got. Once a frame; of text nothing is kept that is not wanted."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            if self.rules.texts and len(self.output) <= self.rules.chars:
                self.output += event.delta.text
        elif kind == "finished":
            self.usage, self.served = event.finished.usage, event.finished.served

    def write(self) -> None:
        """The line."""
        if not (self.rules.lines and log.isEnabledFor(logging.INFO)):
            return
        given: dict[str, object] = {
            "operation": self.operation,
            "tenant": self.tenant,
            "model": self.model or _cut(self.asked, MAX_ASKED_CHARS),
            "outcome": self.outcome,
            "total_ms": round((time.monotonic() - self.started) * 1e3, 1),
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
        }
        if self.reason:
            given["reason"] = self.reason
        if self.inner_id:
            given["inner_id"] = self.inner_id
        if self.ttft_ms is not None:
            given["ttft_ms"] = round(self.ttft_ms, 1)
        if self.served is not None:
            given["cache"], given["worker"] = self.served.cache, self.served.decode_worker
            given["queue_ms"], given["heals"] = round(self.served.queue_ms, 1), self.served.heals
        if self.rules.texts:
            given["prompt"], given["output"] = self.prompt, _cut(self.output, self.rules.chars)
        log.info("request", extra=given)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[:chars] + "…"
