"""Weights, tables and decisions made up for tests of the complexity classes."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from services.router.classes.features import COUNT
from services.router.classes.model import Weights
from services.router.classes.pools import ClassDecision, Classes, Pools
from tools.training.complexity.labels import Row

DIM = 32


def unit(seed: int, dim: int = DIM) -> npt.NDArray[np.float32]:
    """A direction, the same for the same seed."""
    vector = np.random.default_rng(seed).normal(size=dim)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def made_weights(seed: int = 0, *, dim: int = DIM, embedder: str = "hash", passed: bool = True) -> Weights:
    """Weights that listen to everything a little; the curve keeps .99, .97 and .9 at .8, .5 and .2."""
    rng = np.random.default_rng(seed)
    return Weights(
        embedder=embedder,
        mean_f=np.ones(COUNT),
        scale_f=np.ones(COUNT),
        w_f=rng.normal(size=COUNT),
        mean_e=np.zeros(dim),
        w_e=3 * rng.normal(size=dim),
        bounds=np.array([[-1.0, 1.0], [-2.0, 2.0]]),
        bias=0.1,
        calibration=np.array([1.2, -0.1]),
        curve=np.array([[0.8, 0.2, 0.99], [0.5, 0.6, 0.97], [0.2, 1.0, 0.9]]),
        passed=passed,
        report={"rows": 3},
    )


def made_classes(threshold: float = 0.5, weights: Weights | None = None) -> Classes:
    """One alias, `auto`, of `small-model` and `large-model`."""
    return Classes({"auto": Pools("small-model", "large-model")}, weights or made_weights(), threshold)


def vector_of(classes: Classes, text: str, small: bool) -> npt.NDArray[np.float32]:
    """A vector with which a text goes to the pool that is asked for."""
    for seed in range(1000):
        decision = classes.choose("auto", text, unit(seed))
        assert decision is not None
        if (decision.pool == "small") is small:
            return unit(seed)
    raise AssertionError("no such vector")


def made_decision(probability: float = 0.9, pool: str = "small", reason: str = "probability") -> ClassDecision:
    """A decision of `auto`."""
    assert pool in ("small", "large")
    return ClassDecision("auto", f"{pool}-model", pool, probability, 0.5, reason, {"chars": 1.0})  # type: ignore[arg-type]


def planted(
    subjects: int, rows: int, signal: float, seed: int = 0
) -> tuple[list[Row], dict[str, npt.NDArray[np.float32]]]:
    """Rows of one shape, so that only the vector can tell; the weak model is right where it points along an axis.

    `signal` scales the log odds; 0 is noise. Returns the rows and the vector of each text.
    """
    rng = np.random.default_rng(seed)
    axis = unit(99)
    made, vectors = [], {}
    for subject in range(subjects):
        for number in range(rows):
            text = f"Question {100 + subject}{1000 + number} about it?"
            vector = rng.normal(size=DIM)
            vector /= np.linalg.norm(vector)
            odds = signal * float(vector @ axis) * np.sqrt(DIM)
            weak = bool(rng.random() < 1 / (1 + np.exp(-odds)))
            made.append(Row("made", f"subject {subject}", text, weak, bool(rng.random() < 0.9)))
            vectors[text] = vector.astype(np.float32)
    return made, vectors


def embed_with(vectors: dict[str, npt.NDArray[np.float32]]):  # type: ignore[no-untyped-def]
    """The vectors of a table; another text has one of its own, by its hash."""

    def embed(text: str) -> npt.NDArray[np.float32]:
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        return vectors.get(text, unit(int.from_bytes(digest, "big")))

    return embed
