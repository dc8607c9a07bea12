"""A small trained model: how likely is it that a pair that no guard refused asks the same?

Logistic regression on the features and their products, trained by tools/training/train_verifier.py; its weights are
in verifier.npz beside this file.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition
from services.router.match.features import NAMES, Features
from services.router.match.lexicon import load_arrays

VERSION = 1
FILE = Path(__file__).with_name("verifier.npz")
MAX_BYTES = 256 << 10
_PAIRS = np.triu_indices(len(NAMES))
TERMS = 1 + len(NAMES) + len(_PAIRS[0])
_DTYPES = {
    "version": np.int32,
    "names": np.dtype("<U40"),
    "mean": np.float64,
    "scale": np.float64,
    "weights": np.float64,
}


def expand(standard: Features) -> Features:
    """1, the features and their products: (…, TERMS) of (…, len(NAMES)) standardized features."""
    ones = np.ones((*standard.shape[:-1], 1))
    return np.concatenate([ones, standard, standard[..., _PAIRS[0]] * standard[..., _PAIRS[1]]], axis=-1)


class Verifier:
    """Immutable, so any thread may ask it."""

    def __init__(self, path: Path = FILE) -> None:
        """Raises FailedPrecondition when the weights are missing, too large, not finite or of other features."""
        arrays = load_arrays(path, _DTYPES, MAX_BYTES)
        if arrays["version"].shape != () or int(arrays["version"]) != VERSION:
            raise FailedPrecondition(f"{path.name} is not of version {VERSION}")
        if tuple(str(name) for name in arrays["names"].reshape(-1)) != NAMES:
            raise FailedPrecondition(f"{path.name} was trained on other features")
        shapes = {"mean": (len(NAMES),), "scale": (len(NAMES),), "weights": (TERMS,)}
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise FailedPrecondition(f"{path.name}: {name} has shape {arrays[name].shape}, not {shape}")
            if not np.isfinite(arrays[name]).all():
                raise FailedPrecondition(f"{path.name}: {name} has values that are not finite")
        if (arrays["scale"] <= 0).any():
            raise FailedPrecondition(f"{path.name}: scale is not positive")
        self._mean: npt.NDArray[np.float64] = arrays["mean"]
        self._scale: npt.NDArray[np.float64] = arrays["scale"]
        self._weights: npt.NDArray[np.float64] = arrays["weights"]

    def probability(self, row: Features) -> float:
        """Of (len(NAMES),) features, in 0..1."""
        # Far outside of what it was trained on the products would run away.
        standard = np.clip((row - self._mean) / self._scale, -4.0, 4.0)
        logit = float(expand(standard) @ self._weights)
        return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, logit))))


@lru_cache(maxsize=1)
def shipped() -> Verifier:
    """The package's, read once."""
    return Verifier()
