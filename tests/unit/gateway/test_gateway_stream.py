from __future__ import annotations

from conftest import World, kinds, text_of
from kvmesh.proto.v1 import inference_pb2 as pb


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
    assert finished.served.cache == "none"
    assert not finished.served.degraded
    last = [event.delta for event in events if event.HasField("delta")][-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP
    (report,) = await router.reports.wait()
    assert report.code == 0
    assert report.answer.choices[0].text == "héllo 🎉"
    await world.until(world.idle)
