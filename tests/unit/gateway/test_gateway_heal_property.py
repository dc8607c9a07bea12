"""Whatever is lost, wherever: what comes out is what an undisturbed run gives, and every attempt is let go of."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_fakes import EOS, MODEL
from kvmesh.errors import Overloaded, TransferFailed, Unavailable, WorkerLost
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.limits import RequestLimits
from services.gateway.breaker import Breaker
from services.gateway.decision import Placed
from services.gateway.generation import Generation
from services.gateway.heals import Heals
from services.gateway.inbox import Inbox
from services.gateway.job import Job, Progress, Share
from services.gateway.output import Output
from services.gateway.sink import RequestSettings
from services.gateway.tokenizers import ModelTokenizer

TOKENIZER = ModelTokenizer(scripted_tokenizer())
PROMPT = [1, 2, 3]
LOSSES = (WorkerLost("lost"), Unavailable("stopping"), TransferFailed("no pages"), Overloaded("preempted"))


@dataclass
class Fate:
    """What becomes of one submission: tokens of all its choices until it is lost, how, and how it sends them."""

    tokens: int
    loss: int
    chunk: int
    overlap: int
    refusals: int


fates = st.builds(
    Fate,
    tokens=st.integers(0, 12),
    loss=st.integers(0, len(LOSSES)),
    chunk=st.integers(1, 4),
    overlap=st.integers(0, 3),
    refusals=st.integers(0, 1),
)


@dataclass
class Worker:
    """A placer and the link to a worker that says `outputs[choice]`, with the fates that are left."""

    outputs: list[list[int]]
    fates: deque[Fate]
    submitted: list[Share] = field(default_factory=list)
    open: set[Any] = field(default_factory=set)
    inboxes: dict[Any, Inbox] = field(default_factory=dict)
    ended_choices: set[Any] = field(default_factory=set)
    info: Any = field(default_factory=lambda: SimpleNamespace(worker_id="w", revision="r", incarnation=1))

    breaker: Breaker = field(default_factory=Breaker)

    # --- a link
    def release(self, key: Any, *, abort: bool) -> None:
        self.open.discard(key)

    def abort(self, key: Any, choices: Any = ()) -> None:
        self.ended_choices.update((key, choice) for choice in choices)

    # --- a placer
    async def place(
        self, job: Job, progress: Progress, share: Share, make_inbox: Callable[[], Inbox], **_: Any
    ) -> Placed:
        await asyncio.sleep(0)
        fate = self.fates.popleft() if self.fates else None
        if fate is not None and fate.refusals and share.heal and share.failures < 2:
            share.failures += 1
            raise Unavailable("refused")
        self.submitted.append(share)
        key = (job.inner_id, progress.attempt)
        progress.attempt += 1
        progress.submits += 1
        inbox = self.inboxes[key] = make_inbox()
        self.open.add(key)
        asyncio.get_running_loop().call_soon(self._speak, key, inbox, share, fate)
        return Placed(self, key, inbox, MODEL, "r", 0, share)  # type: ignore[arg-type]

    def serves(self, *_: Any) -> bool:
        return True

    def _speak(self, key: Any, inbox: Inbox, share: Share, fate: Fate | None) -> None:
        """Everything at once, or a chunk a turn of the loop."""
        ends = [0 for _ in self.outputs]
        steps: deque[engine_pb2.SequenceDelta] = deque()
        chunk = fate.chunk if fate is not None else 3
        for choice in range(share.first_choice, share.first_choice + share.choices):
            ids = self.outputs[choice]
            assert ids[: len(share.output)] == list(share.output), "output that the client was not shown"
            ends[choice] = len(ids) if fate is None else min(len(ids), len(share.output) + fate.tokens)
        for start in range(0, max(map(len, self.outputs)), chunk):
            for choice in range(share.first_choice, share.first_choice + share.choices):
                ids, first = self.outputs[choice], len(share.output) + start
                part = ids[first : min(first + chunk, ends[choice])]
                if not part:
                    continue
                back = min(fate.overlap if fate is not None else 0, first)
                delta = engine_pb2.SequenceDelta(
                    choice=choice, first_position=first - back, token_ids=ids[first - back : first] + part
                )
                if first + len(part) == len(ids):
                    delta.finish_reason = pb.FINISH_REASON_LENGTH
                    if part[-1] == EOS:
                        delta.finish_reason, delta.stop_token_id = pb.FINISH_REASON_STOP, EOS
                delta.logprobs.extend(
                    pb.TokenLogprob(token_id=token, logprob=-token / 300) for token in delta.token_ids
                )
                steps.append(delta)
        asyncio.get_running_loop().call_soon(self._step, key, inbox, share, fate, steps)

    def _step(self, key: Any, inbox: Inbox, share: Share, fate: Fate | None, steps: deque[Any]) -> None:
        if key not in self.open:
            return
        if steps:
            delta = steps.popleft()
            if (key, delta.choice) not in self.ended_choices:
                inbox.delta(delta)
            asyncio.get_running_loop().call_soon(self._step, key, inbox, share, fate, steps)
        elif fate is None:
            self.open.discard(key)
            inbox.end(engine_pb2.RequestEnd(finished=engine_pb2.WorkerFinished()))
        elif fate.loss < len(LOSSES):
            self.open.discard(key)
            loss = LOSSES[fate.loss]
            inbox.fail(type(loss)(loss.message))
        else:
            # Tokens are left out.
            last = share.first_choice + share.choices - 1
            inbox.delta(engine_pb2.SequenceDelta(choice=last, first_position=900, token_ids=[65]))


class Client:
    """A sink that takes its time now and then."""

    def __init__(self, choices: int) -> None:
        self.deltas: list[list[pb.Delta]] = [[] for _ in range(choices)]
        self.accepts = 0

    async def waiting(self) -> None:
        """Nothing to do."""

    async def accepted(self, event: pb.Accepted) -> None:
        self.accepts += 1

    async def prompt(self, event: pb.PromptScored) -> None:
        raise AssertionError("nobody asked")

    async def delta(self, event: pb.Delta) -> None:
        self.deltas[event.choice].append(event)
        if sum(map(len, self.deltas)) % 3 == 0:
            await asyncio.sleep(0)


def undisturbed(sampling: pb.SamplingParams, outputs: list[list[int]]) -> list[pb.Delta]:
    """One delta a choice: what a run without any loss gives."""
    output = Output(sampling, TOKENIZER)
    joined = []
    for choice, ids in enumerate(outputs):
        given = engine_pb2.SequenceDelta(choice=choice, token_ids=ids, finish_reason=pb.FINISH_REASON_LENGTH)
        given.logprobs.extend(pb.TokenLogprob(token_id=t, logprob=-t / 300) for t in ids)
        if ids[-1] == EOS:
            given.finish_reason, given.stop_token_id = pb.FINISH_REASON_STOP, EOS
        delta, _ = output.feed(given)
        if delta is not None:
            joined.append(delta)
    return output.best() if output.buffered else joined


texts = st.text(alphabet="abSTé🎉", min_size=1, max_size=10)


@settings(max_examples=2000 if os.environ.get("KVMESH_SOAK") else 60)
@given(
    said=st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=3),
    dropped=st.integers(0, 2),
    stops=st.sampled_from([[], ["ST"], ["é", "bS"]]),
    min_tokens=st.integers(0, 5),
    logprobs=st.booleans(),
    happens=st.lists(fates, max_size=12),
)
def test_any_losses(
    said: list[tuple[str, bool]],
    dropped: int,
    stops: list[str],
    min_tokens: int,
    logprobs: bool,
    happens: list[Fate],
) -> None:
    outputs = [[*text.encode(), EOS] if ends else list(text.encode()) for text, ends in said]
    n = max(1, len(said) - dropped)
    sampling = pb.SamplingParams(
        n=n, best_of=len(said), max_tokens=50, seed=1, stop=stops, min_tokens=min_tokens, temperature=1
    )
    if logprobs:
        sampling.logprobs = 0
    job = Job(
        tenant="local",
        request_id="r",
        inner_id="inner",
        model=MODEL,
        served=MODEL,
        fingerprint="",
        tokenizer=TOKENIZER,
        token_ids=PROMPT,
        sampling=sampling,
        drawn_seed=False,
        limits=RequestLimits.start(60_000, 60_000),
        cache=pb.CACHE_MODE_OFF,
    )
    expected = undisturbed(sampling, outputs)

    async def run() -> None:
        worker, client = Worker(outputs, deque(happens)), Client(n)
        generation = Generation(
            job,
            # A loss is bounded by progress; here all of them are to be survived.
            RequestSettings(max_attempts=100),
            client,
            placer=worker,  # type: ignore[arg-type]
            routers=SimpleNamespace(),  # type: ignore[arg-type]
            heals=Heals(jitter_s=0.0),
        )
        async with asyncio.timeout(60):
            end = await generation.run()
        assert client.accepts == 1
        for mine, whole in zip(client.deltas, expected, strict=True):
            assert "".join(delta.text for delta in mine) == whole.text
            assert [token for delta in mine for token in delta.token_ids] == list(whole.token_ids)
            shown = [entry.token_id for delta in mine for entry in delta.logprobs]
            assert shown == (list(whole.token_ids) if logprobs else [])
            assert [delta.finish_reason for delta in mine if delta.finish_reason] == [whole.finish_reason]
            assert mine[-1].stop_reason == whole.stop_reason
        assert end.usage.completion_tokens == sum(len(whole.token_ids) for whole in expected)
        assert not worker.open
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "place"]

    asyncio.run(run())
