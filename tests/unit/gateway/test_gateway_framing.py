"""Events are framed by hand: what a client parses is the response that generated code would have made."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.service import GrpcCaller


class Written:
    """A call that keeps what is written."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def write(self, message: bytes) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("size", [0, 1, 100, 118, 119, 120, 127, 128, 16_370, 16_384, 300_000])
async def test_framed_like_generated_code(size: int) -> None:
    event = pb.GenerateEvent(delta=pb.Delta(choice=1, text="x" * size, token_ids=[7]))
    call: Any = Written()
    await GrpcCaller(call).send(event)
    (message,) = call.messages
    assert message == pb.GenerateResponse(event=event).SerializeToString()
    assert pb.ChatResponse.FromString(message).event == event
