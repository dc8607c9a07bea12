"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from client_kit import ANSWER, Gateway, accepted, delta, finished
from kvmesh.client import Retry, SyncClient
from kvmesh.errors import Cancelled, Unavailable
from kvmesh.proto.v1 import inference_pb2 as pb


async def forever() -> None:
    await asyncio.Event().wait()


async def test_it_does_what_the_other_does(gateway: Gateway) -> None:
    call = pb.ToolCallDelta(index=0, id="a", name="f", arguments="{}")
    gateway.scripts = [
        [accepted(), delta("Hi", reasoning="Hm"), delta(tool_calls=[call]), delta(finish_reason=1), finished()]
    ]

    def use() -> None:
        with SyncClient(gateway.address, api_key="kvm-x") as client:
            stream = client.chat([("user", "x")])
            assert (stream.accepted, stream.usage, stream.ttft_s) == (None, None, None)
            assert list(stream.texts()) == ["Hi"]
            assert (stream.text, stream.reasoning, stream.finish_reason, stream.request_id) == ("Hi", "Hm", "stop", "r")
            assert stream.tool_calls[0].name == "f"
            assert stream.usage is not None
            assert stream.ttft_s is not None
            assert stream.message().role == "assistant"
            assert len(stream.choices) == 1
            stream.raise_for_error()
            assert client.embed("a") == [[1.0, 0.0]]
            assert list(client.tokenize("a").token_ids) == [1, 2]
            assert client.model("m").name == "m"
            assert client.models()[0].name == "m"
            assert client.abort("r")
            client.wait_ready(30)
            assert "kvm-x" not in repr(client)

    await asyncio.to_thread(use)


async def test_many_threads_share_it(gateway: Gateway) -> None:
    def use() -> list[str]:
        with SyncClient(gateway.address) as client, ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda number: client.generate(f"{number}").result(), range(64)))

    assert await asyncio.to_thread(use) == ["Hello"] * 64
    assert len({request.text for request in gateway.requests}) == 64


async def test_closing_ends_the_calls_of_other_threads(gateway: Gateway) -> None:
    gateway.scripts = [[accepted(), forever]]
    loop, reached = asyncio.get_running_loop(), asyncio.Event()
    client = await asyncio.to_thread(SyncClient, gateway.address)

    def wait() -> None:
        stream = client.chat([("user", "x")])
        next(stream)
        loop.call_soon_threadsafe(reached.set)
        for _ in stream:
            pass

    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    await asyncio.wait_for(reached.wait(), 30)
    await asyncio.to_thread(client.close)
    with pytest.raises((Cancelled, Unavailable)):
        await waiting
    await asyncio.to_thread(client.close)
    with pytest.raises(Cancelled):
        client.models()
    with pytest.raises(Cancelled):
        client.chat([("user", "x")]).result()


async def test_another_thread_may_close_a_stream(gateway: Gateway) -> None:
    gateway.scripts = [[accepted(), forever]]
    loop, reached = asyncio.get_running_loop(), asyncio.Event()
    client = await asyncio.to_thread(SyncClient, gateway.address)
    stream = client.chat([("user", "x")])

    def wait() -> None:
        next(stream)
        loop.call_soon_threadsafe(reached.set)
        next(stream)

    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    await asyncio.wait_for(reached.wait(), 30)
    events: Any = stream.stream._events
    async with asyncio.timeout(30):
        # Between two reads there would be nobody to be told.
        while not events.ag_running:
            await asyncio.sleep(0.001)
    await asyncio.to_thread(stream.close)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(waiting, 30)
    await asyncio.wait_for(gateway.ended.wait(), 30)
    await asyncio.to_thread(client.close)


async def test_a_call_that_closing_overtakes_does_not_hang(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the client's state and the loop, another thread closes it: that loop runs no more."""
    client = await asyncio.to_thread(SyncClient, gateway.address)
    schedule = asyncio.run_coroutine_threadsafe

    def late(coro: Any, loop: asyncio.AbstractEventLoop) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", schedule)
        client.close()
        # Stopped, but not yet closed.
        monkeypatch.setattr(loop, "_check_closed", lambda: None)
        monkeypatch.setattr(loop, "_write_to_self", lambda: None)
        return schedule(coro, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(asyncio.to_thread(client.models), 30)


async def test_a_client_that_is_dropped_leaves_no_thread(gateway: Gateway) -> None:
    def use() -> None:
        client = SyncClient(gateway.address)
        client.models()
        del client
        gc.collect()
        assert not [thread for thread in threading.enumerate() if thread.name == "kvmesh-client"]

    await asyncio.to_thread(use)


PROGRAM = """
import sys
from kvmesh.client import SyncClient
client = SyncClient(sys.argv[1])
try:
    for event in client.chat([("user", "x")]):
        if event.HasField("delta"):
            print(event.delta.text, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(client.models()[0].name, flush=True)
"""


async def test_ctrl_c_ends_the_answer_and_the_program_ends_by_itself(gateway: Gateway) -> None:
    gateway.scripts = [[accepted(), delta("first"), forever], []]
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, gateway.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    async with asyncio.timeout(60):
        assert await program.stdout.readline() == b"first\n"
        program.send_signal(signal.SIGINT)
        await gateway.ended.wait()
        out, err = await program.communicate()
    assert (out, err, program.returncode) == (b"interrupted\nm\n", b"", 0)


async def test_a_retry_can_be_interrupted(gateway: Gateway) -> None:
    """The pause between attempts is as good as a call: closing ends it."""
    gateway.scripts = [[Unavailable("no")], ANSWER]
    client = await asyncio.to_thread(lambda: SyncClient(gateway.address, retry=Retry(3, 500.0, 1000.0)))
    waiting = asyncio.ensure_future(asyncio.to_thread(client.generate("x").result))
    while not gateway.requests:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(client.close)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(waiting, 60)
