"""Weights: what is computed, what is refused at start."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classes_kit import DIM, made_weights, unit
from kvmesh.errors import FailedPrecondition
from services.router.classes import model
from services.router.classes.features import COUNT, NAMES, features


@given(st.text(max_size=400), st.integers(0, 50), st.integers(0, 5))
def test_a_probability_is_one_and_stays_in_the_range_of_the_bounds(text: str, vector: int, seed: int) -> None:
    weights = made_weights(seed)
    p = weights.probability(features(text), unit(vector))
    low, high = (weights.bias + sign * 3.0 for sign in (-1, 1))
    slope, offset = weights.calibration
    assert model.sigmoid(slope * low + offset) - 1e-9 <= p <= model.sigmoid(slope * high + offset) + 1e-9
    assert 0.0 < p < 1.0


@given(st.floats(allow_nan=False))
def test_sigmoid_never_overflows_and_is_symmetric(x: float) -> None:
    assert 0.0 <= model.sigmoid(x) <= 1.0
    assert model.sigmoid(x) + model.sigmoid(-x) == pytest.approx(1.0)


@given(st.text(max_size=3000))
def test_features_are_finite_and_named(text: str) -> None:
    found = features(text)
    assert found.shape == (COUNT,) == (len(NAMES),)
    assert np.isfinite(found).all()
    assert (found >= 0).all()


def test_features_see_what_they_are_named_for() -> None:
    def of(text: str) -> dict[str, float]:
        return dict(zip(NAMES, features(text), strict=True))

    plain = of("Where do penguins live in winter")
    maths = of(r"Solve $x^2 + 3y = 14$ for x, where \alpha = 2.5 m/s")
    for name in ("numbers", "operators", "latex", "units", "variables", "digits"):
        assert maths[name] > plain[name], name
    code = of("Why does `get_user(id)` fail?\n```python\nx = fooBar(1)\n```")
    for name in ("fences", "identifiers", "brackets", "lines", "questions"):
        assert code[name] > plain[name], name
    steps = of("First, do a. Then b.\n1. only one\n2. not two\n- at least three")
    for name in ("steps", "list_items", "constraints", "sentences", "clauses"):
        assert steps[name] > plain[name], name
    assert of("где живут пингвины зимой")["other_script"] == 1.0 > plain["other_script"] == 0.0
    assert of("où vivent les manchots à l'été")["accented"] > 0.0 == plain["accented"]


def test_a_megabyte_is_read_at_its_ends_only_and_counts_as_long() -> None:
    filler = "word and word. " * 70_000
    base = dict(zip(NAMES, features(filler), strict=True))
    middle = dict(zip(NAMES, features(filler[:500_000] + "$x^2$ = 3 " * 100 + filler[500_000:]), strict=True))
    assert middle["operators"] == base["operators"] == 0.0
    assert base["chars"] > np.log(1e6)
    assert features("$x = 3$ " + filler)[NAMES.index("operators")] > 0.0


def test_the_threshold_keeps_a_quality_and_does_not_look_behind_a_dip() -> None:
    weights = made_weights()
    assert weights.threshold(0.99) == 0.8
    assert weights.threshold(0.97) == 0.5
    assert weights.threshold(0.5) == 0.2
    assert weights.threshold(0.995) > 1.0
    dip = np.array([[0.8, 0.2, 0.9], [0.5, 0.6, 0.99], [0.2, 1.0, 0.9]])
    assert replace(weights, curve=dip).threshold(0.97) > 1.0


@pytest.mark.parametrize(
    "vector",
    [None, np.full(DIM, np.nan, np.float32), np.full(DIM, np.inf, np.float32), np.zeros(DIM, np.float32), unit(1, 8)],
    ids=["none", "nan", "inf", "zero", "dimension"],
)
def test_a_vector_that_is_none(vector: Any) -> None:
    assert not made_weights().usable(vector)


def test_weights_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    path.write_bytes(model.dump(made_weights(4)))
    read = model.load(path, embedder="hash", dim=DIM)
    for text, seed in (("What is 2 + 2?", 1), ("Why?", 2)):
        want = made_weights(4).probability(features(text), unit(seed))
        assert read.probability(features(text), unit(seed)) == pytest.approx(want, abs=1e-5)
    assert read.passed
    assert read.report == {"rows": 3}


def _spoiled(name: str, value: Any) -> bytes:
    """The file of good weights with one array in another's place."""
    with np.load(io.BytesIO(model.dump(made_weights())), allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    arrays[name] = value(arrays[name])
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _at(index: Any, value: float) -> Any:
    def spoil(array: Any) -> Any:
        array = array.copy()
        array[index] = value
        return array

    return spoil


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("w_f", _at(0, np.nan), "not finite"),
        ("w_e", _at(3, np.inf), "not finite"),
        ("w_e", lambda a: a[:-1], "shape"),
        ("mean_f", lambda a: a[:-1], "shape"),
        ("scale_f", _at(0, 0.0), "out of range"),
        ("w_f", lambda a: a.astype(np.float64), "float64"),
        ("w_f", lambda a: np.array([object()]), "cannot be read|float32"),
        ("bounds", lambda a: a[:, ::-1], "bound"),
        ("calibration", _at(0, -1.0), "out of range"),
        ("curve", lambda a: a[::-1], "curve"),
        ("curve", lambda a: a[:0], "curve"),
        ("head", lambda a: a[:-2], "cannot be read"),
        ("head", lambda a: np.frombuffer(a.tobytes().replace(b'"version": 1', b'"version": 9'), np.uint8), "version 9"),
    ],
)
def test_spoiled_weights_are_named(tmp_path: Path, name: str, value: Any, says: str) -> None:
    path = tmp_path / "spoiled.npz"
    path.write_bytes(_spoiled(name, value))
    with pytest.raises(FailedPrecondition, match=rf"spoiled\.npz.*({says})"):
        model.load(path, embedder="hash")


def test_other_embedders_other_dimensions_other_files(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    with pytest.raises(FailedPrecondition, match=r"w\.npz"):
        model.load(path, embedder="hash")
    good = model.dump(made_weights())
    path.write_bytes(good)
    with pytest.raises(FailedPrecondition, match="'minilm'"):
        model.load(path, embedder="minilm")
    with pytest.raises(FailedPrecondition, match="384"):
        model.load(path, embedder="hash", dim=384)
    path.write_bytes(good + b"\0" * model.MAX_BYTES)
    with pytest.raises(FailedPrecondition, match="at most"):
        model.load(path, embedder="hash")
    bomb = io.BytesIO()
    np.savez_compressed(bomb, w_f=np.zeros(8 * model.MAX_BYTES, np.uint8))
    path.write_bytes(bomb.getvalue())
    with pytest.raises(FailedPrecondition, match="unpacks"):
        model.load(path, embedder="hash")


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_random_damage_is_refused_or_harmless(at: int, junk: bytes) -> None:
    good = model.dump(made_weights())
    at %= len(good)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.npz"
        path.write_bytes(good[:at] + junk + good[at + len(junk) :])
        try:
            weights = model.load(path, embedder="hash")
        except FailedPrecondition:
            return
        assert 0.0 < weights.probability(features("What?"), unit(1)) < 1.0
