"""A worker is lost in the middle: the client sees one stream, and every token once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import pytest

from gateway_fakes import EOS, FakeWorker, Log
from gateway_world import World, kinds, next_event, rest, text_of
from kvmesh.errors import InvalidArgument, KvmeshError, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.telemetry import metrics, names

TEXT = "héal🎉ed!"
Submit = engine_pb2.SubmitRequest


async def hold(request: Any) -> None:
    """Accept and send nothing."""


def ids_of(text: str) -> list[int]:
    """The whole output that stands for a text: its bytes and the end token."""
    return [*text.encode(), EOS]


def scored(token: int) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token, logprob=-token / 100, rank=1)


def play(
    worker: FakeWorker,
    texts: Mapping[int, str] | str = TEXT,
    *,
    until: int | None = None,
    then: Callable[[Submit], None] | None = None,
) -> Callable[[Submit], Awaitable[None]]:
    """A model that says `texts[choice]`, from where a submission is, up to output index `until`; `then` is its fate."""

    async def on_submit(request: Submit) -> None:
        first = len(request.token_ids) - request.prompt_len
        assert not first or request.sampling.best_of == 1
        for choice in range(request.first_choice, request.first_choice + request.sampling.best_of):
            ids = ids_of(texts if isinstance(texts, str) else texts[choice])
            assert list(request.token_ids[request.prompt_len :]) == ids[:first]
            for position in range(first, len(ids) if until is None else min(until, len(ids))):
                fields: dict[str, Any] = {}
                if ids[position] == EOS:
                    fields = {"finish_reason": pb.FINISH_REASON_STOP, "stop_token_id": EOS}
                if request.sampling.HasField("logprobs"):
                    fields["logprobs"] = [scored(ids[position])]
                worker.tokens(request, [ids[position]], position, choice, **fields)
        if then is not None:
            then(request)
        elif until is None:
            worker.end(request, completion_tokens=1)

    return on_submit


def dies(worker: FakeWorker) -> Callable[[Submit], None]:
    return lambda request: worker.break_stream()


def deltas(events: list[pb.GenerateEvent], choice: int = 0) -> list[pb.Delta]:
    return [event.delta for event in events if event.HasField("delta") and event.delta.choice == choice]


def tokens_of(events: list[pb.GenerateEvent], choice: int = 0) -> list[int]:
    return [token for delta in deltas(events, choice) for token in delta.token_ids]


async def connected(world: World, count: int = 2) -> None:
    await world.until(lambda: len(world.gateway.fleet.links()) == count)


@pytest.fixture
def pair(world: World) -> Any:
    """Two workers, the router prefers the first one; and the gateway."""

    async def start(**settings: Any) -> tuple[FakeWorker, FakeWorker]:
        role = settings.pop("role", engine_pb2.WORKER_ROLE_DECODE)
        first, second = await world.worker("first", role=role), await world.worker("second", role=role)
        await world.router()
        await world.start(**settings)
        await connected(world)
        return first, second

    return start


async def test_lost_at_every_token(world: World, pair: Any) -> None:
    first, second = await pair(max_attempts=2)
    router = world.routers[0]
    second.on_submit = play(second)
    whole = ids_of(TEXT)

    async def some(request: Submit) -> None:
        await play(first, until=request.sampling.max_tokens - 100)(request)

    first.on_submit = some
    heals = metrics.value(names.GATEWAY_HEALS, outcome="ok")

    async def one(lost_at: int) -> list[pb.GenerateEvent]:
        """What a client gets whose worker has sent so many tokens when it is lost."""
        sampling = {"min_tokens": 2, "max_tokens": 100 + lost_at, "frequency_penalty": 0.5, "seed": lost_at}
        call = world.chat(sampling=sampling)
        events = [await next_event(call)]
        while len(tokens_of(events)) < lost_at:
            events.append(await next_event(call))
        ready.add(lost_at)
        return events + await rest(call)

    ready = Log()
    asking = [asyncio.create_task(one(lost_at)) for lost_at in range(len(whole))]
    await ready.wait(len(whole))
    first.break_stream()
    for lost_at, events in enumerate(await asyncio.gather(*asking)):
        assert kinds(events) == ["accepted", "delta", "finished"]
        assert text_of(events) == TEXT
        assert tokens_of(events) == whole
        finished = events[-1].finished
        assert finished.usage.completion_tokens == len(whole)
        assert finished.served.decode_worker == "second"
        assert (finished.served.retries, finished.served.heals) == (1, lost_at > 0)
    old = {request.sampling.seed: request for request in first.submits.items}
    new = {request.sampling.seed: request for request in second.submits.items}
    routes = {request.request_id: request for request in router.routes.items}
    reports = {report.request_id: report for report in await router.reports.wait(len(whole))}
    assert len(old) == len(new) == len(reports) == len(whole)
    for lost_at, again in new.items():
        assert list(again.token_ids) == list(old[lost_at].token_ids) + whole[:lost_at]
        assert (again.attempt, again.prompt_len, again.first_choice) == (1, len(old[lost_at].token_ids), 0)
        assert again.sampling == old[lost_at].sampling
        assert again.priority > old[lost_at].priority
        route = routes[again.request_id]
        assert list(route.exclude_workers) == ["first"]
        assert (route.no_flight, route.cache) == (True, pb.CACHE_MODE_OFF)
        assert route.pinned_revision == "rev-1"
        report = reports[again.request_id]
        assert report.answer.choices[0].text == TEXT
        assert report.decision_id == f"decision-{again.request_id}"
        (failure,) = report.failures
        assert (failure.worker_id, failure.incarnation) == ("first", first.info.incarnation)
        assert failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert metrics.value(names.GATEWAY_HEALS, outcome="ok") == heals + len(whole)
    await world.until(world.idle)


async def first_tokens(call: Any, text: str, choice: int = 0) -> list[pb.GenerateEvent]:
    """Read until a choice's text is there."""
    events: list[pb.GenerateEvent] = []
    while text_of(events, choice) != text:
        events.append(await next_event(call))
    return events


async def test_choices_are_healed_each_for_itself(world: World, pair: Any) -> None:
    first, second = await pair()
    texts = {0: "zero", 1: "one", 2: "two"}
    first.on_submit = hold
    second.on_submit = play(second, texts)
    call = world.chat(sampling={"n": 3, "stop": ["!"]})
    (old,) = await first.submits.wait()
    first.tokens(old, list(b"ze"), choice=0)
    first.tokens(old, ids_of("one"), choice=1, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=EOS)
    events = await first_tokens(call, "one", 1)
    if text_of(events, 0) != "ze":
        events += await first_tokens(call, "ze")
    first.break_stream()
    events += await rest(call)
    assert [text_of(events, choice) for choice in range(3)] == ["zero", "one", "two"]
    assert [tokens_of(events, choice) for choice in range(3)] == [ids_of(text) for text in texts.values()]
    assert all(len([d for d in deltas(events, choice) if d.finish_reason]) == 1 for choice in range(3))
    again = sorted(second.submits.items, key=lambda request: request.first_choice)
    assert [(r.first_choice, r.sampling.n, r.sampling.best_of) for r in again] == [(0, 1, 1), (2, 1, 1)]
    assert sorted(request.attempt for request in again) == [1, 2]
    assert [len(request.token_ids) - request.prompt_len for request in again] == [2, 0]
    assert events[-1].finished.usage.completion_tokens == sum(len(ids_of(text)) for text in texts.values())
    assert events[-1].finished.served.heals == 2


async def test_best_of_weighs_tokens_of_all_attempts(world: World, pair: Any) -> None:
    first, second = await pair()
    texts = {0: "dddd", 1: "aaaa", 2: "cc"}
    first.on_submit = play(first, texts, until=2)
    second.on_submit = play(second, texts)
    call = world.chat(sampling={"n": 1, "best_of": 3, "stop": ["cc"]})
    await next_event(call)
    await first.aborts.wait()  # Choice 2 met its stop string: so much has been taken.
    first.break_stream()
    events = await rest(call)
    assert sorted(request.first_choice for request in second.submits.items) == [0, 1]
    assert all(request.sampling.HasField("logprobs") for request in second.submits.items)
    # Means: of d -1.11, of a -1.09 with the end token's, of c -.99.
    assert text_of(events) == ""
    assert deltas(events)[-1].stop_reason == "cc"
    assert not any(delta.logprobs for delta in deltas(events))
    assert len(deltas(events)) == 1


async def test_log_probabilities_come_once(world: World, pair: Any) -> None:
    first, second = await pair(role=engine_pb2.WORKER_ROLE_UNIFIED)
    second.on_submit = play(second)

    async def score_and_speak(request: Submit) -> None:
        scores = engine_pb2.PromptLogprobs(
            request_id=request.request_id, attempt=request.attempt, logprobs=[scored(7), scored(8)]
        )
        first.frame(request, prompts=[scores])
        await play(first, until=4)(request)

    first.on_submit = score_and_speak
    call = world.chat(sampling={"logprobs": 0, "prompt_logprobs": 0})
    events = await first_tokens(call, "héa")
    first.break_stream()
    events += await rest(call)
    assert kinds(events) == ["accepted", "prompt", "delta", "finished"]
    assert text_of(events) == TEXT
    whole = ids_of(TEXT)
    assert [entry.token_id for delta in deltas(events) for entry in delta.logprobs] == whole
    (again,) = second.submits.items
    assert not again.sampling.HasField("prompt_logprobs")
    assert again.sampling.HasField("logprobs")


@pytest.mark.parametrize("lost_at", range(1, 7))
async def test_a_stop_string_over_the_loss(world: World, pair: Any, lost_at: int) -> None:
    first, second = await pair()
    first.on_submit = play(first, "abcENDxyz", until=lost_at, then=dies(first))
    second.on_submit = play(second, "abcENDxyz")
    events = await world.ask(sampling={"stop": ["END"]})
    assert text_of(events) == "abc"
    assert bytes(tokens_of(events)) == b"abcEND"
    assert deltas(events)[-1].stop_reason == "END"


async def test_two_losses_and_one_while_placing(world: World) -> None:
    workers = [await world.worker(f"w{index}") for index in range(4)]
    await world.router()
    await world.start()
    await connected(world, 4)
    a, b, c, d = workers
    a.on_submit = play(a, until=3)

    async def dies_in_submit(request: Submit) -> None:
        b.break_stream()
        raise Unavailable("stopping")

    b.on_submit = dies_in_submit
    c.on_submit = play(c, until=6)
    d.on_submit = play(d)
    call = world.chat()
    events = await first_tokens(call, "hé")
    a.break_stream()
    events += await first_tokens(call, "al")
    c.break_stream()
    events += await rest(call)
    assert text_of(events) == TEXT
    assert tokens_of(events) == ids_of(TEXT)
    assert [len(worker.submits.items) for worker in workers] == [1, 1, 1, 1]
    assert d.submits.items[0].attempt == 3
    assert events[-1].finished.served.heals == 2
    (report,) = await world.routers[0].reports.wait()
    assert [failure.worker_id for failure in report.failures] == ["w0", "w1", "w2"]


async def test_attempts_without_progress_are_bounded(world: World) -> None:
    workers = [await world.worker(f"w{index}") for index in range(5)]
    await world.router()
    await world.start(max_attempts=3)
    await connected(world, 5)

    def fails(worker: FakeWorker) -> Callable[[Submit], None]:
        return lambda request: worker.end(request, Unavailable("no"))

    workers[0].on_submit = play(workers[0], until=2)
    for worker in workers[1:]:
        worker.on_submit = play(worker, until=2, then=fails(worker))
    call = world.chat()
    events = await first_tokens(call, "h")
    workers[0].break_stream()
    events += await rest(call)
    assert kinds(events) == ["accepted", "delta", "error"]
    assert events[-1].error.retryable
    # The loss that came after progress counts as the first.
    assert sum(len(worker.submits.items) for worker in workers) == 3
    assert events[-1].error.usage.completion_tokens == 2


async def test_progress_begins_the_count_anew(world: World) -> None:
    workers = [await world.worker(f"w{index}") for index in range(5)]
    await world.router()
    await world.start(max_attempts=2)
    await connected(world, 5)
    for index, worker in enumerate(workers[:-1]):
        worker.on_submit = play(worker, until=index + 1)
    workers[-1].on_submit = play(workers[-1])
    call = world.chat()
    events: list[pb.GenerateEvent] = [await next_event(call)]
    for index, worker in enumerate(workers[:-1]):
        while len(tokens_of(events)) <= index:
            events.append(await next_event(call))
        worker.break_stream()
    events += await rest(call)
    assert text_of(events) == TEXT
    assert events[-1].finished.served.heals == 4


async def test_a_worker_that_comes_again_goes_on_itself(world: World) -> None:
    worker = await world.worker("only")
    worker.on_submit = play(worker, until=4)
    router = await world.router()
    await world.start()
    call = world.chat()
    events = await first_tokens(call, "héa")
    # Its process is gone; the next one has its name and another incarnation.
    await worker.stop()
    again = await world.worker("only")
    again.on_submit = play(again)
    router.workers = [again]
    router.tell()
    events += await rest(call)
    assert text_of(events) == TEXT
    assert list(router.routes.items[-1].exclude_workers) == []


async def test_with_nobody_else_the_same_worker_goes_on(world: World) -> None:
    worker = await world.worker("only")
    worker.on_submit = play(worker, until=4)
    await world.start(static=True)
    call = world.chat()
    events = await first_tokens(call, "héa")
    worker.on_submit = play(worker)
    worker.break_stream()
    events += await rest(call)
    assert text_of(events) == TEXT


async def test_when_nobody_comes_the_loss_is_told(world: World) -> None:
    worker = await world.worker("only")
    worker.on_submit = play(worker, until=4)
    await world.start(static=True, heal_wait_s=0.2)
    call = world.chat()
    events = await first_tokens(call, "héa")
    failed = metrics.value(names.GATEWAY_HEALS, outcome="failed")
    await worker.stop()
    events = await rest(call)
    assert kinds(events) == ["error"]
    assert (events[0].error.reason, events[0].error.retryable) == ("WORKER_LOST", True)
    assert metrics.value(names.GATEWAY_HEALS, outcome="failed") == failed + 1
    await world.until(world.idle)


async def test_the_revision_that_was_told_answers_even_before_any_output(world: World) -> None:
    first = await world.worker("first")
    other = await world.worker("other", revision="rev-2")
    second = await world.worker("second")
    router = await world.router()
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 3)
    first.on_submit = hold
    other.on_submit = play(other, "wrong")
    second.on_submit = play(second)
    call = world.chat()
    assert (await next_event(call)).accepted.revision == "rev-1"
    first.break_stream()
    assert text_of(await rest(call)) == TEXT
    assert not other.submits.items
    assert router.routes.items[1].pinned_revision == "rev-1"


async def test_sixteen_choices_outlive_five_workers(world: World) -> None:
    rounds, choices = 5, 16
    workers = [await world.worker(f"w{number}", max_batch=64) for number in range(rounds + 1)]
    router = await world.router()
    await world.start()
    for number, worker in enumerate(workers[:rounds]):
        worker.on_submit = play(worker, until=number + 1)
    workers[-1].on_submit = play(workers[-1])
    call = world.chat(sampling={"n": choices, "temperature": 1.0, "seed": 3})
    reading = asyncio.create_task(rest(call))
    for number, worker in enumerate(workers[:rounds]):
        await worker.submits.wait(choices if number else 1)
        (generation,) = [request._running for _, request in world.gateway.registry._running.items()]
        have = choices * (number + 1)
        await world.until(lambda have=have, made=generation: made.usage.completion_tokens >= have)
        worker.break_stream()
    events = await reading
    assert [text_of(events, choice) for choice in range(choices)] == [TEXT] * choices
    # Breakers hear of each once, not sixteen times.
    (report,) = await router.reports.wait()
    assert [failure.worker_id for failure in report.failures] == [worker.info.worker_id for worker in workers[:rounds]]


async def test_another_revision_never_goes_on(world: World) -> None:
    first = await world.worker("first")
    other = await world.worker("other", revision="rev-2")
    router = await world.router([first])
    await world.start(heal_wait_s=30.0)
    first.on_submit = play(first, until=4)
    call = world.chat()
    events = await first_tokens(call, "héa")
    router.workers = [other]
    router.tell()
    await world.until(lambda: [link.info.worker_id for link in world.gateway.fleet.links()] == ["other"])
    first.break_stream()
    await router.routes.wait(2)
    second = await world.worker("second")
    second.on_submit = play(second)
    router.workers = [other, second]
    router.tell()
    events += await rest(call)
    assert text_of(events) == TEXT
    assert not other.submits.items


async def test_an_overlap_is_left_out_and_a_gap_is_healed(world: World, pair: Any) -> None:
    first, second = await pair()
    first.on_submit = hold
    second.on_submit = play(second, "abcdef")
    call = world.chat(sampling={"logprobs": 0})
    (request,) = await first.submits.wait()
    first.tokens(request, list(b"ab"), logprobs=[scored(token) for token in b"ab"])
    first.tokens(request, list(b"bc"), 1, logprobs=[scored(token) for token in b"bc"])
    first.tokens(request, list(b"a"), 0, logprobs=[scored(token) for token in b"a"])
    events = await first_tokens(call, "abc")
    first.tokens(request, list(b"e"), 4, logprobs=[scored(token) for token in b"e"])
    events += await rest(call)
    assert text_of(events) == "abcdef"
    assert tokens_of(events) == ids_of("abcdef")
    assert [entry.token_id for delta in deltas(events) for entry in delta.logprobs] == ids_of("abcdef")
    assert (await first.aborts.wait())[0].attempt == 0


@pytest.mark.parametrize("error", [InvalidArgument("sampling: no"), Unavailable("no")])
async def test_a_heal_that_nobody_takes_ends_in_the_loss(world: World, pair: Any, error: KvmeshError) -> None:
    first, second = await pair(max_attempts=2)
    first.on_submit = play(first, until=4)
    second.refuse = error
    call = world.chat()
    events = await first_tokens(call, "héa")
    first.break_stream()
    events = await rest(call)
    assert kinds(events) == ["error"]
    assert events[0].error.reason == "WORKER_LOST" or isinstance(error, Unavailable)
    assert events[0].error.retryable


@pytest.mark.parametrize("how", ["client leaves", "aborted", "deadline"])
async def test_ended_during_the_heal(world: World, pair: Any, how: str) -> None:
    first, second = await pair()
    first.on_submit = play(first, until=4)
    never = asyncio.Event()

    async def stuck(request: Submit) -> None:
        await never.wait()

    second.on_submit = stuck
    limits = pb.Limits(ttft_ms=1000, total_ms=3000 if how == "deadline" else 60_000)
    call = world.chat(request_id="mine", limits=limits)
    await first_tokens(call, "héa")
    first.break_stream()
    (request,) = await second.submits.wait()
    # The first token is long out: the limit on it does not apply again.
    assert request.ttft_ms == request.total_ms
    if how == "client leaves":
        call.cancel()
    else:
        if how == "aborted":
            assert (await world.stub.Abort(pb.AbortRequest(request_id="mine"))).found
        (event,) = await rest(call)
        code = grpc.StatusCode.CANCELLED if how == "aborted" else grpc.StatusCode.DEADLINE_EXCEEDED
        assert event.error.code == code.value[0]
    (abort,) = await second.aborts.wait()
    assert (abort.request_id, abort.attempt) == (request.request_id, 1)
    never.set()
    await world.until(world.idle)


async def test_a_heal_goes_before_what_waits(world: World, pair: Any) -> None:
    first, second = await pair()
    first.on_submit = play(first, until=4)
    call = world.chat("healed")
    events = await first_tokens(call, "héa")
    first.fill()
    second.fill()
    waiting = [world.chat(f"waiting {index}") for index in range(3)]
    await world.until(lambda: len(world.gateway.queue) == 3)
    first.break_stream()
    await world.until(lambda: len(world.gateway.queue) == 4)
    second.submits.items.clear()
    second.on_submit = play(second)
    second.empty()
    events += await rest(call)
    assert text_of(events) == TEXT
    assert second.submits.items[0].attempt > 0
    first.on_submit = play(first)
    first.empty()
    for other in waiting:
        assert text_of(await rest(other)) == TEXT


async def test_a_dead_workers_streams_do_not_come_all_at_once(world: World, pair: Any) -> None:
    first, second = await pair()
    second.info.max_batch = 1000
    first.on_submit = play(first, until=2)
    calls = [world.chat(str(index)) for index in range(100)]
    for call in calls:
        await first_tokens(call, "h")
    now, most = 0, 0
    speak = play(second)

    async def counting(request: Submit) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        await speak(request)

    second.on_submit = counting
    first.break_stream()
    for call in calls:
        assert "h" + text_of(await rest(call)) == TEXT
    assert 0 < most <= 16
    await world.until(world.idle)


async def test_an_answer_that_was_healed_is_not_from_the_cache(world: World, pair: Any) -> None:
    """A router that answers or names a flight for what is half out is not believed."""
    first, second = await pair()
    router = world.routers[0]
    first.on_submit = play(first, until=4)
    second.on_submit = play(second)

    async def confused(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        if not request.pinned_revision:
            return router.placement(request)
        answer = router_pb2.CachedAnswer(kind="exact", choices=[router_pb2.CachedChoice(text="other")])
        return router_pb2.RouteResponse(answer=answer, model="scripted", decision_id="x")

    router.decide = confused
    call = world.chat()
    events = await first_tokens(call, "héa")
    first.break_stream()
    events += await rest(call)
    assert text_of(events) == TEXT


async def test_a_worker_that_has_no_room_after_all_is_no_failure(world: World, pair: Any) -> None:
    first, second = await pair(max_attempts=2)
    first.on_submit = play(first, until=4)
    speak, turned_away = play(second), 0

    async def full_at_first(request: Submit) -> None:
        nonlocal turned_away
        if turned_away < 6:
            turned_away += 1
            second.end(request, Overloaded("the engine's queue is full"))
        else:
            await speak(request)

    second.on_submit = full_at_first
    call = world.chat()
    events = await first_tokens(call, "héa")
    first.break_stream()
    events += await rest(call)
    assert text_of(events) == TEXT
    assert turned_away == 6
    (report,) = await world.routers[0].reports.wait()
    assert [failure.worker_id for failure in report.failures] == ["first"]
