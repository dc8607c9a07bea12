"""Grammars' masks, packed for the device. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.engine.runner import SampleInput
from kvmesh.engine.sampling.processors import permitted


def grammar_masks(samples: Sequence[SampleInput], processed: Sequence[int]) -> dict[str, npt.NDArray[np.generic]]:
    """`mask_place` (M,) within `processed`, and `mask` (M * words a row,): what grammars allow, as bits of int32.

    Waits for the masks, while the device is busy with the step."""
    masked = [(place, permitted(samples[i])) for place, i in enumerate(processed) if samples[i].grammar is not None]
    if not masked:
        return {}
    places, words = zip(*masked, strict=True)
    return {"mask_place": np.array(places, np.int32), "mask": np.concatenate(words).view(np.int32)}


class Anything:
    """A grammar that allows every token."""

    def __init__(self, vocab: int) -> None:
        self._words = np.full(-(-vocab // 32), 0xFFFFFFFF, np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """See `TokenMask`."""
        return self._words
