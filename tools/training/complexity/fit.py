"""Ridge logistic regression on features and an embedding; every choice is made inside the training rows, by subject.

Penalties are chosen by the log-likelihood of held-out inner folds, which hold whole subjects; calibration (Platt) and
clipping come from the same held-out predictions. So a subject outside the training rows has touched nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.router.classes.model import CLIP

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

RIDGE_FEATURES = (10.0, 50.0, 200.0)
RIDGE_VECTOR = (300.0, 1000.0, 3000.0, 10000.0)
COMPONENTS = 128
"""Principal components of the embedding that the regression sees; ridge shrinks what lies beyond to nothing anyway."""

INNER_FOLDS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Rows: `x` (N, F) features, `e` (N, D) unit vectors, `y` (N,) 0 or 1, `groups` (N,) subject numbers."""

    x: Array
    e: Array
    y: Array
    groups: npt.NDArray[np.int64]

    def of(self, mask: Mask) -> Data:
        """The rows of a mask."""
        return Data(self.x[mask], self.e[mask], self.y[mask], self.groups[mask])


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Weights in the units of the inputs; `ridge` what was chosen (features, vector)."""

    mean_f: Array
    scale_f: Array
    w_f: Array
    mean_e: Array
    w_e: Array
    bias: float
    ridge: tuple[float, float]
    bounds: Array
    calibration: Array

    def parts(self, x: Array, e: Array) -> tuple[Array, Array]:
        """(N,) sums of the features and of the vector, not clipped."""
        scaled = np.clip((x - self.mean_f) / self.scale_f, -CLIP, CLIP)
        return np.asarray(scaled @ self.w_f), np.asarray((e - self.mean_e) @ self.w_e)

    def logits(self, x: Array, e: Array) -> Array:
        """(N,) before calibration."""
        by_features, by_vector = self.parts(x, e)
        return np.asarray(self.bias + np.clip(by_features, *self.bounds[0]) + np.clip(by_vector, *self.bounds[1]))

    def probabilities(self, x: Array, e: Array) -> Array:
        """(N,) calibrated."""
        return sigmoid(float(self.calibration[0]) * self.logits(x, e) + float(self.calibration[1]))


def sigmoid(z: Array) -> Array:
    """Element by element."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(z, -500, 500))))


def logistic(a: Array, y: Array, ridge: Array, *, steps: int = 25) -> Array:
    """Newton's method; `a` (N, P) with a last column of ones, `ridge` (P,). Returns (P,)."""
    b = np.zeros(a.shape[1])
    b[-1] = np.log((y.mean() + 1e-6) / (1 - y.mean() + 1e-6))
    for _ in range(steps):
        p = sigmoid(a @ b)
        hessian = (a * (p * (1 - p))[:, None]).T @ a
        hessian[np.diag_indices_from(hessian)] += ridge
        step = np.linalg.solve(hessian, a.T @ (p - y) + ridge * b)
        b -= np.clip(step, -5, 5)
        if np.abs(step).max() < 1e-4:
            break
    return b


def folds(groups: npt.NDArray[np.int64], k: int, seed: int) -> npt.NDArray[np.int64]:
    """(N,) fold of each row; a subject is in one fold."""
    names = np.unique(groups)
    k = min(k, names.size)
    order = np.random.default_rng(seed).permutation(names.size)
    fold = np.empty(names.size, dtype=np.int64)
    fold[order] = np.arange(names.size) % k
    return fold[np.searchsorted(names, groups)]


class _Space:
    """Standardized features, centred components; made from training rows only."""

    def __init__(self, data: Data, columns: tuple[int, ...], use_vector: bool) -> None:
        self.columns = list(columns)
        self.mean_f = data.x.mean(axis=0)
        self.scale_f = data.x.std(axis=0) + 1e-3
        self.mean_e = data.e.mean(axis=0)
        self.axes = np.zeros((data.e.shape[1], 0))
        if use_vector:
            centred = data.e - self.mean_e
            _, vectors = np.linalg.eigh(centred.T @ centred)
            # Unit vectors have coordinates of about 1/√D: brought to about 1, penalties mean the same for every D.
            self.axes = np.asarray(vectors[:, ::-1][:, :COMPONENTS] * np.sqrt(data.e.shape[1]))

    def matrix(self, data: Data) -> Array:
        scaled = np.clip((data.x - self.mean_f) / self.scale_f, -CLIP, CLIP)[:, self.columns]
        return np.asarray(np.hstack([scaled, (data.e - self.mean_e) @ self.axes, np.ones((len(data.y), 1))]))

    def ridge(self, features: float, vector: float) -> Array:
        return np.asarray(np.r_[np.full(len(self.columns), features), np.full(self.axes.shape[1], vector), 1e-6])

    def fit(self, b: Array, ridge: tuple[float, float]) -> Fit:
        w_f = np.zeros(self.mean_f.size)
        w_f[self.columns] = b[: len(self.columns)]
        w_e = self.axes @ b[len(self.columns) : -1]
        wide = np.array([[-np.inf, np.inf]] * 2)
        return Fit(self.mean_f, self.scale_f, w_f, self.mean_e, w_e, float(b[-1]), ridge, wide, np.array([1.0, 0.0]))


def fit(data: Data, *, columns: tuple[int, ...], use_vector: bool, seed: int = 0) -> Fit:
    """Choose, calibrate and fit on `data` alone. `columns`: features that are seen (may be none)."""
    fold = folds(data.groups, INNER_FOLDS, seed)
    spaces = [_Space(data.of(fold != k), columns, use_vector) for k in np.unique(fold)]
    matrices = [(s.matrix(data.of(fold != k)), s.matrix(data.of(fold == k))) for k, s in enumerate(spaces)]

    def held_out(ridge: tuple[float, float]) -> tuple[Array, list[Fit]]:
        logits, fits = np.empty(len(data.y)), []
        for k, (space, (train, test)) in enumerate(zip(spaces, matrices, strict=True)):
            b = logistic(train, data.y[fold != k], space.ridge(*ridge))
            logits[fold == k] = test @ b
            fits.append(space.fit(b, ridge))
        return logits, fits

    def loss(logits: Array) -> float:
        return float(np.mean(np.logaddexp(0, logits) - data.y * logits))

    best: tuple[float, tuple[float, float], Array, list[Fit]] | None = None
    for ridge in _grid(columns, use_vector):
        logits, fits = held_out(ridge)
        if best is None or loss(logits) < best[0]:
            best = (loss(logits), ridge, logits, fits)
    assert best is not None
    _, ridge, logits, fits = best
    parts = np.empty((2, len(data.y)))
    for k, one in enumerate(fits):
        rows = fold == k
        parts[:, rows] = one.parts(data.x[rows], data.e[rows])
    bounds = np.quantile(parts, (0.005, 0.995), axis=1).T
    whole = _Space(data, columns, use_vector)
    b = logistic(whole.matrix(data), data.y, whole.ridge(*ridge))
    return replace(whole.fit(b, ridge), bounds=bounds, calibration=platt(logits, data.y))


def _grid(columns: tuple[int, ...], use_vector: bool) -> list[tuple[float, float]]:
    by_features = RIDGE_FEATURES if columns else RIDGE_FEATURES[:1]
    if not use_vector:
        return [(f, 1.0) for f in by_features]
    # Features keep the middle penalty beside a vector: their choice matters little there, and costs the most time.
    return [(RIDGE_FEATURES[1] if columns else 1.0, v) for v in RIDGE_VECTOR]


def platt(logits: Array, y: Array) -> Array:
    """(2,) slope and offset; a slope below 0 would turn the order round and becomes 0."""
    b = logistic(np.c_[logits, np.ones(len(y))], y, np.array([1.0, 1e-6]))
    if b[0] <= 0:
        rate = float(np.clip(y.mean(), 1e-3, 1 - 1e-3))
        return np.array([0.0, np.log(rate / (1 - rate))])
    return np.asarray(b)


def without(e: Array, directions: Array) -> Array:
    """(N, D) less what lies along `directions` (K, D), for vectors that must not matter."""
    if not directions.size:
        return e
    _, scales, axes = np.linalg.svd(directions, full_matrices=False)
    kept: npt.NDArray[Any] = axes[scales > 1e-6 * scales[0]]
    return np.asarray(e - (e @ kept.T) @ kept)
