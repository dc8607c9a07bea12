"""An alias with classes through a real router: pools, sessions, explanation, verdict."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from classes_kit import made_weights
from kvmesh.proto.v1 import router_admin_pb2, router_admin_pb2_grpc
from router_harness import LIMIT_S, TOKEN, AttachedWorker, Router, running_router
from router_helpers import route_request, worker_info
from services.router.classes import model
from services.router.classes.pools import Classes, Pools
from services.router.near.embedder import HashEmbedder

TOPICS = ("tides", "moons", "rivers", "bridges", "copper", "winter", "kings", "cells", "prices", "motors", "songs")
QUESTIONS = [f"How do {a} change {b}?" for a in TOPICS for b in TOPICS if a != b]


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    path = tmp_path / "weights.npz"
    path.write_bytes(model.dump(made_weights(dim=384)))
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with running_router(
        token,
        aliases="",
        classes="auto=small-model|large-model",
        class_weights=path,
        class_threshold=0.5,
        class_feedback_file=tmp_path / "verdicts.jsonl",
    ) as made:
        # No test of deadlines: a busy machine must not turn a vector into none.
        assert made.service.cache.near is not None
        made.service.cache.near._embed_timeout_s = LIMIT_S
        yield made


def _questions(pool: str) -> list[str]:
    """Questions that the same weights send to a pool."""
    classes = Classes({"auto": Pools("small-model", "large-model")}, made_weights(dim=384), 0.5)
    found = []
    for text in QUESTIONS:
        decision = classes.choose("auto", text, HashEmbedder().embed(classes.reading(text)))
        assert decision is not None
        if decision.pool == pool:
            found.append(text)
    assert len(found) >= 3
    return found


async def test_an_alias_goes_to_the_pool_of_its_class(router: Router, tmp_path: Path) -> None:
    small, large = _questions("small"), _questions("large")
    admin = router_admin_pb2_grpc.RouterAdminStub(router.channel)
    async with AttachedWorker(router, worker_info("s", model="small-model")):
        async with AttachedWorker(router, worker_info("l", model="large-model")):
            asked = [("1", small[0], "", "small"), ("2", large[0], "", "large"), ("3", small[1], "x", "small")]
            # Up, and no more down; a session of the same name of another tenant is another one.
            asked += [("4", large[1], "x", "large"), ("5", small[2], "x", "large")]
            for number, text, session, pool in asked:
                response = await router.route(
                    route_request(text, model="auto", request_id=f"r{number}", session_id=session)
                )
                assert response.model == f"{pool}-model", number
                assert response.placement.pair.decode.worker_id == pool[0]
            named = await router.route(route_request(large[2], model="small-model", request_id="r6"))
            assert named.model == "small-model"
            other = route_request(small[0], model="auto", request_id="r7", session_id="x")
            assert (await router.route(other, tenant="acme")).model == "small-model"

            explained = await admin.Explain(router_admin_pb2.ExplainRequest(request_id="r4"), timeout=LIMIT_S)
            told = getattr(explained, "class")
            assert (told.alias, told.pool, told.threshold) == ("auto", "large", 0.5)
            assert 0.0 < told.probability < 0.5
            assert told.features["questions"] > 0
            again = await admin.Explain(router_admin_pb2.ExplainRequest(request_id="r5"), timeout=LIMIT_S)
            assert getattr(again, "class").reason == "session"
            verdict = router_admin_pb2.FeedbackRequest(request_id="r1", good=True)
            await admin.Feedback(verdict, timeout=LIMIT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.Feedback(verdict, timeout=LIMIT_S)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    written = (tmp_path / "verdicts.jsonl").read_text()
    assert written.count("\n") == 1
    assert small[0] not in written


async def test_a_pool_that_nobody_serves(router: Router) -> None:
    small = _questions("small")[0]
    async with AttachedWorker(router, worker_info("l", model="large-model")):
        response = await router.route(route_request(small, model="auto"))
        assert response.model == "large-model"
