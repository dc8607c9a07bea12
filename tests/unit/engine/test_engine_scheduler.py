"""What a step is made of: order, budget, chunks, admission, growth, preemption, forks, ends."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.engine.admission import EngineConfig
from kvmesh.engine.core import EngineRequest, FinishReason, Mode, RequestKey
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import EOS, ScriptedModel, scripted_output
from kvmesh.errors import DeadlineExceeded, InvalidArgument, Overloaded, TooLarge
from tests.unit.engine.world import BASES, World, error_of

TINY = {"layers": 2, "kv_heads": 1, "head_dim": 8}


def shapes(world: World) -> list[list[tuple[int, int]]]:
    """(sequence id, tokens) of every slice of every step."""
    return [[(part.seq_id, len(part.token_ids)) for part in batch.slices] for batch in world.batches]


# -- order and budget


def test_decode_rows_come_first_and_chunks_fill_the_budget() -> None:
    world = World(num_pages=60, token_budget=6, chunk_size=5, max_batch=4)
    world.submit(length=4, max_tokens=20)
    world.step()
    world.submit(length=14, base=1, max_tokens=20)
    world.submit(length=7, base=2, max_tokens=20)
    world.batches.clear()
    for _ in range(5):
        world.step()
    assert shapes(world) == [
        [(1, 1), (2, 5)],
        [(1, 1), (2, 5)],
        [(1, 1), (2, 4), (3, 1)],
        [(1, 1), (2, 1), (3, 4)],
        [(1, 1), (2, 1), (3, 2)],
    ]
    world.finish()


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("page_size", [1, 4])
def test_chunking_does_not_change_the_answer(chunk: int, page_size: int) -> None:
    world = World(num_pages=200 // page_size, page_size=page_size, chunk_size=chunk, token_budget=64)
    for mode in (Mode.LOCAL, Mode.PREFILL_ONLY, Mode.LOCAL):
        world.submit(mode, length=21)
        world.submit(mode, length=29)
    world.finish()
    assert all(error_of(track) is None for track in world.tracks.values())


def test_higher_priority_then_earlier_arrival() -> None:
    world = World(max_batch=1, num_pages=60)
    first = world.submit(length=5, priority=0)
    low = world.submit(length=5, priority=-1)
    early = world.submit(length=5, priority=2)
    late = world.submit(length=5, priority=2)
    ends = []
    while world.step():
        ends += [key for key in world.tracks if world.tracks[key].over and key not in ends]
    assert ends == [early, late, first, low]


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    """A large request that waits for pages is not starved by small ones behind it."""
    world = World(num_pages=10, page_size=4, max_model_len=40, max_batch=4, max_queue=8)
    world.submit(length=14, max_tokens=6)
    big = world.submit(length=30, base=1, max_tokens=4)
    small = world.submit(length=3, base=2, max_tokens=2)
    world.step()
    assert not world.tracks[big].admitted
    assert not world.tracks[small].admitted
    world.finish()
    assert error_of(world.tracks[big]) is None


def test_admission_takes_the_whole_need_or_nothing() -> None:
    """Prompt, look-ahead and what the forks will not share; two loads cannot hold half each."""
    world = World(num_pages=11, page_size=4, look_ahead=1, prefix_cache=False, max_model_len=40)
    key = world.submit(length=14, n=3, max_tokens=8)
    world.step()
    # 4 pages of prompt + 1 ahead; each fork takes 2: a copy of the partial page and one ahead.
    assert world.core.pool.counts().owned == 5 + 2 * 2
    assert len(world.tracks[key].admitted[0].pages) == 5
    other = world.submit(length=8, max_tokens=2)
    world.step()
    assert not world.tracks[other].admitted
    assert world.core.pool.counts().owned == 9
    world.finish()


def test_forks_share_whole_pages_and_copy_the_partial_one() -> None:
    world = World(page_size=4, look_ahead=0, num_pages=40)
    key = world.submit(length=10, n=3, max_tokens=12)
    pool = world.core.pool
    copied: list[tuple[int, int]] = []
    while True:
        ran = world.step()
        if not ran:
            break
        batch = world.batches[-1]
        copied += batch.copies
        choices = {c.seq_id: c for c in world.core.scheduler.running}
        for part in batch.slices:
            for position in range(part.start, part.start + len(part.token_ids)):
                page = int(part.block_table[position // 4])
                if part.seq_id in choices and part.start >= 10:
                    assert pool.refcount(page) <= 1 + (world.core.cache is not None), "a shared page was written"
    assert len(copied) == 2
    assert len({src for src, _ in copied}) == 1
    tables = [np.array(p.block_table) for b in world.batches for p in b.slices if p.start == 12]
    assert len(tables) == 3
    assert all((table[:2] == tables[0][:2]).all() for table in tables), "whole pages are shared"
    assert len({int(table[2]) for table in tables}) == 3, "the partial page is everyone's own"
    assert len({tuple(o) for o in world.tracks[key].outputs.values()}) > 1
    world.check_end()


def test_fork_copy_survives_the_root_that_ends_with_its_first_token() -> None:
    """The root ends at once by its stop token; a new request must not get the copy's source before the copy."""
    params = SamplingParams(max_tokens=8, seed=11)
    prompt = list(BASES[0][:10])
    firsts = [scripted_output(prompt, params, choice)[0][0] for choice in range(3)]
    assert firsts[0] not in firsts[1:]
    world = World(page_size=4, num_pages=8, look_ahead=0, prefix_cache=False, max_model_len=32)
    world.submit(length=10, n=3, seed=11, max_tokens=8, stop_token_ids=frozenset({firsts[0]}))
    world.step()
    other = world.submit(Mode.REMOTE, base=1, length=13)
    world.core._handle_inbox()
    batch = world.core.scheduler.schedule()
    assert batch is not None
    assert len(batch.copies) == 2
    sources = {src for src, _ in batch.copies}
    world.core._flush()
    for admitted in world.tracks[other].admitted:
        assert not sources & set(admitted.pages)
    world.core._steps.run(batch)
    world.finish()


# -- growth and preemption


def test_lowest_priority_newest_is_preempted_and_nothing_comes_twice() -> None:
    world = World(num_pages=12, page_size=4, max_model_len=48, max_batch=4, look_ahead=0)
    keep = world.submit(length=8, max_tokens=30, priority=1)
    older = world.submit(length=8, base=1, max_tokens=30)
    newer = world.submit(length=8, base=2, max_tokens=30)
    preempted: list[RequestKey] = []
    while world.step():
        for choice in world.core.scheduler.queue:
            if choice.request.key not in preempted:
                preempted.append(choice.request.key)
    assert preempted[0] == newer
    assert keep not in preempted
    assert world.core.counters.preemptions >= 1
    usage = world.tracks[newer].ends[0].usage
    assert usage.preemptions >= 1
    assert usage.completion_tokens == 30
    assert error_of(world.tracks[older]) is None
    world.check_end()


def test_recompute_keeps_what_the_prefix_cache_holds() -> None:
    world = World(num_pages=16, page_size=4, max_model_len=60, look_ahead=0)
    world.submit(length=8, max_tokens=40)
    key = world.submit(length=8, base=1, max_tokens=10)
    while not world.core.scheduler.queue and world.step():
        pass
    if not world.core.scheduler.queue:
        for choice in world.core.scheduler.running:
            if choice.request.key == key:
                world.core.scheduler.preempt(choice)
                break
    world.run()
    assert world.tracks[key].over
    world.check_end()


def test_preempted_then_resumed_skips_cached_blocks() -> None:
    world = World(num_pages=20, page_size=4, max_model_len=60)
    key = world.submit(length=16, max_tokens=20)
    for _ in range(7):
        world.step()
    choice = world.core.scheduler.requests[key].root
    assert choice.computed == 22
    world.core.scheduler.preempt(choice)
    world.batches.clear()
    world.step()
    (part,) = world.batches[0].slices
    assert part.start == 20, "five whole blocks were kept, generated tokens included"
    assert part.samples[0].position == 23
    assert len(part.samples[0].output_token_ids) >= 7
    world.finish()


def test_remote_request_of_one_choice_fetches_again_when_told_to() -> None:
    world = World(num_pages=20, page_size=4, remote_resume=True, prefix_cache=False)
    key = world.submit(Mode.REMOTE, length=17, max_tokens=12)
    world.step()
    assert world.expose(key)
    world.deliver(key)
    for _ in range(4):
        world.step()
    root = world.core.scheduler.requests[key].root
    output = list(root.output)
    world.core.scheduler.preempt(root)
    world.step()
    again = world.tracks[key].admitted[1]
    assert again.awaiting
    assert again.resumed_token_ids == (*BASES[0][:17], *output)
    assert again.num_tokens == 17 + len(output)
    assert world.expose(key)
    world.deliver(key)
    world.run()
    assert error_of(world.tracks[key]) is None
    assert world.core.counters.prefill_tokens == 2, "one token after each arrival"
    world.check_end()


def test_a_lone_sequence_that_fills_the_pool_ends_with_length() -> None:
    world = World(num_pages=3, page_size=4, max_model_len=100)
    key = world.submit(length=6, max_tokens=50)
    world.run()
    track = world.tracks[key]
    assert track.finished == {0: FinishReason.LENGTH}
    assert len(track.outputs[0]) == 12 - 6
    world.check_end()


# -- refusals


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"length": 30}, TooLarge),  # context
        ({"length": 20}, TooLarge),  # context: no room for a token
        ({"length": 19}, None),
        ({"length": 18, "n": 4}, TooLarge),  # pages of the forks
        ({"length": 4, "n": 5}, InvalidArgument),  # more choices than the batch
        ({"length": 4, "max_tokens": 0}, InvalidArgument),
        ({"mode": Mode.REMOTE, "length": 4, "prompt_logprobs": 1}, InvalidArgument),
        ({"mode": Mode.PREFILL_ONLY, "length": 20}, None),
        ({"mode": Mode.PREFILL_ONLY, "length": 21}, TooLarge),
        ({"length": 4, "tail": 2, "n": 2}, InvalidArgument),
    ],
)
def test_what_can_never_run_is_refused_at_once_by_name(kwargs: dict, error: type | None) -> None:
    world = World(num_pages=6, page_size=4, max_model_len=20, max_batch=4, token_budget=8)
    key = world.submit(**kwargs)
    if error is None:
        world.core.check(world.tracks[key].request)
        world.step()
        assert world.tracks[key].admitted
    else:
        with pytest.raises(error):
            world.core.check(world.tracks[key].request)
        world.core.step_once()
        assert type(error_of(world.tracks[key])) is error
    world.finish()


@pytest.mark.parametrize("tokens", [[], [1, 512], [1, -1]])
def test_token_ids_are_checked(tokens: list[int]) -> None:
    world = World()
    request = EngineRequest(RequestKey("x"), tokens, len(tokens))
    with pytest.raises(InvalidArgument):
        world.core.check(request)


def test_queue_is_bounded_beyond_what_the_batch_takes() -> None:
    world = World(max_batch=2, max_queue=3, num_pages=60)
    keys = [world.submit(length=5) for _ in range(6)]
    assert world.core.load().waiting == 6
    with pytest.raises(Overloaded) as caught:
        world.core.check(world.tracks[keys[0]].request)
    assert caught.value.retry_after is not None
    world.step()
    refused = [key for key in keys if world.tracks[key].over]
    assert refused == keys[5:]
    error = error_of(world.tracks[refused[0]])
    assert isinstance(error, Overloaded)
    assert error.retry_after is not None
    world.finish()


def test_config_is_checked() -> None:
    with pytest.raises(InvalidArgument):
        EngineConfig(max_model_len=10, max_batch=8, token_budget=7)
    with pytest.raises(InvalidArgument):
        EngineConfig(max_model_len=10, chunk_size=0)


# -- deadlines


def test_first_token_deadline_ends_a_queued_request() -> None:
    world = World(max_batch=1, num_pages=60)
    world.submit(length=5, max_tokens=50, ttft=1.0)
    queued = world.submit(length=5, ttft=5.0)
    world.step()
    world.step()
    world.clock.now += 6
    world.step()
    assert isinstance(error_of(world.tracks[queued]), DeadlineExceeded)
    assert len(world.keys("live")) == 1, "the first one had its token in time"
    world.finish()


def test_total_deadline_ends_a_running_request() -> None:
    world = World()
    key = world.submit(length=5, max_tokens=50, total=5.0)
    for _ in range(4):
        world.step()
    world.clock.now += 5
    world.step()
    assert isinstance(error_of(world.tracks[key]), DeadlineExceeded)
    world.check_end()


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    world = World(num_pages=40)
    for _ in range(600):
        key = world.submit(length=3, max_tokens=1, ttft=1e6, total=1e6)
        world.run()
        del world.tracks[key]
    assert len(world.core._deadlines) < 200


# -- ends of choices


def test_stop_token_is_reported_and_ends_the_choice() -> None:
    prompt = list(BASES[0][:9])
    output = scripted_output(prompt, SamplingParams(max_tokens=8, seed=1))[0]
    world = World()
    key = world.submit(length=9, seed=1, stop_token_ids=frozenset({output[3]}))
    events = []
    world.core._on_events = lambda batch: (events.extend(batch), world._on_events(batch))
    world.run()
    last = next(event for event in events if getattr(event, "finish_reason", None))
    assert last.stop_token_id == output[3]
    assert last.token_ids == (output[3],)
    assert last.finish_reason is FinishReason.STOP
    assert world.tracks[key].outputs[0] == output[: output.index(output[3]) + 1]


@pytest.mark.parametrize(("ignore", "min_tokens", "length"), [(False, 0, 3), (False, 5, 6), (True, 0, 8)])
def test_eos(ignore: bool, min_tokens: int, length: int) -> None:
    world = World(model=ScriptedModel(eos_after=2, **TINY))
    key = world.submit(length=9, ignore_eos=ignore, min_tokens=min_tokens)
    world.run()
    track = world.tracks[key]
    assert len(track.outputs[0]) == length
    assert (track.outputs[0][-1] == EOS) or ignore
    world.check_end()


def test_cumulative_logprob_without_asking_for_logprobs() -> None:
    world = World()
    events = []
    world.submit(length=9, n=2, cumulative=True)
    world.submit(length=9, n=2, cumulative=True, want_logprobs=True, logprobs=2)
    world.core._on_events = lambda batch: (events.extend(batch), world._on_events(batch))
    world.run()
    tokens = [event for event in events if hasattr(event, "finish_reason")]
    quiet = [event for event in tokens if event.key.request_id == "r1"]
    assert all(not event.logprobs for event in quiet)
    assert sum(event.cumulative_logprob is not None for event in quiet) == 2
    for choice in range(2):
        loud = [event for event in tokens if event.key.request_id == "r2" and event.choice == choice]
        total = sum(p.logprob for event in loud for p in event.logprobs)
        assert loud[-1].cumulative_logprob == pytest.approx(total)
        assert all(len(p.top) == 2 for event in loud for p in event.logprobs)


# -- healed requests


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.REMOTE])
@pytest.mark.parametrize("tail", [1, 3, 7])
def test_healed_request_goes_on_where_it_stopped(mode: Mode, tail: int) -> None:
    world = World()
    key = world.submit(mode, length=9, tail=tail, min_tokens=6, max_tokens=12)
    world.step()
    if mode is Mode.REMOTE:
        assert world.tracks[key].admitted[0].num_tokens == 9 + tail
        assert world.expose(key)
        world.deliver(key)
    world.run()
    inputs = [sample for batch in world.batches for part in batch.slices for sample in part.samples]
    assert inputs[0].position == 9 + tail
    assert list(inputs[0].prompt_token_ids) == list(BASES[0][:9])
    assert [bool(s.banned_token_ids) for s in inputs] == [tail + i < 6 for i in range(len(inputs))]
    assert len(world.tracks[key].outputs[0]) == 12 - tail
    world.check_end()


def test_healed_request_that_was_complete_ends_at_once() -> None:
    world = World()
    key = world.submit(length=9, tail=8, max_tokens=8)
    assert not world.step()
    assert world.tracks[key].finished == {0: FinishReason.LENGTH}
    assert error_of(world.tracks[key]) is None
    prompt = list(BASES[0][:9])
    output = scripted_output(prompt, SamplingParams(max_tokens=8, seed=5))[0]
    stopped = world.submit(length=9, tail=4, seed=5, stop_token_ids=frozenset({output[3]} - set(output[:3])))
    assert not world.step()
    assert world.tracks[stopped].finished == {0: FinishReason.STOP}


def test_first_choice_enters_the_noise() -> None:
    world = World(num_pages=60)
    both = world.submit(length=9, n=2, seed=3)
    second = world.submit(length=9, first_choice=1, seed=3)
    world.run()
    assert world.tracks[second].outputs[1] == world.tracks[both].outputs[1]
    assert world.tracks[both].outputs[0] != world.tracks[both].outputs[1]


# -- prompt logprobs


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize("length", [1, 2, 12, 13])
def test_prompt_scores_are_stitched(chunk: int, length: int) -> None:
    world = World(chunk_size=chunk, token_budget=64)
    world.submit(length=length)
    world.run()
    key = world.submit(length=length, prompt_logprobs=3, n=2)
    world.run()
    (scored,) = world.tracks[key].scored
    assert [s.token_id for s in scored.logprobs] == list(BASES[0][1:length])
    assert all(len(s.top) == 3 for s in scored.logprobs)
    assert world.tracks[key].ends[0].usage.cached_tokens == 0, "a hit would leave tokens without a score"
    world.check_end()


# -- prefix cache


def test_prefix_hit_covers_at_most_all_but_the_last_token() -> None:
    world = World(page_size=4, num_pages=60)
    world.submit(length=16, max_tokens=1)
    world.run()
    local = world.submit(length=16)
    remote = world.submit(Mode.REMOTE, length=16)
    only = world.submit(Mode.PREFILL_ONLY, length=16)
    world.step()
    assert world.tracks[local].admitted[0].cached_tokens == 12
    assert world.tracks[remote].admitted[0].cached_tokens == 12
    assert world.tracks[only].admitted[0].cached_tokens == 16
    world.start_prefill(only)
    world.step()
    (computed,) = world.tracks[only].computed
    assert computed.chunks == 0
    world.finish()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    world = World(page_size=4, num_pages=60)
    key = world.submit(length=8, max_tokens=9)
    world.run()
    prompt = [*BASES[0][:8], *world.tracks[key].outputs[0]]
    request = EngineRequest(
        RequestKey("next"), prompt, len(prompt), SamplingParams(max_tokens=2), seed_bytes=b"seed", arrival=0.0
    )
    other = EngineRequest(
        RequestKey("salted"), prompt, len(prompt), SamplingParams(max_tokens=2), seed_bytes=b"other", arrival=0.0
    )
    cached = {}
    world.core._on_events = lambda events: cached.update(
        {e.key.request_id: e.cached_tokens for e in events if hasattr(e, "cached_tokens")}
    )
    world.core.submit(request)
    world.core.submit(other)
    world.run()
    assert cached == {"next": 16, "salted": 0}


def test_received_blocks_enter_the_cache() -> None:
    world = World(page_size=4, num_pages=60)
    first = world.submit(Mode.REMOTE, length=18)
    world.step()
    assert world.tracks[first].admitted[0].cached_tokens == 0
    assert world.expose(first)
    world.deliver(first)
    world.step()
    second = world.submit(Mode.REMOTE, length=18, local_remainder=1)
    world.step()
    admitted = world.tracks[second].admitted[0]
    assert admitted.cached_tokens == 16
    assert not admitted.awaiting, "one token is missing: computed here without asking"
    world.finish()


def test_a_blocked_head_is_not_hashed_again_every_step() -> None:
    world = World(num_pages=16, page_size=4, max_model_len=60, look_ahead=0)
    world.submit(length=8, max_tokens=40)
    world.step()
    big = world.submit(length=55, base=1, max_tokens=4)
    tries = []
    reserve = world.core.cache.reserve
    world.core.cache.reserve = lambda *args: tries.append(1) or reserve(*args)
    for _ in range(30):
        world.step()
    assert not world.tracks[big].admitted
    assert len(tries) <= 2
    world.finish()
    assert error_of(world.tracks[big]) is None
