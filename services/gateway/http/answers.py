"""Parts of answers that chats and completions share: usage, log-probabilities, what the service tells of itself."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb

FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
# JSON has no infinity; this is what OpenAI says instead.
LEAST_LOGPROB = -9999.0


def dumps(value: Any) -> str:
    """Compact JSON; infinities would be no JSON and are an error."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def fingerprint(model: str, revision: str) -> str:
    """Changes when what serves changes."""
    return "fp_" + hashlib.sha256(f"{model}\0{revision}".encode("utf-8", "replace")).hexdigest()[:10]


class Tally:
    """Usage over the runs of one request, and the tokens that were reasoning."""

    def __init__(self) -> None:
        self.prompt = self.completion = self.cached = self.reasoning = 0

    def add(self, usage: pb.Usage) -> None:
        """One run's."""
        self.prompt += usage.prompt_tokens
        self.completion += usage.completion_tokens
        self.cached += usage.cached_tokens

    def json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": min(self.reasoning, self.completion),
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def served(given: Sequence[pb.Served]) -> dict[str, Any]:
    """The extension `kvmesh`: how the request was served, of several prompts a list."""
    rows = [
        {
            "cache": one.cache,
            "decode_worker": one.decode_worker,
            "prefill_worker": one.prefill_worker,
            "transport": one.transport,
            "transfer_bytes": one.transfer_bytes,
            "degraded": one.degraded,
            "retries": one.retries,
            "heals": one.heals,
            "queue_ms": round(one.queue_ms, 3),
            "ttft_ms": round(one.ttft_ms, 3),
            "total_ms": round(one.total_ms, 3),
            "cache_age_s": round(one.cache_age_s, 3),
            "cache_similarity": round(one.cache_similarity, 4),
            "cache_purge_id": one.cache_purge_id,
        }
        for one in given
    ]
    return rows[0] if len(rows) == 1 else {"prompts": rows}


def logprob(value: float) -> float:
    """A number that JSON can hold; float32 has no more digits than these."""
    return round(value, 6) if math.isfinite(value) else LEAST_LOGPROB


def chat_logprob(entry: pb.TokenLogprob) -> dict[str, Any]:
    """One token of a chat's `logprobs.content`."""
    return {
        "token": entry.token.decode("utf-8", "replace"),
        "logprob": logprob(entry.logprob),
        "bytes": list(entry.token),
        "top_logprobs": [
            {"token": top.token.decode("utf-8", "replace"), "logprob": logprob(top.logprob), "bytes": list(top.token)}
            for top in entry.top
        ],
    }
