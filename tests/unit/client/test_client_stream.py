"""What a stream puts together, and when a call is made again."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from client_kit import ANSWER, Gateway, accepted, delta, failed, finished
from kvmesh.client import NO_RETRY, Client, Retry
from kvmesh.client.retry import Attempts
from kvmesh.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    KvmeshError,
    Overloaded,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.telemetry import tracing

FAST = Retry(attempts=4, pause_s=0.001, max_pause_s=0.002)


async def test_text_reasoning_and_tool_calls_are_put_together(gateway: Gateway) -> None:
    call = pb.ToolCallDelta
    gateway.scripts = [
        [
            accepted("the-id"),
            delta(reasoning="Let me "),
            delta(reasoning="see."),
            delta("Hi "),
            delta("you", choice=1),
            delta(tool_calls=[call(index=0, id="a", name="f", arguments='{"x"')]),
            delta(tool_calls=[call(index=0, arguments=":1}"), call(index=1, id="b", name="g", arguments="{}")]),
            delta("there", finish_reason=pb.FINISH_REASON_TOOL_CALLS, stop_reason="!"),
            finished(),
        ]
    ]
    async with Client(gateway.address) as client:
        stream = client.chat([("user", "x")])
        assert (stream.request_id, stream.finish_reason, stream.usage) == ("", "", None)
        assert await stream.result() == "Hi there"
    assert stream.request_id == "the-id"
    assert stream.reasoning == "Let me see."
    assert [(each.id, each.name, each.arguments) for each in stream.tool_calls] == [
        ("a", "f", '{"x":1}'),
        ("b", "g", "{}"),
    ]
    assert stream.finish_reason == "tool_calls"
    assert stream.choice(0).stop_reason == "!"
    assert [each.text for each in stream.choices] == ["Hi there", "you"]
    assert stream.usage is not None
    assert stream.usage.prompt_tokens == 3
    message = stream.message()
    assert (message.role, message.content, len(message.tool_calls)) == ("assistant", "Hi there", 2)


async def test_pieces_of_text_and_json(gateway: Gateway) -> None:
    async with Client(gateway.address) as client:
        assert [piece async for piece in client.chat([("user", "x")]).texts()] == ["Hel", "lo"]
        gateway.scripts = [[accepted(), delta('{"a":'), delta(" 1}"), finished()]]
        assert await client.chat([("user", "x")]).json() == {"a": 1}
        gateway.scripts = [[accepted(), delta('{"a":'), finished()]]
        with pytest.raises(ValueError, match="Expecting"):
            await client.chat([("user", "x")]).json()
        gateway.scripts = [[accepted(), delta("A"), failed(WorkerLost("gone"))]]
        with pytest.raises(WorkerLost):
            assert [piece async for piece in client.chat([("user", "x")]).texts()] == ["A"]


@pytest.mark.parametrize("error", [Unavailable("no"), WorkerLost("no"), Overloaded("no", retry_after=0.001)])
async def test_what_nobody_could_serve_is_asked_again(gateway: Gateway, error: KvmeshError) -> None:
    gateway.scripts = [[error], [error], ANSWER]
    async with Client(gateway.address, retry=FAST) as client:
        assert await client.chat([("user", "x")]).result() == "Hello"
        assert len(gateway.requests) == 3
        gateway.scripts = [[error], [error], ANSWER]
        assert len(await client.models()) == 2


async def test_the_deadline_is_that_of_all_attempts() -> None:
    attempts = Attempts(FAST, 100.0)
    first = attempts.timeout()
    await attempts.after(Overloaded("wait", retry_after=0.05))
    second = attempts.timeout()
    assert first is not None
    assert second is not None
    assert second <= first - 0.05
    assert Attempts(FAST, None).timeout() is None
    with pytest.raises(DeadlineExceeded):
        Attempts(FAST, 0.0).timeout()


@pytest.mark.parametrize("error", [InvalidArgument("no"), TooLarge("no"), DeadlineExceeded("no"), Cancelled("no")])
async def test_what_is_wrong_is_asked_once(gateway: Gateway, error: KvmeshError) -> None:
    gateway.scripts = [[error], ANSWER]
    async with Client(gateway.address, retry=FAST) as client:
        with pytest.raises(type(error)):
            await client.chat([("user", "x")]).result()
        gateway.scripts = [[error], ANSWER]
        with pytest.raises(type(error)):
            await client.models()
    assert len(gateway.requests) == 2


async def test_attempts_are_counted(gateway: Gateway) -> None:
    gateway.scripts = [[Unavailable("still away")]]
    async with Client(gateway.address, retry=FAST) as client:
        with pytest.raises(Unavailable, match="still away"):
            await client.chat([("user", "x")]).result()
        assert len(gateway.requests) == FAST.attempts
    async with Client(gateway.address, retry=NO_RETRY) as client:
        with pytest.raises(Unavailable):
            await client.chat([("user", "x")]).result()
    assert len(gateway.requests) == FAST.attempts + 1


async def test_a_pause_that_does_not_fit_is_not_waited_for(gateway: Gateway) -> None:
    gateway.scripts = [[Overloaded("come back later", retry_after=3000.0)]]
    async with Client(gateway.address) as client:
        with pytest.raises(Overloaded) as raised:
            await asyncio.wait_for(client.chat([("user", "x")], timeout_s=100.0).result(), 60)
    assert raised.value.retry_after == pytest.approx(3000.0)
    assert len(gateway.requests) == 1


def test_pauses_grow_are_drawn_and_keep_to_what_the_gateway_says() -> None:
    retry = Retry(attempts=9, pause_s=0.1, max_pause_s=1.0)
    for failures, most in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (900, 1.0)):
        drawn = [retry.pause(failures, Unavailable("x")) for _ in range(200)]
        assert 0 <= min(drawn) < max(drawn) <= most
    assert 7.0 <= retry.pause(1, Overloaded("x", retry_after=7.0)) <= 7.1
    with pytest.raises(ValueError, match="attempts"):
        Retry(attempts=0)


async def test_an_id_that_the_dead_call_still_holds_is_waited_for() -> None:
    attempts = Attempts(FAST, 10.0)
    with pytest.raises(AlreadyExists):
        await Attempts(FAST, 10.0).after(AlreadyExists("r runs"))
    await attempts.after(Unavailable("x"))
    await attempts.after(AlreadyExists("r runs"))


async def test_a_broken_answer_is_never_asked_again_by_itself(gateway: Gateway) -> None:
    gateway.scripts = [[accepted(), delta("A"), failed(WorkerLost("gone"))], ANSWER]
    async with Client(gateway.address, retry=FAST) as client:
        with pytest.raises(WorkerLost):
            await client.chat([("user", "x")]).result()
        gateway.scripts = [[accepted(), delta("A"), Unavailable("broken")], ANSWER]
        with pytest.raises(Unavailable):
            await client.chat([("user", "x")]).result()
    assert len(gateway.requests) == 2


async def test_it_begins_anew_where_that_was_asked_for(gateway: Gateway) -> None:
    gateway.scripts = [
        [accepted("1"), delta("A"), failed(WorkerLost("gone"))],
        [accepted("2"), delta("B"), Unavailable("broken")],
        ANSWER,
    ]
    async with Client(gateway.address, retry=FAST) as client:
        stream = client.chat([("user", "x")], restart=True)
        kinds = [event.WhichOneof("event") async for event in stream]
        assert kinds == ["accepted", "delta"] * 2 + ["accepted", "delta", "delta", "finished"]
        assert (stream.text, stream.restarts, stream.error) == ("Hello", 2, None)
        gateway.scripts = [[accepted(), delta("A"), failed(InvalidArgument("no"))]]
        with pytest.raises(InvalidArgument):
            await client.chat([("user", "x")], restart=True).result()


async def test_a_gateway_that_restarts_is_found_again(gateway: Gateway) -> None:
    """The connection's end is no attempt: even a client that never retries gets over it."""
    async with Client(gateway.address, retry=NO_RETRY) as client:
        assert await client.chat([("user", "x")]).result() == "Hello"
        assert gateway.server is not None
        await gateway.server.stop(None)
        await gateway.start(gateway.address)
        await client.wait_ready(30)
        assert await client.chat([("user", "x")]).result() == "Hello"


async def test_a_connection_that_ends_under_a_call_is_made_anew_once(gateway: Gateway) -> None:
    second = Gateway()

    async def vanish() -> None:
        assert gateway.server is not None
        # From another task: this one is ended by it.
        task = asyncio.create_task(gateway.server.stop(None))
        gateway.stopping = task  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    await second.start()
    gateway.scripts = [[vanish]]
    try:
        async with Client([gateway.address, second.address], retry=FAST) as client:
            # Round robin over both: one of two calls meets the gateway that goes away.
            for _ in range(2):
                assert await client.chat([("user", "x")]).result() == "Hello"
    finally:
        assert second.server is not None
        await second.server.stop(None)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_call_that_crosses_a_goodbye_is_made_again(gateway: Gateway, code: grpc.StatusCode) -> None:
    async with Client(gateway.address, retry=NO_RETRY) as client:
        for ask in (lambda: client.chat([("user", "x")]).result(), client.models):
            gateway.scripts = [[code], ANSWER]
            assert await ask()
            gateway.scripts = [[code], [code], ANSWER]
            with pytest.raises(Unavailable):
                await ask()
        # What a service says is its answer, and what was accepted is not asked again.
        for script in ([Cancelled("aborted")], [accepted(), code]):
            gateway.scripts = [script, ANSWER]
            with pytest.raises(KvmeshError):
                await client.chat([("user", "x")]).result()


async def test_the_deadline_holds(gateway: Gateway) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    gateway.scripts = [[forever]]
    async with Client(gateway.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.chat([("user", "x")], timeout_s=0.1).result()
        with pytest.raises(DeadlineExceeded):
            await client.embed("x", model="vectors", timeout_s=0.1)
        with pytest.raises(DeadlineExceeded):
            await client.chat([("user", "x")], timeout_s=0).result()


async def test_leaving_ends_the_call(gateway: Gateway) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    gateway.scripts = [[accepted(), forever]]
    async with Client(gateway.address) as client:
        async with client.chat([("user", "x")]) as stream:
            await anext(stream)
        await asyncio.wait_for(gateway.ended.wait(), 30)
        gateway.ended.clear()
        # So does being cancelled, and that stays a cancellation.
        task = asyncio.create_task(client.chat([("user", "x")]).result())
        while len(gateway.requests) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gateway.ended.wait(), 30)


async def test_a_closed_client_says_so(gateway: Gateway) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    gateway.scripts = [[accepted(), forever]]
    client = Client(gateway.address)
    stream = client.chat([("user", "x")])
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(KvmeshError):
        await waiting
    with pytest.raises(Cancelled, match="closed"):
        await client.chat([("user", "x")]).result()
    with pytest.raises(Cancelled, match="closed"):
        await client.models()


async def test_errors_come_by_their_reason(gateway: Gateway) -> None:
    gateway.scripts = [[Overloaded("no room", retry_after=2.0, details={"limit": "tokens"})]]
    async with Client(gateway.address, retry=NO_RETRY) as client:
        with pytest.raises(Overloaded) as raised:
            await client.chat([("user", "x")]).result()
    assert (raised.value.message, raised.value.details) == ("no room", {"limit": "tokens"})
    assert isinstance(raised.value.__cause__, grpc.aio.AioRpcError)


async def test_a_span_ends_with_its_error(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[str] = []
    monkeypatch.setattr(tracing, "mark_failed", lambda span, reason: marked.append(reason))
    gateway.scripts = [[InvalidArgument("no")]]
    async with Client(gateway.address) as client:
        with pytest.raises(InvalidArgument):
            await client.chat([("user", "x")]).result()
    assert marked == ["INVALID_ARGUMENT"]


async def test_another_task_may_close_a_stream(gateway: Gateway) -> None:
    """As the button beside an answer does. The reader is told, and the call ends."""

    async def forever() -> None:
        await asyncio.Event().wait()

    gateway.scripts = [[accepted(), delta("A"), forever]]
    async with Client(gateway.address) as client:
        stream = client.chat([("user", "x")])
        shown = asyncio.Event()

        async def read() -> None:
            async for event in stream:
                if event.HasField("delta"):
                    shown.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(shown.wait(), 30)
        await stream.aclose()
        with pytest.raises(Cancelled, match="the stream"):
            await asyncio.wait_for(reading, 30)
        await asyncio.wait_for(gateway.ended.wait(), 30)
        assert stream.text == "A"
        # One that was closed before it was read asks nothing.
        unread = client.chat([("user", "x")])
        await unread.aclose()
        assert [event async for event in unread] == []
    assert len(gateway.requests) == 1
