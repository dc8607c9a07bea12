"""Iteration-level scheduling: which tokens of which sequences the next step computes, and what became of them.

`schedule()` and `postprocess()` are apart; between them the runner works and nothing here changes, unless it is driven
one step ahead (see flights.py): then whatever needs no step may change, but nothing is preempted. Order in a step:
sequences with one token to compute first (decode rows, growing page by page, preempting where there is no page), then
admission, then prompt chunks with what is left of the token budget. All by rank: priority, arrival, sequence id.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from kvmesh.engine.admission import EngineConfig, Limits
from kvmesh.engine.events import (
    Admitted,
    CoreEvent,
    Counters,
    Ended,
    EngineRequest,
    FinishReason,
    LoadSnapshot,
    Mode,
    PrefillComputed,
    PromptScored,
    RequestKey,
    Tokens,
)
from kvmesh.engine.ledger import ExposureLedger
from kvmesh.engine.runner import Slice, SliceResult, StepBatch, StepResult, TokenLogprobs
from kvmesh.engine.seqpages import SequencePages
from kvmesh.engine.sequence import IN_BATCH, QUEUED, WITH_SERVICE, Choice, Planned, Rank, Request, SeqState
from kvmesh.errors import DataLoss, Internal, KvmeshError
from kvmesh.grammar.masks import MaskThread

_DECODE, _PREFILL = SeqState.DECODE, SeqState.PREFILL
# With the service, and to join the batch later.
_PARKED = tuple(state for state in WITH_SERVICE if state is not SeqState.HELD)


def _rank(choice: Choice) -> Rank:
    return choice.rank


class Scheduler:
    """Owns every request and its pages. Events gather in `events`; the core takes them. One thread only."""

    def __init__(
        self,
        pages: SequencePages,
        config: EngineConfig,
        limits: Limits,
        eos: frozenset[int],
        counters: Counters,
        clock: Callable[[], float],
        ledger: ExposureLedger,
    ) -> None:
        self.pages = pages
        self.config = config
        self.limits = limits
        self.counters = counters
        self.clock = clock
        self.ledger = ledger
        self.events: list[CoreEvent] = []
        self.requests: dict[RequestKey, Request] = {}
        # Ended, but pages still named in a descriptor or read by the sidecar.
        self.lingering: dict[RequestKey, Request] = {}
        self.queue: list[Choice] = []
        self.running: list[Choice] = []
        self.plan: list[Planned] = []
        self._eos = eos
        self._next_seq_id = 1
        self._step = 0
        # Live requests with a grammar, and who computes their masks.
        self._constrained = 0
        self._masks = MaskThread()
        # Fork's sequence id → the copy of its partial page that the next step makes.
        self.copies: dict[int, tuple[Choice, int, int]] = {}

    # -- requests come and go

    def add(self, options: EngineRequest) -> Request:
        """Queue a request that `Limits.check` passed."""
        request = Request(options, self._next_seq_id, self.limits.limit_len(options), self._eos, self.clock())
        self._next_seq_id += len(request.seqs)
        self.requests[options.key] = request
        self._constrained += options.grammar is not None
        self.counters.prompt_tokens += len(request.prompt)
        reason = self._already_complete(request)
        if reason is not None:
            root = request.root
            ends = request.stops | (root.match.eos if root.match is not None else frozenset())
            stop = root.output[-1] if reason is FinishReason.STOP and root.output[-1] in ends else None
            self.events.append(
                Tokens(request.key, root.choice, len(root.output), (), finish_reason=reason, stop_token_id=stop)
            )
            self.end(request)
        else:
            insort(self.queue, request.root, key=_rank)
        return request

    def end(self, request: Request, error: KvmeshError | None = None) -> None:
        """The one terminal of a request; choices that still live end with it."""
        if request.ended:
            return
        request.ended = True
        self._constrained -= request.options.grammar is not None
        for choice in request.seqs:
            self.end_choice(choice, keep=not isinstance(error, (Internal, DataLoss)))
        del self.requests[request.key]
        if request.root.state in (SeqState.ENDED_DRAINING, SeqState.ENDED_HELD) or request.live_generations:
            self.lingering[request.key] = request
        if error is None:
            self.counters.requests_ok += 1
        else:
            self.counters.requests_failed += 1
        self.events.append(Ended(request.key, request.usage(self.clock()), error))

    def end_choice(self, choice: Choice, *, keep: bool) -> None:
        """End one choice from whatever state it is in, silently. keep: its computed blocks may enter the cache."""
        state = choice.state
        request = choice.request
        if not choice.live:
            return
        if state is SeqState.AWAITING_KV or state is SeqState.EXPOSED or state is SeqState.DRAINING:
            self.sync_exposure(choice, self.ledger.close(request.key))
            state = choice.state
        if state in QUEUED:
            self._unqueue(choice)
        elif state in IN_BATCH:
            self.running.remove(choice)
        if state is SeqState.EXPOSED or state is SeqState.DRAINING:
            assert choice.generation is not None
            self.pages.pool.drain(choice.seq_id, choice.generation)
            self.pages.free(choice)
            choice.move(SeqState.ENDED_DRAINING)
        elif request.options.mode is Mode.PREFILL_ONLY and state is not SeqState.WAITING:
            for generation in request.live_generations:
                self.pages.pool.drain(choice.seq_id, generation)
            choice.move(SeqState.ENDED_HELD)
        else:
            if keep and state in IN_BATCH:
                self.pages.store(choice)
            self._cancel_copy(choice)
            self.pages.free(choice)
            choice.move(SeqState.ENDED)

    def abort_choices(self, request: Request, numbers: frozenset[int]) -> None:
        """End single choices without an event; the request ends well when none is left."""
        request.root.refusal = None  # it needs less from now on
        for choice in request.seqs:
            if choice.choice not in numbers or not choice.live:
                continue
            if choice is request.root and not request.forked:
                choice.muted = True
            else:
                self.end_choice(choice, keep=True)
        if all(choice.muted or not choice.live for choice in request.seqs):
            self.end(request)

    def sync_exposure(self, choice: Choice, granted: int | None) -> None:
        """Catch up with what the ledger says: `granted` is the generation that is out now, or None."""
        pool, request = self.pages.pool, choice.request
        current = choice.generation
        if current == granted:
            return
        if current is not None:
            pool.settle(choice.seq_id, current)
            request.live_generations.discard(current)
            choice.generation = None
            choice.move(SeqState.AWAITING_KV)
        if granted is not None:
            upto = self.pages.pages_for(choice.total_len - 1)
            pool.expose(choice.seq_id, granted, choice.pages[choice.first_block : upto], for_write=True)
            request.live_generations.add(granted)
            choice.generation = granted
            choice.move(SeqState.EXPOSED)

    # -- one step

    def schedule(self) -> StepBatch | None:
        """The next step, or None when nothing can be computed until something happens."""
        self.plan = []
        slices: list[Slice] = []
        preemptions = self.counters.preemptions
        budget = self.config.token_budget - self._plan_rows(slices)
        if self.queue and self.counters.preemptions == preemptions:
            budget -= self.admit(slices)
        self.plan_chunks(slices, budget)
        if not self.plan and self.queue:
            # Whoever had a page less than it needed gave all of its pages back: the head may fit now.
            self.plan_chunks(slices, budget - self.admit(slices))
        if not self.plan:
            return None
        return self.batch(slices)

    def batch(self, slices: list[Slice]) -> StepBatch:
        """The next step, of these slices; the masks that it needs are begun with."""
        self._step += 1
        if self._constrained:
            wanted = [p.match for planned in self.plan for p in planned.samplers if p.match is not None]
            if wanted:
                self._masks.fill(wanted)
        return StepBatch(self._step, slices, [(src, dst) for _, src, dst in self.copies.values()])

    def postprocess(self, result: StepResult, elapsed_s: float = 0.0) -> None:
        """Take in what the step computed. Raises Internal if the result does not fit the batch, changing nothing."""
        _check_result(self.plan, result)
        self._end_copies()
        now = self.clock()
        decoded = 0
        for (choice, num_tokens, samplers), answer in zip(self.plan, result.slices, strict=True):
            if choice.state is _DECODE:
                choice.computed += num_tokens
                decoded += 1
                self._take_token(choice, answer, 0, now)
                continue
            if not choice.live:
                continue  # it ended after the step was scheduled
            choice.computed += num_tokens
            choice.request.compute_s += elapsed_s
            self._after_chunk(choice, num_tokens, samplers, answer, now)
        self.counters.decode_tokens += decoded
        self.plan = []

    def fail_step(self, error: KvmeshError, seq_ids: frozenset[int] | None = None) -> None:
        """The step failed, or these sequences of it: their requests end with `error`.

        With seq_ids, the plan keeps the others' slices in order, for `postprocess` of a result without the failed; and
        the KV that they failed on leaves the prefix cache, or every request with that prefix would fail like them.
        """
        failed = [p.choice for p in self.plan if seq_ids is None or p.choice.seq_id in seq_ids]
        if seq_ids is None:
            failed += [choice for choice, _, _ in self.copies.values()]
            self.plan = []
        else:
            self.plan = [p for p in self.plan if p.choice.seq_id not in seq_ids]
            self.pages.forget(failed)
        for choice in failed:
            if choice.live:  # else the step was launched before it ended, and nobody wants its row
                self.end(choice.request, error)
        if seq_ids is None:
            self._end_copies()

    def drop_from_plan(self, batch: StepBatch, requests: Sequence[Request]) -> StepBatch | None:
        """Take slices of requests that ended after `schedule` out of the step; None when nothing is left."""
        gone = {choice.seq_id for request in requests for choice in request.seqs}
        self.plan = [planned for planned in self.plan if planned.choice.seq_id not in gone]
        if not self.plan:
            return None
        return StepBatch(batch.step, [s for s in batch.slices if s.seq_id not in gone], batch.copies)

    # -- rows of one token

    def _plan_rows(self, slices: list[Slice]) -> int:
        """Plan every sequence with exactly one token to compute; returns how many."""
        running, plan, page_size = self.running, self.plan, self.pages.page_size
        tokens = np.empty(len(running), np.int32)
        rows = index = 0
        while index < len(running):
            choice = running[index]
            if choice.state is not _DECODE:
                if choice.tokens.size - choice.computed == 1:
                    self.plan_slice(choice, 1, slices)
                    rows += 1
                index += 1
                continue
            computed = choice.computed
            if computed == choice.num_pages * page_size and not self._grow(choice):
                continue  # it preempted itself: running[index] is the next one
            tokens[rows] = choice.output[-1]
            slices.append(
                Slice(
                    choice.seq_id,
                    tokens[rows : rows + 1],
                    computed,
                    choice.table,
                    (choice.sample_input(),),
                )
            )
            plan.append(choice.row)
            rows += 1
            index += 1
        return rows

    def _grow(self, choice: Choice) -> bool:
        """One more page, preempting the lowest rank until there is one. False: it had to preempt itself."""
        while not self.pages.grow(choice):
            victim = next(c for c in reversed(self.running) if c.request.options.mode is not Mode.PREFILL_ONLY)
            self.preempt(victim)
            if victim is choice:
                return False
        return True

    def preempt(self, choice: Choice) -> None:
        """Back to the queue, to be recomputed; what the prefix cache holds then is not computed again."""
        if choice.ahead:
            raise Internal(f"sequence {choice!r} is in flight and cannot be preempted")
        self.counters.preemptions += 1
        choice.request.preemptions += 1
        self.running.remove(choice)
        self.pages.store(choice)
        self.requeue(choice)

    def requeue(self, choice: Choice) -> None:
        """Its pages go (those that a peer may still write when that is settled), and it starts over from the queue."""
        request = choice.request
        self._cancel_copy(choice)
        self.pages.free(choice)
        if not request.forked:
            for fork in request.seqs[1:]:
                self.pages.free(fork)
        request.scores = []  # scored anew from the first token on, if it was not done
        choice.move(SeqState.PREEMPTED)
        insort(self.queue, choice, key=_rank)

    # -- admission

    def admit(self, slices: list[Slice], look: Callable[[Choice], None] | None = None) -> int:
        """Admit from the head of the queue while it fits; the head is never overtaken. Returns rows planned at once.

        look: sees each one that might be admitted, and may raise."""
        free_slots = self.config.max_batch - self.slots_taken()
        before = len(slices)
        while self.queue:
            choice = self.queue[0]
            wanted = self._width(choice)
            if wanted > free_slots or self.pages.hopeless(choice):
                break
            if look is not None:
                look(choice)
            if not self.pages.admit(choice):
                break
            free_slots -= wanted
            del self.queue[0]
            self._enter(choice)
            if choice.state is _PREFILL and choice.tokens.size - choice.computed == 1:
                self.plan_slice(choice, 1, slices)
        return len(slices) - before

    def slots_taken(self) -> int:
        """Choices that are, or will be without a new admission, in the batch."""
        taken = len(self.running)
        for request in self.requests.values():
            state = request.root.state
            if state in _PARKED:
                taken += self._width(request.root)
            elif state is _PREFILL and not request.forked:
                taken += self._width(request.root) - 1
        return taken

    def _width(self, choice: Choice) -> int:
        request = choice.request
        if request.forked or choice is not request.root:
            return 1
        return 1 + sum(fork.live for fork in request.seqs[1:])

    def _enter(self, choice: Choice) -> None:
        """A choice just got its pages: into the batch, or to the service."""
        request, options = choice.request, choice.request.options
        first = request.admitted_at is None
        if first:
            request.admitted_at = self.clock()
            request.cached_tokens = choice.computed
        if options.mode is Mode.PREFILL_ONLY:
            choice.move(SeqState.AWAITING_START)
        elif self._wants_remote_kv(choice):
            choice.move(SeqState.AWAITING_KV)
            self.ledger.open(options.key)
        else:
            self.join(choice)
        awaiting = choice.state in WITH_SERVICE
        if first or awaiting:
            self.events.append(
                Admitted(
                    options.key,
                    tuple(choice.pages),
                    choice.computed,
                    choice.first_block,
                    choice.total_len,
                    awaiting,
                    None if first else tuple(choice.tokens.tolist()),
                )
            )

    def _wants_remote_kv(self, choice: Choice) -> bool:
        request, options = choice.request, choice.request.options
        if options.mode is not Mode.REMOTE or choice.local_only:
            return False
        if choice.state is SeqState.PREEMPTED and not (self.config.remote_resume and len(request.seqs) == 1):
            return False
        return choice.total_len - 1 - choice.computed > options.local_remainder

    def join(self, choice: Choice) -> None:
        """Into the batch."""
        choice.move(_PREFILL)
        insort(self.running, choice, key=_rank)

    # -- prompts

    def plan_chunks(self, slices: list[Slice], budget: int) -> None:
        for choice in self.running:
            if budget <= 0:
                return
            remaining = choice.tokens.size - choice.computed - choice.ahead
            if choice.state is not _PREFILL or remaining <= 1:
                continue
            count = min(budget, self.config.chunk_size, remaining)
            self.plan_slice(choice, count, slices)
            budget -= count

    def plan_slice(self, choice: Choice, count: int, slices: list[Slice]) -> None:
        request = choice.request
        start = choice.computed + choice.ahead
        end = start + count
        samplers: Sequence[Choice] = ()
        if end == choice.tokens.size and request.options.mode is not Mode.PREFILL_ONLY:
            samplers = (choice,) if request.forked else [c for c in request.seqs if c.live and not c.muted]
        prompt_len = len(request.prompt)
        scored = request.sampling.prompt_logprobs if request.scoring and start < prompt_len else None
        slices.append(
            Slice(
                choice.seq_id,
                choice.tokens[start:end],
                start,
                choice.table,
                tuple(sampler.sample_input() for sampler in samplers),
                scored,
                int(choice.tokens[end]) if scored is not None and end < prompt_len else None,
            )
        )
        self.plan.append(Planned(choice, count, samplers))

    def _after_chunk(
        self, choice: Choice, num_tokens: int, samplers: Sequence[Choice], answer: SliceResult, now: float
    ) -> None:
        request = choice.request
        request.chunks += 1
        self.counters.prefill_tokens += num_tokens
        if request.scoring:
            self._take_scores(choice, answer)
        self.pages.store(choice)
        if choice.computed < choice.tokens.size:
            return
        if request.options.mode is Mode.PREFILL_ONLY:
            self.running.remove(choice)
            self.hold(choice, now)
            return
        if request.prefill_done_at is None:
            request.prefill_done_at = now
        if not request.forked:
            self._fork(request)
        choice.move(_DECODE)
        for index, sampler in enumerate(samplers):
            if sampler.live and not sampler.muted:
                self._take_token(sampler, answer, index, now)
        if choice.muted:
            self.end_choice(choice, keep=True)

    def hold(self, choice: Choice, now: float) -> None:
        """PREFILL_ONLY: everything is computed."""
        request = choice.request
        request.prefill_done_at = now
        choice.move(SeqState.HELD)
        self.events.append(PrefillComputed(request.key, request.chunks, 1e3 * request.compute_s))

    def _fork(self, request: Request) -> None:
        """The prompt is computed: the other choices get their block tables and join."""
        request.forked = True
        root = request.root
        for fork in request.seqs[1:]:
            if not fork.live:
                continue
            copy = self.pages.fork(root, fork)
            if copy is not None:
                self.copies[fork.seq_id] = (fork, *copy)
            fork.move(_DECODE)
            insort(self.running, fork, key=_rank)

    # -- tokens

    def _take_token(self, choice: Choice, answer: SliceResult, index: int, now: float) -> None:
        request = choice.request
        output = choice.output
        token = answer.token_ids[index]
        position = len(output)
        over = False
        stop: int | None
        if (match := choice.match) is not None:
            match.take(token)
            if match.error is not None:
                self.end(request, match.error)
                return
            over = match.over
        output.append(token)
        if request.first_token_at is None:
            request.first_token_at = now
        self.counters.generation_tokens += 1
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.want_logprobs:
            scored = answer.logprobs[index] if index < len(answer.logprobs) else None
            if scored is not None:
                choice.cumulative += scored.logprob
                if request.options.sampling.want_logprobs:
                    logprobs = (scored,)
        if token in request.stops and (over or position >= request.sampling.min_tokens):
            reason, stop = FinishReason.STOP, token
        elif over:
            # Nothing can follow, whatever min_tokens and ignore_eos say: the end itself need not be drawn.
            reason = FinishReason.STOP
            stop = token if match is not None and token in match.eos else None
        elif len(request.prompt) + position + 1 >= request.limit_len:
            reason, stop = FinishReason.LENGTH, None
        else:
            self.events.append(Tokens(request.options.key, choice.choice, position, (token,), logprobs))
            return
        cumulative = choice.cumulative if request.options.want_cumulative_logprob else None
        self.events.append(Tokens(request.key, choice.choice, position, (token,), logprobs, reason, stop, cumulative))
        self.end_choice(choice, keep=True)
        if all(other.muted or not other.live for other in request.seqs):
            self.end(request)

    def _already_complete(self, request: Request) -> FinishReason | None:
        """A healed request whose output so far had ended already."""
        output = request.root.output
        if not request.tail_len or request.options.mode is Mode.PREFILL_ONLY:
            return None
        if output[-1] in request.stops and len(output) > request.sampling.min_tokens:
            return FinishReason.STOP
        if request.root.match is not None and request.root.match.over:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.root.total_len >= request.limit_len else None

    def _take_scores(self, choice: Choice, answer: SliceResult) -> None:
        request = choice.request
        request.scores += answer.prompt_logprobs
        wanted = len(request.prompt) - 1
        if choice.computed >= len(request.prompt):
            if len(request.scores) < wanted:
                raise Internal(f"{len(request.scores)} prompt log-probabilities for {wanted} tokens")
            request.scoring = False
            self.events.append(PromptScored(request.key, tuple(request.scores[:wanted])))
            request.scores = []

    # -- looking

    def close(self) -> None:
        """Nothing will be scheduled any more."""
        self._masks.close()

    def waiting_requests(self) -> int:
        """Requests that were never admitted."""
        return sum(choice.state is SeqState.WAITING for choice in self.queue)

    def free_slots(self) -> int:
        """Choices that could still be admitted."""
        return max(0, self.config.max_batch - self.slots_taken())

    def measure(self, step: int) -> LoadSnapshot:
        queued = sum(choice.total_len for choice in self.queue)
        inflight = 0
        for choice in self.running:
            inflight += choice.computed
            if choice.state is _PREFILL:
                queued += choice.tokens.size - choice.computed
        transferring = sum(request.root.state in WITH_SERVICE for request in self.requests.values())
        pool = self.pages.pool
        return LoadSnapshot(
            pool.available_count, pool.total, len(self.running), len(self.queue), transferring, queued, inflight, step,
            free_slots=self.free_slots(),
        )  # fmt: skip

    def describe(self) -> str:
        """The queue and the batch for people; also when another thread is stuck in the middle of a step."""
        counts = self.pages.pool.counts()
        lines = [f"pages: {counts}, evictable {self.pages.pool.available_count - counts.free}"]
        for request in list(self.requests.values()):
            lines += [f"  {choice!r} holds {choice.num_pages} pages" for choice in request.seqs]
        return "\n".join(lines)

    # -- inside

    def _unqueue(self, choice: Choice) -> None:
        at = bisect_left(self.queue, choice.rank, key=_rank)
        if at < len(self.queue) and self.queue[at] is choice:
            del self.queue[at]

    def _cancel_copy(self, choice: Choice) -> None:
        if self.copies.pop(choice.seq_id, None) is not None:
            self.pages.copied(choice.seq_id)

    def _end_copies(self) -> None:
        for fork_id in self.copies:
            self.pages.copied(fork_id)
        self.copies.clear()


def _check_result(plan: Sequence[Planned], result: StepResult) -> None:
    if len(result.slices) != len(plan):
        raise Internal(f"runner answered {len(result.slices)} slices of {len(plan)}")
    for (choice, _, samplers), answer in zip(plan, result.slices, strict=True):
        if answer.seq_id != choice.seq_id or len(answer.token_ids) != len(samplers):
            raise Internal(
                f"runner answered sequence {answer.seq_id} with {len(answer.token_ids)} tokens where sequence "
                f"{choice.seq_id} samples {len(samplers)}"
            )
