from __future__ import annotations

from gateway_world import World, kinds, text_of
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.telemetry import metrics, names


async def test_chat_streams_an_answer(world: World) -> None:
    await world.worker(text="héllo 🎉")
    router = await world.router()
    await world.start()
    events = await world.ask("hi", request_id="mine")
    assert kinds(events) == ["accepted", "delta", "finished"]
    accepted, finished = events[0].accepted, events[-1].finished
    assert accepted.request_id == "mine"
    assert (accepted.model, accepted.revision) == ("scripted", "rev-1")
    assert text_of(events) == "héllo 🎉"
    ids = [token for event in events for token in event.delta.token_ids]
    assert ids == [*"héllo 🎉".encode(), 257]
    assert finished.usage.completion_tokens == len(ids)
    assert finished.usage.prompt_tokens == accepted.prompt_tokens > 0
    assert finished.served.decode_worker == "decode-0"
    assert finished.served.cache == "miss"
    assert not finished.served.degraded
    last = [event.delta for event in events if event.HasField("delta")][-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP
    (report,) = await router.reports.wait()
    assert report.code == 0
    assert report.answer.choices[0].text == "héllo 🎉"
    await world.until(world.idle)


async def test_the_metrics_that_dashboards_know(world: World) -> None:
    def taken() -> dict[str, float]:
        model = {"model_name": "scripted"}
        return {
            "ttft": metrics.value(names.TTFT, **model),
            "gaps": metrics.value(names.INTER_TOKEN, **model),
            "e2e": metrics.value(names.E2E, **model),
            "prompt": metrics.value(names.PROMPT_TOKENS, **model),
            "generated": metrics.value(names.GENERATION_TOKENS, **model),
            "stop": metrics.value(names.REQUEST_SUCCESS, finished_reason="stop", **model),
            "failed": metrics.value(names.REQUEST_FAILURE, reason="INTERNAL", **model),
        }

    worker = await world.worker(text="hello")
    await world.start(static=True)
    before = taken()
    events = await world.ask()
    await world.until(world.idle)
    change = {key: value - before[key] for key, value in taken().items()}
    # Tokens that reach the client with the first one have no gap.
    first = next(len(event.delta.token_ids) for event in events if event.HasField("delta"))
    assert change == {
        "ttft": 1,
        "gaps": 6 - first,
        "e2e": 1,
        "prompt": events[0].accepted.prompt_tokens,
        "generated": 6,
        "stop": 1,
        "failed": 0,
    }
    assert metrics.value(names.GATEWAY_ACTIVE) == 0
    assert metrics.value(names.GATEWAY_WORKERS, state="open") == 1

    async def broken(request: engine_pb2.SubmitRequest) -> None:
        worker.end(request)

    worker.on_submit = broken
    before = taken()
    await world.ask()
    await world.until(world.idle)
    change = {key: value - before[key] for key, value in taken().items()}
    assert (change["failed"], change["ttft"], change["stop"]) == (1, 0, 0)
