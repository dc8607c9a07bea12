"""Training finds a signal that was planted, refuses noise, and no figure has seen what it judges."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from classes_kit import DIM, embed_with, planted, unit
from services.router.classes import model
from services.router.classes.features import features
from tools.training import train_complexity
from tools.training.complexity import fit, judge, train
from tools.training.complexity.labels import Row


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "REPLICATES", 200)
    monkeypatch.setattr(train, "OUTER_FOLDS", 5)
    # So few rows show .05 by chance alone.
    monkeypatch.setattr(train, "MAX_ECE", 0.12)


def _args(path: Path, *more: str) -> argparse.Namespace:
    return train_complexity.parser().parse_args(
        ["labels", "--embedder", "hash", "--judge", "all", "--out", str(path), *more]
    )


def test_a_planted_signal_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, vectors = planted(14, 40, 2.5)
    path, plot = tmp_path / "w.npz", tmp_path / "p.svg"
    assert train_complexity.run(rows, embed_with(vectors), _args(path, "--plot", str(plot))) == 0
    assert "MET" in capsys.readouterr().out
    weights = model.load(path, embedder="hash", dim=DIM)
    assert weights.passed
    axis = unit(99)
    text = rows[0].text
    assert weights.probability(features(text), axis) > 0.8 > 0.2 > weights.probability(features(text), -axis)
    assert weights.report["auc"]["classifier"] > 0.75 > weights.report["auc"]["features"]
    assert plot.read_text().count("<polyline") == 4


def test_noise_ships_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, vectors = planted(14, 40, 0.0, seed=3)
    path = tmp_path / "w.npz"
    assert train_complexity.run(rows, embed_with(vectors), _args(path)) == 3
    assert "NOT MET" in capsys.readouterr().out
    assert not path.exists()


def test_weights_that_miss_the_rule_are_marked(tmp_path: Path) -> None:
    rows, vectors = planted(8, 30, 0.0, seed=3)
    path = tmp_path / "w.npz"
    assert train_complexity.run(rows, embed_with(vectors), _args(path, "--unproven")) == 3
    assert not model.load(path, embedder="hash").passed


def test_what_differs_between_subjects_only_is_no_signal_for_a_new_one() -> None:
    """Each subject has a rate and a direction of its own: folds of rows would see that, folds of subjects do not."""
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(16), 30)
    centres = np.array([unit(200 + g) for g in range(16)])
    e = centres[groups] + 0.1 * rng.normal(size=(len(groups), DIM))
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    rates = np.where(np.arange(16) % 2, 0.9, 0.2)
    y = (rng.random(len(groups)) < rates[groups]).astype(float)
    data = fit.Data(np.zeros((len(groups), len(features("")))), e, y, groups)
    held = train.held_out(data, models=("classifier",)).probabilities["classifier"]
    mixed = fit.Data(data.x, e, y, np.arange(len(groups)))
    leaky = train.held_out(mixed, models=("classifier",)).probabilities["classifier"]
    assert judge.auc(y, leaky) > 0.8
    assert judge.auc(y, held) < 0.7


def test_folds_hold_whole_subjects() -> None:
    groups = np.random.default_rng(0).integers(0, 13, 300)
    fold = fit.folds(groups, 5, 1)
    for g in range(13):
        assert len(set(fold[groups == g])) == 1
    assert set(fold) == set(range(5))
    assert (fit.folds(groups, 5, 1) == fold).all()


def test_nuisance_directions_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    e, directions = rng.normal(size=(50, DIM)), rng.normal(size=(3, DIM))
    cleaned = fit.without(e, directions)
    assert np.abs(cleaned @ directions.T).max() < 1e-9
    assert fit.without(cleaned, directions) == pytest.approx(cleaned)
    rows, vectors = planted(10, 25, 2.0)
    table = train.table(rows, embed_with(vectors))
    one = fit.fit(table.data, columns=(), use_vector=True)
    axes = train._nuisance(rows, embed_with(vectors))
    assert axes.shape == (train.NUISANCE_DIRECTIONS, DIM)
    assert np.abs(axes @ one.w_e).max() < 1e-6 * np.linalg.norm(one.w_e) + 1e-9


def test_rows_that_are_too_few_or_have_no_vector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, vectors = planted(4, 60, 2.0)
    assert train_complexity.run(rows, embed_with(vectors), _args(tmp_path / "w.npz")) == 2
    assert "240 rows of 4 subjects" in capsys.readouterr().err
    table = train.table(rows, lambda text: None if text == rows[0].text else unit(1))
    assert table.dropped == 1
    with pytest.raises(ValueError, match="no row"):
        train.table(rows, lambda text: None)


def test_auc_and_ties() -> None:
    y = np.array([0.0, 0, 1, 1])
    assert judge.auc(y, np.array([0.1, 0.2, 0.3, 0.4])) == 1.0
    assert judge.auc(y, np.array([0.4, 0.3, 0.2, 0.1])) == 0.0
    assert judge.auc(y, np.full(4, 0.5)) == 0.5
    assert judge.auc(y, np.array([0.1, 0.3, 0.3, 0.4])) == 0.875
    assert np.isnan(judge.auc(np.ones(3), np.arange(3.0)))
    rng = np.random.default_rng(0)
    y, p = (rng.random(200) < 0.4).astype(float), rng.integers(0, 20, 200) / 20
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y == 1] for b in p[y == 0]]
    assert judge.auc(y, p) == pytest.approx(np.mean(pairs))


def test_calibration_error() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(5000)
    y = (rng.random(5000) < p).astype(float)
    assert judge.ece(y, p) < 0.03
    assert judge.ece(y, np.clip(p + 0.2, 0, 1)) == pytest.approx(0.18, abs=0.03)
    assert judge.ece_floor(p) == pytest.approx(judge.ece(y, p), abs=0.02)


def test_platt_keeps_the_order_or_gives_up() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=2000)
    y = (rng.random(2000) < fit.sigmoid(0.5 * z - 0.3)).astype(float)
    assert fit.platt(z, y) == pytest.approx([0.5, -0.3], abs=0.12)
    slope, offset = fit.platt(-z, y)
    assert slope == 0.0
    assert fit.sigmoid(np.array([offset]))[0] == pytest.approx(y.mean())


def test_the_curve_counts_what_is_sent() -> None:
    rng = np.random.default_rng(1)
    p = rng.integers(1, 30, 300) / 30
    weak, strong = (rng.random(300) < p).astype(float), (rng.random(300) < 0.9).astype(float)
    line = judge.curve(p, weak, strong)
    for threshold, share, quality in line:
        sent = p >= threshold
        assert share == pytest.approx(sent.mean())
        assert quality == pytest.approx((weak[sent].sum() + strong[~sent].sum()) / strong.sum())
    assert (np.diff(line[:, 0]) < 0).all()
    assert (np.diff(line[:, 1]) > 0).all()
    assert line[-1, 1] == 1.0
    share, threshold = judge.share_at(line, 0.95)
    assert line[line[:, 0] == threshold][0, 1] == share
    assert (p >= judge.threshold_for_cost(line, 0.4)).mean() >= 0.6
    table = judge.confusion(p, weak, 0.5)
    assert sum(right + wrong for _, right, wrong in table) == 300
    assert table[0][1] == ((p >= 0.5) & (weak == 1)).sum()


def test_a_gain_pays_for_the_better_baseline() -> None:
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(20), 30)
    y = (rng.random(600) < 0.5).astype(float)
    good, noise = y + rng.normal(size=600), [rng.normal(size=600), rng.normal(size=600)]
    won = judge.gain(y, good, noise, groups)
    assert won.low > 0.1
    assert won.low < won.difference < won.high
    lost = judge.gain(y, noise[0], [good, noise[1]], groups)
    assert lost.high < 0.0


def test_the_gap_kept_is_half_at_random_and_more_by_a_good_order() -> None:
    rng = np.random.default_rng(4)
    groups = np.repeat(np.arange(20), 40)
    weak = (rng.random(800) < 0.6).astype(float)
    strong = np.ones(800)
    for p, low, high in ((rng.random(800), 0.4, 0.6), (weak + 0.1 * rng.random(800), 0.75, 1.0)):
        kept = judge.recovered(judge.curve(p, weak, strong), weak, strong)
        interval = judge.recovered_interval(p, weak, strong, groups)
        assert low < kept < high
        assert interval[0] < kept < interval[1]


def test_the_targets() -> None:
    rows = [Row("s", f"{i}", f"text {i}", bool(i & 1), bool(i & 2)) for i in range(4)]
    table = train.table(rows, lambda text: unit(len(text)))
    assert table.labels("right").tolist() == [0, 1, 0, 1]
    assert table.labels("no_worse").tolist() == [1, 1, 0, 1]
