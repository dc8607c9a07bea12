"""A generation without a client: into any sink, from where another one stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway_fakes import EOS, FINGERPRINT, MODEL, FakeWorker
from gateway_world import World
from kvmesh.errors import Cancelled, DeadlineExceeded
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.limits import RequestLimits
from services.gateway.generation import Generation
from services.gateway.job import Job, Progress
from services.gateway.registry import new_id
from services.gateway.sink import Ended, RequestSettings, SinkClosed
from services.gateway.tokenizers import ModelTokenizer

PROMPT = [1, 2, 3]


class Events:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.accepts: list[pb.Accepted] = []
        self.deltas: list[pb.Delta] = []
        self.waited = 0
        self.broken = False

    async def waiting(self) -> None:
        self.waited += 1

    async def accepted(self, event: pb.Accepted) -> None:
        self.accepts.append(event)

    async def prompt(self, event: pb.PromptScored) -> None:
        raise AssertionError("nobody asked")

    async def delta(self, event: pb.Delta) -> None:
        if self.broken:
            raise SinkClosed
        self.deltas.append(event)

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.choice == choice)

    def tokens(self, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.choice == choice for token in delta.token_ids]


def job(total_ms: int = 30_000, **sampling: Any) -> Job:
    values = {"n": 1, "best_of": sampling.get("n", 1), "max_tokens": 50, "seed": 4, **sampling}
    return Job(
        tenant="local",
        request_id="r",
        inner_id=new_id(),
        model=MODEL,
        served=MODEL,
        fingerprint=FINGERPRINT,
        tokenizer=ModelTokenizer(scripted_tokenizer()),
        token_ids=PROMPT,
        sampling=pb.SamplingParams(**values),
        drawn_seed=False,
        limits=RequestLimits.start(total_ms, total_ms),
        cache=pb.CACHE_MODE_EXACT,
    )


def generation(world: World, asked: Job, sink: Events, **fields: Any) -> Generation:
    gateway = world.gateway
    return Generation(
        asked,
        RequestSettings(first_metadata_s=0.05),
        sink,
        placer=gateway.placer,
        routers=gateway.routers,
        heals=gateway.heals,
        **fields,
    )


def speaks(worker: FakeWorker, *texts: str) -> Any:
    async def on_submit(request: engine_pb2.SubmitRequest) -> None:
        output = list(request.token_ids[request.prompt_len :])
        for choice in range(request.first_choice, request.first_choice + request.sampling.best_of):
            ids = [*texts[choice].encode(), EOS]
            assert output == ids[: len(output)]
            for position in range(len(output), len(ids)):
                end = {"finish_reason": pb.FINISH_REASON_STOP, "stop_token_id": EOS} if ids[position] == EOS else {}
                worker.tokens(request, [ids[position]], position, choice, **end)
        worker.end(request, cached_tokens=99)

    return on_submit


@pytest.mark.parametrize("known", range(8))
async def test_taken_over_after_any_token(world: World, known: int) -> None:
    worker = await world.worker()
    other = await world.worker("other", revision="rev-2")
    router = await world.router([worker, other])
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    text = "aé🎉!"  # 1 + 2 + 4 + 1 bytes
    worker.on_submit = speaks(worker, text)
    sink = Events()
    progress = Progress()
    flight = router_pb2.Flight(flight_id="f", gateway_id="g", token=2, key="k")
    end = await generation(
        world,
        job(),
        sink,
        progress=progress,
        resume={0: list(text.encode())[:known]},
        revision="rev-1",
        lead=flight,
    ).run()
    # What follows joins to what was shown: whole characters up to the last token, no byte twice.
    shown = text.encode()[:known].decode("utf-8", "ignore")
    assert shown + sink.text() == text
    assert sink.tokens() == [*text.encode()[known:], EOS]
    assert end.usage.completion_tokens == 9
    assert end.usage.cached_tokens <= len(PROMPT)
    assert end.answer is not None
    assert end.answer.choices[0].text == text
    assert len(sink.accepts) == 1
    (request,) = worker.submits.items
    assert list(request.token_ids) == PROMPT + list(text.encode())[:known]
    (report,) = await router.reports.wait()
    assert report.flight == flight
    assert (report.code, report.answer) == (0, end.answer)
    route = router.routes.items[0]
    assert (route.no_flight, route.pinned_revision) == (True, "rev-1")


async def test_taken_over_with_a_choice_that_had_ended(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    worker.on_submit = speaks(worker, "xEND", "twelve", "three")
    sink = Events()
    end = await generation(
        world,
        job(n=3, stop=["END", "ELSE"]),
        sink,
        resume={0: list(b"xEND"), 1: [*b"twelve", EOS], 2: list(b"th")},
        ended={0: Ended(pb.FINISH_REASON_STOP, "END"), 1: Ended(pb.FINISH_REASON_STOP)},
        revision="rev-1",
    ).run()
    assert [sink.text(choice) for choice in range(3)] == ["", "", "ree"]
    assert end.answer is not None
    assert [choice.text for choice in end.answer.choices] == ["x", "twelve", "three"]
    assert end.usage.completion_tokens == 4 + 7 + 6
    (request,) = worker.submits.items
    assert (request.first_choice, request.sampling.best_of) == (2, 1)


async def test_a_stop_string_that_had_begun(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    worker.on_submit = speaks(worker, "abEND and more")
    sink = Events()
    end = await generation(world, job(stop=["END"]), sink, resume={0: list(b"abEN")}, revision="rev-1").run()
    # "ab" was shown before, "EN" was held back.
    assert sink.text() == ""
    assert (sink.deltas[-1].stop_reason, sink.tokens()) == ("END", list(b"D"))
    assert end.answer is not None
    assert end.answer.choices[0].text == "ab"


@pytest.mark.parametrize("how", ["sink", "stop", "cancel", "limit"])
async def test_whatever_ends_it_frees_the_worker_and_reports(world: World, how: str) -> None:
    worker = await world.worker()
    router = await world.router()
    await world.start()
    requests: list[engine_pb2.SubmitRequest] = []

    async def some(request: engine_pb2.SubmitRequest) -> None:
        requests.append(request)
        worker.tokens(request, list(b"ab"))

    worker.on_submit = some
    sink = Events()
    asked = job(total_ms=1000 if how == "limit" else 30_000)
    running = generation(world, asked, sink)
    task = asyncio.create_task(running.run())
    await world.until(lambda: sink.text() == "ab")
    if how == "sink":
        sink.broken = True
        worker.tokens(requests[0], [99], 2)
    elif how == "stop":
        running.stop(Cancelled("enough"))
    elif how == "cancel":
        task.cancel()
    errors = {"sink": SinkClosed, "stop": Cancelled, "cancel": asyncio.CancelledError, "limit": DeadlineExceeded}
    with pytest.raises(errors[how]):
        await task
    await worker.aborts.wait()
    (report,) = await router.reports.wait()
    code = grpc.StatusCode.DEADLINE_EXCEEDED if how == "limit" else grpc.StatusCode.CANCELLED
    assert report.code == code.value[0]
    assert not report.HasField("answer")
    assert not report.failures
    assert running.usage.completion_tokens == 2 + (how == "sink")
    await world.until(world.idle)
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "place"]


async def test_waiting_is_told_once(world: World) -> None:
    worker = await world.worker()
    worker.fill()
    await world.start(static=True)
    sink = Events()
    task = asyncio.create_task(generation(world, job(), sink).run())
    await world.until(lambda: sink.waited and len(world.gateway.queue))
    worker.on_submit = speaks(worker, "x")
    worker.empty()
    await task
    assert sink.waited == 1
    assert sink.text() == "x"
