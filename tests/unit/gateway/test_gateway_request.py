"""Races of one request's life that only show when steps fall into the same turn of the event loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import INVALID_SPAN

from gateway_fakes import MODEL
from kvmesh.errors import Cancelled, KvmeshError
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.limits import RequestLimits
from services.gateway.decision import Decision, Placed
from services.gateway.heals import Heals
from services.gateway.inbox import Inbox
from services.gateway.job import Job, Share
from services.gateway.observe import Observer
from services.gateway.request import Request
from services.gateway.sink import RequestSettings
from services.gateway.tokenizers import ModelTokenizer


class Link:
    """Counts open attempts like a real link's demultiplexer."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(worker_id="w", revision="r")
        self.open: set[Any] = set()
        self.aborted: list[Any] = []

    def release(self, key: Any, *, abort: bool) -> None:
        if key in self.open:
            self.open.discard(key)
            self.aborted.append(key)

    def abort(self, key: Any, choices: Any = ()) -> None:
        self.aborted.append((key, tuple(choices)))


class SlowPlacer:
    """Accepts when told to."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.go = asyncio.Event()
        self.inbox: Inbox | None = None

    async def decide(self, job: Job, progress: Any, *, flights: bool) -> Decision:
        return Decision(MODEL)

    async def place(self, job: Job, progress: Any, share: Share, make_inbox: Any, *, decision: Any) -> Placed:
        await self.go.wait()
        self.inbox = make_inbox()
        key = (job.inner_id, 0)
        self.link.open.add(key)
        return Placed(self.link, key, self.inbox, MODEL, "r", 0, share)  # type: ignore[arg-type]


def job() -> Job:
    sampling = pb.SamplingParams(n=1, best_of=1, max_tokens=5, seed=1)
    return Job(
        tenant="local",
        request_id="r",
        inner_id="inner",
        model=MODEL,
        served=MODEL,
        fingerprint="",
        tokenizer=ModelTokenizer(scripted_tokenizer()),
        token_ids=[1],
        sampling=sampling,
        drawn_seed=False,
        limits=RequestLimits.start(10_000, 10_000),
        cache=pb.CACHE_MODE_OFF,
    )


@pytest.mark.parametrize("turns", range(10))
@pytest.mark.parametrize("how", ["client leaves", "aborted"])
async def test_ended_in_the_turn_in_which_it_is_accepted(turns: int, how: str) -> None:
    link = Link()
    placer = SlowPlacer(link)
    sent: list[pb.GenerateEvent] = []
    made: list[Request] = []

    async def send(event: pb.GenerateEvent) -> None:
        sent.append(event)

    async def send_metadata() -> None:
        """Nobody to tell."""

    async def handler() -> None:
        request = Request(
            RequestSettings(),
            placer=placer,  # type: ignore[arg-type]
            routers=SimpleNamespace(),  # type: ignore[arg-type]
            heals=Heals(),
            send=send,
            send_metadata=send_metadata,
        )
        made.append(request)
        await request.run(job(), Observer(INVALID_SPAN, "chat", MODEL, request.started))

    task = asyncio.create_task(handler())
    while not made:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    placer.go.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if how == "aborted":
        made[0].stop(Cancelled("aborted"))
    else:
        task.cancel()
    outcome: BaseException | None = None
    try:
        await task
    except (asyncio.CancelledError, KvmeshError) as exc:
        outcome = exc
    for _ in range(5):
        await asyncio.sleep(0)
    assert not link.open
    assert len(link.aborted) <= 1
    terminals = [event for event in sent if event.HasField("error") or event.HasField("finished")]
    if how == "aborted":
        # Before acceptance the status, after it one terminal; never both.
        assert isinstance(outcome, Cancelled) == (not sent)
        assert len(terminals) == (1 if sent else 0)
    else:
        assert isinstance(outcome, asyncio.CancelledError)
        assert not terminals
    assert not [t for t in asyncio.all_tasks() if t.get_name() in ("decide", "place")]
