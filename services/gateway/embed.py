"""Embeddings: the routers' embedder under its own id, checked and counted here like any request."""

from __future__ import annotations

import asyncio

import grpc

from kvmesh.errors import DeadlineExceeded, FailedPrecondition, KvmeshError, NotFound
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.credentials import Principal
from services.gateway import validate
from services.gateway.limits.contract import Limiter
from services.gateway.registry import Registry, new_id
from services.gateway.routers import Routers

MAX_TEXTS = 256
MAX_TEXT_CHARS = 64 * 1024
LIMIT_S = 60.0
BYTES_PER_TOKEN = 4


def check(request: pb.EmbedRequest, max_bytes: int) -> None:
    """Raises InvalidArgument with the field, TooLarge over `max_bytes` bytes of text."""
    validate.check_model(request.model)
    validate.check_user(request.user)
    if not 1 <= len(request.input) <= MAX_TEXTS:
        raise validate.bad("input", f"holds {len(request.input)} texts; 1 to {MAX_TEXTS} are allowed")
    left = max_bytes
    for index, text in enumerate(request.input):
        field = f"input[{index}]"
        if not text:
            raise validate.bad(field, "is empty")
        if len(text) > MAX_TEXT_CHARS:
            raise validate.bad(field, f"is longer than {MAX_TEXT_CHARS} characters")
        validate.check_prompt_text(text, left, field="input")
        left -= len(text.encode())


class _Running:
    """An embedding as the registry knows it."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.error: KvmeshError | None = None

    def stop(self, error: KvmeshError) -> None:
        if self.error is None and self._task is not None:
            self.error = error
            self._task.cancel()


class _Texts:
    """What limits see of it. How many tokens the texts have is known to the embedder alone: about so many."""

    def __init__(self, request: pb.EmbedRequest, request_id: str) -> None:
        self.token_ids = range(sum(len(text.encode()) // BYTES_PER_TOKEN + 1 for text in request.input))
        self.sampling = pb.SamplingParams()
        self.served = request.model
        self.request_id = request_id


async def embed(
    request: pb.EmbedRequest,
    principal: Principal,
    routers: Routers,
    registry: Registry,
    limiter: Limiter,
    remaining_s: float | None,
) -> pb.EmbedResponse:
    """The vectors of a request that passed `check`; limits and budgets of the tenant count as for any other.

    FailedPrecondition when no router embeds, NotFound when none does under this id.
    """
    known = routers.embedders()
    if not known:
        raise FailedPrecondition("no router here runs an embedder")
    if request.model not in known:
        raise NotFound(f"{request.model!r} makes no embeddings; {known[0]!r} does", details={"field": "model"})
    limit_s = LIMIT_S if remaining_s is None else min(LIMIT_S, remaining_s)
    asked = router_pb2.EmbedTextsRequest(model=request.model, texts=request.input)
    running = _Running()
    request_id = new_id()
    with registry.hold(principal, request_id, running):
        try:
            async with asyncio.timeout(limit_s):
                hold = await limiter.take(principal, _Texts(request, request_id), running.stop)
                try:
                    made = await routers.embed(asked, principal.tenant, limit_s)
                    hold.settle(pb.Usage(prompt_tokens=made.prompt_tokens), None, 0)
                finally:
                    hold.settle(pb.Usage(), None, grpc.StatusCode.UNAVAILABLE.value[0])
        except TimeoutError:
            raise DeadlineExceeded(f"the texts were not embedded within {limit_s:.1f} s") from None
        except asyncio.CancelledError:
            if running.error is None:
                raise
            raise running.error from None
    return pb.EmbedResponse(
        model=made.model, embeddings=made.embeddings, usage=pb.Usage(prompt_tokens=made.prompt_tokens)
    )
