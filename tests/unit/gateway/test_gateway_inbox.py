"""The buffer of one request: bounded as a backlog, never against a single message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import Internal, KvmeshError, WorkerLost
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.inbox import Inbox, SlowReader, TokensMissing


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
    assert inbox.error is failure
    assert inbox.take() == []


async def test_what_came_before_a_loss_stays_and_what_came_before_an_error_does_not() -> None:
    delta = engine_pb2.SequenceDelta(request_id="r", token_ids=[1])
    for error, kept in ((WorkerLost("gone"), [delta]), (Internal("wrong"), []), (SlowReader("slow"), [])):
        inbox = Inbox(positions={0: 0}, max_tokens=16, max_bytes=4096, on_failure=lambda _: None, wake=asyncio.Event())
        inbox.delta(delta)
        inbox.fail(error)
        inbox.delta(engine_pb2.SequenceDelta(request_id="r", token_ids=[2], first_position=1))
        inbox.fail(Internal("later"))
        assert inbox.take() == kept
        assert inbox.error is error


@pytest.mark.parametrize(
    ("first", "ids", "taken"), [(3, [1, 2], [1, 2]), (1, [8, 9, 1, 2], [1, 2]), (0, [7, 8, 9], None), (4, [1], None)]
)
async def test_positions(first: int, ids: list[int], taken: list[int] | None) -> None:
    inbox = Inbox(positions={2: 3}, max_tokens=16, max_bytes=4096, on_failure=lambda _: None, wake=asyncio.Event())
    logprobs = [pb.TokenLogprob(token_id=token) for token in ids]
    inbox.delta(engine_pb2.SequenceDelta(choice=2, first_position=first, token_ids=ids, logprobs=logprobs))
    items = inbox.take()
    assert isinstance(inbox.error, TokensMissing) == (first > 3)
    if taken is None:
        assert not items
    else:
        (item,) = items
        assert isinstance(item, engine_pb2.SequenceDelta)
        assert (item.first_position, list(item.token_ids)) == (3, taken)
        assert [entry.token_id for entry in item.logprobs] == taken
    inbox.delta(engine_pb2.SequenceDelta(choice=0, first_position=0, token_ids=[1]))
    assert inbox.error is not None


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 9), st.integers(0, 2000)), st.just("take"), st.integers(1, 40)), max_size=60
    )
)
def test_whatever_comes_what_is_held_is_bounded(happens: list[Any]) -> None:
    """Deltas (tokens, bytes of log-probabilities), scores of a prompt, and a client that takes now and then."""

    async def run() -> None:
        failures: list[KvmeshError] = []
        wake = asyncio.Event()
        inbox = Inbox(positions={0: 0}, max_tokens=16, max_bytes=4096, on_failure=failures.append, wake=wake)
        position = 0
        for what in happens:
            if what == "take":
                inbox.take()
                continue
            if isinstance(what, int):
                inbox.prompt(scores(what))
            else:
                tokens, size = what
                delta = engine_pb2.SequenceDelta(first_position=position, token_ids=range(tokens))
                if size:
                    delta.logprobs.append(pb.TokenLogprob(token=b"x" * size))
                inbox.delta(delta)
                position += tokens
            held = list(inbox._items)
            # One item alone may be larger than the bound, never more than one.
            if len(held) > 1:
                deltas = [item for item in held if isinstance(item, engine_pb2.SequenceDelta)]
                assert sum(len(item.token_ids) for item in deltas) <= 16
                assert sum(item.ByteSize() for item in held if getattr(item, "logprobs", ())) <= 4096
            assert len(failures) == (inbox.error is not None)
            if inbox.error is not None:
                assert not held
                assert isinstance(inbox.error, SlowReader)

    asyncio.run(run())
