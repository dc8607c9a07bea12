"""Failures that say more than that the step failed."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.engine.runner import StepResult
from kvmesh.errors import DataLoss, Unavailable


class SequencesFailed(DataLoss):
    """Raised by a runner's `execute` or `collect`: the step was run to its end, these sequences' results are worthless.

    result: the other slices' results, in the order of the batch.
    """

    def __init__(self, message: str, seq_ids: Iterable[int], result: StepResult) -> None:
        super().__init__(message)
        self.seq_ids = frozenset(seq_ids)
        self.result = result


class DeviceFailed(Unavailable):
    """The runner's device is lost: nothing will ever run on it again, and the engine ends."""


def first_line(error: BaseException) -> str:
    """An error for people; a GPU's come with pages of advice."""
    return str(error).partition("\n")[0] or repr(error)
