"""Answers from the cache: byte for byte what was stored, in pieces, and told as what they are."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_world import World, end_of, kinds, rest, text_of
from kvmesh.errors import NotCached
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import from_rpc_error
from services.gateway import replay


def answer_of(*texts: str, **fields: Any) -> router_pb2.CachedAnswer:
    choices = [
        router_pb2.CachedChoice(text=text, token_ids=[*text.encode(), 257], finish_reason=pb.FINISH_REASON_STOP)
        for text in texts
    ]
    return router_pb2.CachedAnswer(choices=choices, revision="rev-1", **fields)


@given(
    texts=st.lists(st.text(max_size=40), min_size=1, max_size=3),
    repeat=st.sampled_from([1, 1, 100, 400]),
    extra=st.integers(0, 3000),
)
def test_pieces_join_to_what_was_stored(texts: list[str], repeat: int, extra: int) -> None:
    answer = answer_of(*(text * repeat for text in texts))
    # Tokens need not go with characters at all.
    answer.choices[0].token_ids.extend([7] * extra)
    deltas = list(replay.deltas(answer))
    for index, choice in enumerate(answer.choices):
        mine = [delta for delta in deltas if delta.choice == index]
        assert "".join(delta.text for delta in mine).encode() == choice.text.encode()
        assert [token for delta in mine for token in delta.token_ids] == list(choice.token_ids)
        assert [bool(delta.finish_reason) for delta in mine] == [False] * (len(mine) - 1) + [True]
    assert all(len(d.text) <= replay.MAX_CHARS and len(d.token_ids) <= replay.MAX_TOKENS for d in deltas)


async def trailing(call: Any) -> dict[str, str]:
    return {key: value for key, value in await call.trailing_metadata() if key.startswith("x-kvmesh-cache")}


@pytest.mark.parametrize("kind", ["exact", "semantic"])
async def test_a_hit_says_that_it_is_one(world: World, kind: str) -> None:
    worker = await world.worker()
    router = await world.router()
    text = "líne\n🎉 " * 2000

    async def cached(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        answer = answer_of(text, kind=kind, score=0.9876, age_s=12.5, purge_id="entry-1", prompt_tokens=3)
        return router_pb2.RouteResponse(answer=answer, model="scripted", decision_id="d", cache=kind)

    router.decide = cached
    await world.start()
    call = world.chat(request_id="mine")
    events = await rest(call)
    assert kinds(events) == ["accepted", "delta", "finished"]
    assert text_of(events) == text
    assert len(events) > 10
    assert events[0].accepted.request_id == "mine"
    finished = events[-1].finished
    assert finished.usage.prompt_tokens == events[0].accepted.prompt_tokens != 3
    assert finished.usage.completion_tokens == len(text.encode()) + 1
    served = finished.served
    assert (served.cache, served.cache_age_s, served.cache_purge_id) == (kind, 12.5, "entry-1")
    assert served.cache_similarity == pytest.approx(0.9876)
    assert await trailing(call) == {
        "x-kvmesh-cache": kind,
        "x-kvmesh-cache-age": "12.500",
        "x-kvmesh-cache-similarity": "0.9876",
        "x-kvmesh-cache-purge-id": "entry-1",
    }
    assert not worker.submits.items


async def test_what_is_no_hit_says_so_too(world: World) -> None:
    await world.worker()
    await world.router()
    await world.start()
    for mode, told in ((pb.CACHE_MODE_UNSPECIFIED, "miss"), (pb.CACHE_MODE_OFF, "bypass")):
        call = world.chat(cache=mode)
        events = await rest(call)
        assert events[-1].finished.served.cache == told
        assert await trailing(call) == {"x-kvmesh-cache": told}


@pytest.mark.parametrize("says", ["not cached", "a placement", "nothing"])
async def test_only_if_cached_asks_no_worker(world: World, says: str) -> None:
    worker = await world.worker()
    router = await world.router()

    async def decide(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        assert request.cache_control.only_if_cached
        if says == "not cached":
            raise NotCached("no such answer")
        return router.placement(request)

    router.decide = decide
    await world.start(route_timeout_ms=300)
    if says == "nothing":
        await router.stop()
    error = await end_of(world.chat(cache_control=pb.CacheControl(only_if_cached=True)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert from_rpc_error(error).reason == "NOT_CACHED"
    assert not worker.submits.items


async def test_an_answer_that_must_not_be_stored_is_not_reported(world: World) -> None:
    await world.worker()
    router = await world.router()
    await world.start()
    await world.ask(cache_control=pb.CacheControl(no_store=True))
    (report,) = await router.reports.wait()
    assert not report.HasField("answer")
