"""What a step on a GPU reads, packed on the CPU; and the memory that such a runner says it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvmesh.engine.cuda.flight import Flight
from kvmesh.engine.cuda.metadata import StepMetadata, shape_of
from kvmesh.engine.cuda.workspaces import told_what_to_lower, workspace_bytes
from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import PENDING, SampleInput, SamplingParams, Slice, StepBatch, StepResult
from kvmesh.errors import Internal, InvalidArgument, Unavailable

SAMPLE = SampleInput(SamplingParams(temperature=0.0), 0, 1, (), ())
PAGE, PAGES = 16, 64


class Work:
    """A work list of one word a row: its length."""

    def words(self, rows: int) -> int:
        return rows

    def fill(self, lengths: npt.NDArray[np.int32], out: npt.NDArray[np.int32]) -> None:
        out[:] = lengths


def metadata(max_rows: int = 64, max_decode: int = 8, each: int = 8) -> StepMetadata:
    return StepMetadata(max_rows, max_decode, max_decode * each, PAGE, PAGES, 100, Work(), torch.device("cpu"))


def piece(seq_id: int, ids: list[int], start: int, table: list[int], sample: bool = True, **more: Any) -> Slice:
    return Slice(seq_id, np.array(ids, np.int32), start, np.array(table, np.int32), (SAMPLE,) if sample else (), **more)


def test_rows_of_a_mixed_step() -> None:
    """Decode rows first, then prompts that begin, then those that go on, whatever the batch's order is."""
    batch = StepBatch(
        1,
        [
            piece(1, [5, 6, 7], 16, [3, 4], sample=False),
            piece(2, [8], 20, [9, 10]),
            piece(3, [11, 12], 0, [20]),
            piece(4, [PENDING], 15, [30]),
        ],
    )
    shape = shape_of(batch)
    assert (shape.order, shape.first_row, shape.rows, shape.decode) == ([1, 3, 2, 0], [0, 1, 2, 4], 7, 2)
    assert [shape.last_row(place) for place in range(4)] == [0, 1, 3, 6]
    assert [(count, start) for count, start, _ in shape.chunks] == [(2, 0), (3, 16)]
    made = metadata()
    made.check(batch)
    made.fill(batch, shape, {4: 2})
    columns = made.columns(shape.rows, shape.decode)
    assert columns.tokens.tolist() == [8, -3, 11, 12, 5, 6, 7]
    assert columns.positions.tolist() == [20, 15, 0, 1, 16, 17, 18]
    assert columns.slots.tolist() == [10 * 16 + 4, 30 * 16 + 15, 320, 321, 64, 65, 66]
    assert columns.lengths.tolist() == columns.work.tolist() == [21, 16]
    assert columns.row_start.tolist() == [0, 2]
    assert columns.pages[:3].tolist() == [9, 10, 30]


def test_rows_beyond_the_batch_write_nothing_and_read_nothing() -> None:
    """A graph's padding, after a step that left other things there."""
    made = metadata()
    full = StepBatch(1, [piece(i, [7], 40, [1, 2, 3]) for i in range(8)])
    for _ in range(3):
        made.fill(full, shape_of(full), {}, 8)
    two = StepBatch(2, [piece(i, [7], 3, [4 + i]) for i in range(2)])
    made.fill(two, shape_of(two), {}, 8)
    columns = made.columns(8, 8)
    assert columns.slots.tolist() == [67, 83] + [-1] * 6
    assert columns.tokens.tolist()[2:] == columns.positions.tolist()[2:] == [0] * 6
    assert columns.lengths.tolist() == columns.work.tolist() == [4, 4] + [0] * 6
    assert columns.row_start.tolist() == [0, 1] + [0] * 6


def test_what_does_not_fit_is_refused_and_costs_no_turn() -> None:
    made = metadata()
    for wrong in (
        piece(1, [5], 16, [3]),
        piece(1, [5], 0, [PAGES]),
        piece(1, [5], 8 * PAGE, list(range(9))),
        piece(1, [5, PENDING], 0, [1]),
    ):
        with pytest.raises((Internal, InvalidArgument)):
            made.check(StepBatch(1, [wrong]))
    made.check(StepBatch(1, [piece(1, [5], 8 * PAGE - 1, list(range(8)))]))
    good = StepBatch(1, [piece(1, [5], 0, [2])])
    made.fill(good, shape_of(good), {})
    before = made.columns(1, 1).slots.tolist()
    lost = StepBatch(2, [piece(1, [PENDING], 1, [3])])
    with pytest.raises(Internal, match="awaits a token"):
        made.fill(lost, shape_of(lost), {})
    assert made.columns(1, 1).slots.tolist() == before


def test_tokens_of_a_step_go_to_their_slices() -> None:
    """Slices lie otherwise on the device than in the batch; one whose logits are no numbers fails alone."""
    slices = [piece(i, [5], 0, [i]) for i in range(3)]
    places = [slice(1, 3), slice(0, 1), slice(0, 0)]

    def result(tokens: list[int]) -> StepResult:
        done: Any = None
        return Flight(StepBatch(1, slices), places, torch.tensor(tokens, dtype=torch.int32), done).result((), {2: ()})

    assert [(r.seq_id, list(r.token_ids), len(r.logprobs)) for r in result([7, 8, 9]).slices] == [
        (0, [8, 9], 2),
        (1, [7], 1),
        (2, [], 0),
    ]
    with pytest.raises(SequencesFailed) as caught:
        result([7, 8, -1])
    assert caught.value.seq_ids == {0}
    assert [r.seq_id for r in caught.value.result.slices] == [1, 2]


def test_out_of_memory_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 80 << 30))
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")):
        with pytest.raises(Unavailable, match=r"no device memory for graphs .*max_batch"), told_what_to_lower("graphs"):
            raise error
    with pytest.raises(RuntimeError, match="illegal"), told_what_to_lower("graphs"):
        raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize(("max_batch", "ranks"), [(256, 1), (1024, 1), (256, 4)])
def test_workspaces_are_told_from_above(max_batch: int, ranks: int) -> None:
    """Llama-3.1-8B: what `bind_cuda` allocates by name, and the largest step's activations at their peak."""
    vocab, hidden, budget, longest, heads, kv_heads = 128256, 4096, 8192, 131072, 32 // ranks, 8 // ranks
    qkv, q, wide = (heads + 2 * kv_heads) * 128, heads * 128, 14336 // ranks
    model: Any = SimpleNamespace(
        config=SimpleNamespace(hidden_size=hidden, vocab_size=vocab, head_dim=128),
        qkv_width=qkv, q_width=q, wide=wide, tp=SimpleNamespace(size=ranks),
    )  # fmt: skip
    logits = 4 * max_batch * vocab
    # Logits, counts and penalized logits; of several ranks one's own part and what is gathered of all.
    held = 3 * logits + (logits // ranks + logits if ranks > 1 else 0) + max_batch * 2048 * 8
    held += 4 * longest * 128 + 2 * 4 * max_batch * longest // 64 + (160 << 20)
    # Residual, normed, q, attention, own K and V; gate, up and their product; qkv, out and down not yet freed.
    step = 2 * (4 * hidden + 2 * q + 2 * kv_heads * 128 + 3 * wide + qkv) * budget
    told = workspace_bytes(model, max_batch, budget, longest)
    # Room for graphs, kernels' code, cuBLAS.
    assert held + step + (512 << 20) < told < 2 * (held + step) + (1 << 30)
