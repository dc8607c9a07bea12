"""The decode attention's work list: every token of every row once, even shares, the splits of a row in order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.layers.cuda.worklist import COLUMNS, GRAIN, MIN_SHARE, ROW_GRAINS, WorkPlan

rows_of = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 6000), st.just(131072)), min_size=0, max_size=64)


def filled(plan: WorkPlan, lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bounds, leads, columns of the segments) from a buffer that held something else before."""
    out = np.full(plan.words, -7, dtype=np.int32)
    count = plan.fill(np.array(lengths, dtype=np.int32), out)
    bounds, rest = np.split(out, [plan.workers + 1])
    leads, columns = np.split(rest, [COLUMNS * plan.workers])
    assert (columns.reshape(COLUMNS, -1)[:, count:] == -7).all()
    return bounds, leads.reshape(COLUMNS, -1), columns.reshape(COLUMNS, -1)[:, :count]


@given(rows_of, st.integers(0, 5), st.integers(1, 132), st.sampled_from((GRAIN, 64, 128)))
def test_every_token_once_in_even_shares(lengths: list[int], spare: int, workers: int, grain: int) -> None:
    plan = WorkPlan(len(lengths) + spare, workers, grain)
    bounds, leads, columns = filled(plan, lengths)
    row, begin, end, split, splits = columns
    # Every worker's segments, one after another, are all of them.
    assert bounds[0] == 0
    assert bounds[-1] == columns.shape[1]
    assert (np.diff(bounds) >= 0).all()
    # Each row's segments follow each other, from its first token to its last.
    at = 0
    for number, length in enumerate(lengths):
        mine = np.flatnonzero(row == number)
        assert len(mine) >= (length > 0)
        if not length:
            assert len(mine) == 0
            continue
        assert mine.tolist() == list(range(at, at + len(mine)))
        assert split[mine].tolist() == list(range(len(mine)))
        assert (splits[mine] == len(mine)).all()
        assert begin[mine[0]] == 0
        assert end[mine[-1]] == length
        assert (begin[mine[1:]] == end[mine[:-1]]).all()
        at += len(mine)
    assert (begin % grain == 0).all()
    assert (end > begin).all()
    # A busy worker's first segment stands beside its bounds, too.
    busy = np.flatnonzero(np.diff(bounds))
    assert (leads[:, busy] == columns[:, bounds[busy]]).all()
    # No share is larger than the mean of as many workers as have enough to do, rounded up to grains.
    grains = [-(-length // grain) for length in lengths]
    cost = sum(grains) + ROW_GRAINS * np.count_nonzero(lengths)
    used = max(1, min(workers, cost // max(1, MIN_SHARE // grain)))
    per_segment = -(-(end - begin) // grain)
    for first, last in itertools.pairwise(bounds):
        assert per_segment[first:last].sum() <= -(-cost // used)


def test_a_long_row_occupies_every_worker() -> None:
    bounds, _, columns = filled(WorkPlan(1, 33), [4250])
    assert (np.diff(bounds) == 1).all()
    tokens = columns[2] - columns[1]
    assert tokens.max() - tokens.min() <= 2 * GRAIN


def test_a_short_row_is_not_split() -> None:
    bounds, _, columns = filled(WorkPlan(4, 33), [0, MIN_SHARE - 1])
    assert columns.tolist() == [[1], [0], [MIN_SHARE - 1], [0], [1]]
    assert bounds.tolist() == [0] + [1] * 33


def test_no_work_at_all() -> None:
    plan = WorkPlan(8, 5)
    for lengths in ([], [0, 0, 0]):
        bounds, _, columns = filled(plan, lengths)
        assert not bounds.any()
        assert columns.shape[1] == 0


def test_refuses_what_it_has_no_room_for() -> None:
    plan = WorkPlan(2, 5)
    with pytest.raises(ValueError, match="3 rows"):
        plan.fill(np.ones(3, np.int32), np.zeros(plan.words, np.int32))
    with pytest.raises(ValueError, match="words"):
        plan.fill(np.ones(2, np.int32), np.zeros(plan.words + 1, np.int32))
