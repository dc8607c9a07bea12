"""The classifier: logistic regression over features and an embedding → probability that the small pool suffices.

    logit = bias + clip(w_f · clip((features − mean_f) / scale_f, ±4)) + clip(w_e · (vector − mean_e))
    probability = σ(slope · logit + offset)

Both sums are clipped to the range that they had on held-out training folds, so no text, however strange, reaches a
probability that no honest text reached. Weights: tools/training/train_complexity.py, an .npz of plain arrays.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition
from services.router.classes.features import COUNT, Features
from services.router.classes.features import VERSION as FEATURES_VERSION

VERSION = 1
FILE = Path(__file__).with_name("weights.npz")
MAX_BYTES = 1 << 20
MAX_DIM = 8192
MAX_CURVE = 1024
CLIP = 4.0
_UNIT_SLACK = 0.05

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Everything that was trained. Shapes: F features, D embedding dimensions, K points of the curve.

    `curve` rows are (threshold, share sent to the small pool, quality as a part of the large pool's), by falling
    threshold, from held-out predictions. `passed`: held-out subjects met the rule for being on by default.
    """

    embedder: str
    mean_f: Array
    scale_f: Array
    w_f: Array
    mean_e: Array
    w_e: Array
    bounds: Array
    """(2, 2): low and high of the features' sum, then of the vector's."""
    bias: float
    calibration: Array
    """(2,): slope and offset."""
    curve: Array
    passed: bool
    report: dict[str, Any]
    """What was measured, for people: rows, subjects, AUC, ECE, data."""

    def __post_init__(self) -> None:
        for name, shape in (
            ("mean_f", (COUNT,)),
            ("scale_f", (COUNT,)),
            ("w_f", (COUNT,)),
            ("w_e", self.mean_e.shape[:1]),
            ("mean_e", (self.mean_e.size,)),
            ("bounds", (2, 2)),
            ("calibration", (2,)),
            ("curve", (self.curve.shape[0], 3)),
        ):
            array = getattr(self, name)
            if array.shape != shape:
                raise FailedPrecondition(f"classifier weights: {name} has shape {array.shape}, not {shape}")
            if not np.isfinite(array).all():
                raise FailedPrecondition(f"classifier weights: {name} holds a value that is not finite")
        if not 0 < self.mean_e.size <= MAX_DIM or not 0 < self.curve.shape[0] <= MAX_CURVE:
            raise FailedPrecondition("classifier weights: no embedding, no curve, or too much of it")
        if not math.isfinite(self.bias) or self.calibration[0] < 0 or (self.scale_f <= 0).any():
            raise FailedPrecondition("classifier weights: bias, slope or a scale is out of range")
        if (self.bounds[:, 0] > self.bounds[:, 1]).any():
            raise FailedPrecondition("classifier weights: a bound's low is above its high")
        if (np.diff(self.curve[:, 0]) >= 0).any() or (np.diff(self.curve[:, 1]) < 0).any():
            raise FailedPrecondition("classifier weights: the curve is not ordered")

    @property
    def dim(self) -> int:
        """Of the embedding."""
        return int(self.mean_e.size)

    def usable(self, vector: npt.NDArray[Any] | None) -> bool:
        """Whether `vector` is one of this embedder: its dimension, finite, of length 1."""
        if vector is None or vector.shape != (self.dim,):
            return False
        length = float(np.linalg.norm(vector))
        return math.isfinite(length) and abs(length - 1.0) <= _UNIT_SLACK

    def logit(self, features: Features, vector: npt.NDArray[Any]) -> float:
        """Before calibration. `features` (COUNT,), `vector` (dim,) and usable."""
        scaled = np.clip((features - self.mean_f) / self.scale_f, -CLIP, CLIP)
        by_features = float(np.clip(scaled @ self.w_f, *self.bounds[0]))
        by_vector = float(np.clip((vector.astype(np.float64) - self.mean_e) @ self.w_e, *self.bounds[1]))
        return self.bias + by_features + by_vector

    def probability(self, features: Features, vector: npt.NDArray[Any]) -> float:
        """That the small pool suffices, in (0, 1)."""
        return sigmoid(float(self.calibration[0]) * self.logit(features, vector) + float(self.calibration[1]))

    def threshold(self, quality: float) -> float:
        """Least probability to send to the small pool so that `quality` of the large pool's quality is kept.

        2.0, that is nothing to the small pool, where the curve never promises it. Points beyond one that misses the
        target are not used: what lies behind a dip is luck.
        """
        chosen = 2.0
        for threshold, _, kept in self.curve:
            if kept < quality:
                break
            chosen = float(threshold)
        return chosen


def sigmoid(x: float) -> float:
    """1 / (1 + e^−x) without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


_ARRAYS = ("mean_f", "scale_f", "w_f", "mean_e", "w_e", "bounds", "calibration", "curve")


def dump(weights: Weights) -> bytes:
    """As a file: float32 arrays, and one JSON text as bytes."""
    head = {
        "version": VERSION,
        "features": FEATURES_VERSION,
        "embedder": weights.embedder,
        "bias": weights.bias,
        "passed": weights.passed,
        "report": weights.report,
    }
    arrays: dict[str, npt.NDArray[Any]] = {name: getattr(weights, name).astype(np.float32) for name in _ARRAYS}
    arrays["head"] = np.frombuffer(json.dumps(head, sort_keys=True).encode(), dtype=np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, allow_pickle=False, **arrays)
    return out.getvalue()


def load(path: Path, *, embedder: str, dim: int | None = None) -> Weights:
    """Read and check weights. Raises FailedPrecondition, which names the file and what is wrong with it."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise FailedPrecondition(f"{size} bytes; at most {MAX_BYTES} are read")
        with np.load(path, allow_pickle=False) as stored:
            # A small file may unpack to much more; an entry's size stands in the archive's directory.
            if sum(info.file_size for info in stored.zip.infolist()) > 4 * MAX_BYTES:
                raise FailedPrecondition(f"unpacks to more than {4 * MAX_BYTES} bytes")
            raw = {name: np.asarray(stored[name]) for name in (*_ARRAYS, "head")}
        weights = _build(raw)
    except FailedPrecondition as exc:
        raise FailedPrecondition(f"{path.name}: {exc}") from None
    except Exception as exc:
        raise FailedPrecondition(f"{path.name} cannot be read: {type(exc).__name__}: {exc}") from exc
    if weights.embedder != embedder:
        raise FailedPrecondition(
            f"{path.name} was trained with the embedder {weights.embedder!r}; this router uses {embedder!r}"
        )
    if dim is not None and weights.dim != dim:
        raise FailedPrecondition(f"{path.name} was trained on {weights.dim} dimensions; the embedder has {dim}")
    return weights


def _build(raw: dict[str, npt.NDArray[Any]]) -> Weights:
    head = json.loads(raw["head"].astype(np.uint8, casting="no").tobytes())
    if head["version"] != VERSION or head["features"] != FEATURES_VERSION:
        raise FailedPrecondition(
            f"version {head['version']} of features {head['features']}; this is {VERSION} of {FEATURES_VERSION}"
        )
    if not isinstance(head["passed"], bool) or not isinstance(head["report"], dict):
        raise FailedPrecondition("its head is not one")
    arrays: dict[str, Array] = {}
    for name in _ARRAYS:
        if raw[name].dtype != np.float32:
            raise FailedPrecondition(f"{name} is {raw[name].dtype}, not float32")
        arrays[name] = raw[name].astype(np.float64)
    if arrays["mean_e"].ndim != 1 or arrays["curve"].ndim != 2:
        raise FailedPrecondition("mean_e or curve has another number of dimensions")
    return Weights(
        embedder=str(head["embedder"]),
        bias=float(head["bias"]),
        passed=head["passed"],
        report=head["report"],
        **arrays,
    )
