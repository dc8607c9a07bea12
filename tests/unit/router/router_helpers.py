"""Builders shared by the router's suites."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvmesh.kv.hashing import base_seed, chain_hashes, request_seed
from kvmesh.proto.v1 import engine_pb2, inference_pb2, router_pb2

SEED = base_seed("tiny", "r1", "fp32")

ROLE = {
    "prefill": engine_pb2.WORKER_ROLE_PREFILL,
    "decode": engine_pb2.WORKER_ROLE_DECODE,
    "unified": engine_pb2.WORKER_ROLE_UNIFIED,
}


class FakeClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def worker_info(worker_id: str, role: str = "decode", **fields: Any) -> engine_pb2.WorkerInfo:
    """A serving worker of model "tiny"."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": 1,
        "address": f"127.0.0.1:{1000 + sum(worker_id.encode())}",
        "role": ROLE[role],
        "model": "tiny",
        "revision": "r1",
        "tokenizer_fingerprint": "tok",
        "base_seed": SEED,
        "page_size": 4,
        "layout_fingerprint": b"layout-1",
        "max_model_len": 4096,
        "kvtransfer_address": "127.0.0.1:9",
        "state": engine_pb2.WORKER_STATE_SERVING,
        "total_pages": 64,
    }
    return engine_pb2.WorkerInfo(**(values | fields))


def route_request(text: str = "What is the capital of France?", **fields: Any) -> router_pb2.RouteRequest:
    """A chat request whose token ids follow from the messages, as a template's would."""
    values: dict[str, Any] = {
        "request_id": "req-1",
        "gateway_id": "gw-1",
        "model": "tiny",
        "messages": [chat("system", "Be brief."), chat("user", text)],
        "sampling": inference_pb2.SamplingParams(temperature=0.0, max_tokens=32),
        "ttft_ms": 60_000,
        "total_ms": 600_000,
    }
    values |= fields
    request = router_pb2.RouteRequest(**values)
    if "token_ids" not in fields:
        rendered = "".join(f"<{m.role}>{m.content}" for m in request.messages) + request.prompt_text
        request.token_ids.extend(rendered.encode())
    if "prompt_tokens" not in fields:
        request.prompt_tokens = len(request.token_ids)
    return request


def kv_events(
    sequence: int, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), **fields: Any
) -> router_pb2.KvEvents:
    """A worker's message of packed hashes; the first of a stream begins a snapshot."""
    values: dict[str, Any] = {"reset": sequence == 1, "incarnation": 1} | fields
    return router_pb2.KvEvents(
        stored_packed=b"".join(stored), removed_packed=b"".join(removed), sequence=sequence, **values
    )


def chain(tokens: list[int], seed: bytes = SEED, block_size: int = 4, salt: str = "") -> router_pb2.PrefixChain:
    """The chain of a prompt, as a gateway sends it."""
    hashes = chain_hashes(request_seed(seed, salt=salt), tokens, block_size)
    return router_pb2.PrefixChain(base_seed=seed, block_size=block_size, hashes=hashes)


def chat(role: str, content: str) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role=role, content=content)


def full_answer(text: str = "Paris.", revision: str = "r1", **fields: Any) -> router_pb2.CachedAnswer:
    """A complete answer of one choice."""
    choice = router_pb2.CachedChoice(
        text=text, token_ids=list(text.encode()), finish_reason=inference_pb2.FINISH_REASON_STOP
    )
    return router_pb2.CachedAnswer(choices=[choice], prompt_tokens=7, revision=revision, **fields)
