"""The buffer of one request: bounded as a backlog, never against a single message."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.inbox import Inbox, SlowReader


def scores(entries: int) -> engine_pb2.PromptLogprobs:
    return engine_pb2.PromptLogprobs(
        request_id="r", logprobs=[pb.TokenLogprob(token_id=index, logprob=-1.0, rank=1) for index in range(entries)]
    )


async def test_the_scores_of_a_long_prompt_are_no_slow_reader() -> None:
    failures: list[KvmeshError] = []
    wake = asyncio.Event()
    inbox = Inbox(positions={0: 0}, max_tokens=16, max_bytes=4096, on_failure=failures.append, wake=wake)
    large = scores(2000)
    assert large.ByteSize() > 4096
    inbox.prompt(large)
    assert not failures
    assert wake.is_set()
    assert inbox.take() == [large]
    # What comes on top of something untaken is a backlog.
    inbox.prompt(large)
    inbox.delta(engine_pb2.SequenceDelta(request_id="r", token_ids=[1]))
    (failure,) = failures
    assert isinstance(failure, SlowReader)
    with pytest.raises(SlowReader):
        inbox.take()
