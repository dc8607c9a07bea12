"""Steps that are launched and not collected: what they hold of the scheduler's state, and the step planned ahead.

A step is planned ahead "as if the one in flight had succeeded": its tokens are computed, and a sequence that samples in
it has one token more, which nobody here knows yet. `Choice.computed` and `Choice.output` stay what collected steps
say; `Choice.ahead` and `Choice.pending` are what is in flight. So whatever ends, stores or counts meanwhile needs to
know nothing of flights, and a row planned for a sequence that turns out to have ended is simply not taken in.

Planning ahead is the fast path: it grows, admits and goes on with prompts, but it never preempts, forks or copies.
Where that would be needed, or where what is in flight could change what is to be decided, it gives up: the core then
collects first and schedules as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmesh.engine.events import Mode
from kvmesh.engine.runner import PENDING, Slice, StepBatch
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Choice, Planned, SeqState
from kvmesh.engine.steprecords import StepMark
from kvmesh.errors import KvmeshError


@dataclass(slots=True, eq=False)
class Flight:
    """One launched step. failure: its launch failed, nothing of it was queued."""

    step: int
    plan: list[Planned]
    copies: dict[int, tuple[Choice, int, int]]
    mark: StepMark | None
    launched_at: float
    handle: object = None
    failure: KvmeshError | None = None


class _GiveUp(Exception):
    """This step cannot be planned ahead."""


def take_off(scheduler: Scheduler, batch: StepBatch, mark: StepMark | None, now: float) -> Flight:
    """The scheduler's plan is about to be launched: from now on what it computes counts as being ahead."""
    flight = Flight(batch.step, scheduler.plan, scheduler.copies, mark, now)
    scheduler.plan, scheduler.copies = [], {}
    for choice, num_tokens, samplers in flight.plan:
        choice.ahead += num_tokens
        for sampler in samplers:
            sampler.pending += 1
    return flight


def arrived(scheduler: Scheduler, flight: Flight) -> None:
    """The step is over: its plan is the scheduler's again, to be postprocessed or failed. Then call `pages.settle`."""
    for choice, num_tokens, samplers in flight.plan:
        choice.ahead -= num_tokens
        for sampler in samplers:
            sampler.pending -= 1
    scheduler.plan, scheduler.copies = flight.plan, flight.copies


def plan_ahead(scheduler: Scheduler, flight: Flight) -> StepBatch | None:
    """The step behind the one in flight, or None: collect first."""
    if scheduler.copies:
        return None
    scheduler.plan = []
    slices: list[Slice] = []
    try:
        budget = scheduler.config.token_budget - _plan_rows(scheduler, slices)
        if scheduler.queue:
            budget -= scheduler.admit(slices, lambda choice: _look(scheduler, flight, choice))
    except _GiveUp:
        scheduler.plan = []
        return None
    scheduler.plan_chunks(slices, budget)
    return scheduler.batch(slices) if scheduler.plan else None


def _plan_rows(scheduler: Scheduler, slices: list[Slice]) -> int:
    """Every sequence with exactly one token to compute; returns how many. As `Scheduler._plan_rows`, one step on."""
    running, plan, pages = scheduler.running, scheduler.plan, scheduler.pages
    page_size = pages.page_size
    tokens = np.empty(len(running), np.int32)
    rows = left_out = 0
    for choice in running:
        start, pending, request = choice.computed + choice.ahead, choice.pending, choice.request
        if choice.state is not SeqState.DECODE:
            if request.scoring:
                raise _GiveUp
            remaining = choice.tokens.size - start
            if remaining == 1:
                scheduler.plan_slice(choice, 1, slices)
                rows += 1
            if remaining or request.options.mode is Mode.PREFILL_ONLY:
                continue
            if not request.forked:
                raise _GiveUp  # its forks need copies
        if pending and choice.total_len + pending >= request.limit_len:
            continue  # it ends with the token that is pending
        if pending and choice.match is not None:
            # What may follow hangs on that token: its turn is the step after. Where that is so for most, there is
            # little to be done ahead.
            left_out += 1
            if 2 * left_out > len(running):
                raise _GiveUp
            continue
        if start == choice.num_pages * page_size and not pages.grow(choice):
            raise _GiveUp  # somebody must be preempted
        tokens[rows] = PENDING if pending else choice.output[-1]
        slices.append(
            Slice(choice.seq_id, tokens[rows : rows + 1], start, choice.table, (choice.sample_input(),)),
        )
        plan.append(choice.row)
        rows += 1
    return rows


def _look(scheduler: Scheduler, flight: Flight, choice: Choice) -> None:
    """Gives up where the step in flight computes what this one would find in the prefix cache once it is collected."""
    request = choice.request
    if request.scoring:
        raise _GiveUp
    if scheduler.pages.cache is None:
        return
    first: Sequence[int] | None = None
    for other, _, _ in flight.plan:
        if other.state is not SeqState.PREFILL or other.request.options.seed_bytes != request.options.seed_bytes:
            continue
        if first is None:
            first = _first_block(choice, scheduler.pages.page_size)
        if _first_block(other, scheduler.pages.page_size) == first:
            raise _GiveUp


def _first_block(choice: Choice, page_size: int) -> Sequence[int]:
    return (choice.request.prompt[:page_size] + choice.output[:page_size])[:page_size]
