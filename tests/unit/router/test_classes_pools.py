"""From prompt to pool: settings, sessions, pools that are not served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from classes_kit import made_classes, made_weights, unit, vector_of
from kvmesh.config import RouterSettings
from kvmesh.errors import FailedPrecondition
from services.router.classes import model
from services.router.classes.pools import Classes, Pools
from services.router.classes.sessions import Sessions

TEXT = "How do tides work?"
MODELS = {"small": "small-model", "large": "large-model"}


def _settings(**kwargs: object) -> RouterSettings:
    return RouterSettings(**{"embedder": "hash", **kwargs})  # type: ignore[arg-type]


def test_the_probability_chooses_and_the_decision_tells() -> None:
    classes = made_classes()
    for small in (True, False):
        decision = classes.choose("auto", TEXT, vector_of(classes, TEXT, small))
        assert decision is not None
        assert decision.pool == ("small" if small else "large")
        assert decision.model == MODELS[decision.pool]
        assert (decision.probability >= decision.threshold) is small
        assert decision.reason == "probability"
        assert decision.features["questions"] > 0


def test_a_name_without_classes_is_left_alone() -> None:
    classes = made_classes()
    assert classes.choose("small-model", TEXT, unit(1)) is None
    assert classes.choose("other", TEXT, unit(1)) is None
    assert not classes.has("large-model")
    off = Classes.from_settings(_settings())
    assert off.choose("auto", TEXT, unit(1)) is None
    assert off.aliases == {}


@pytest.mark.parametrize("vector", [None, np.full(32, np.nan, np.float32), unit(1, 384)], ids=["none", "nan", "other"])
def test_without_a_vector_the_large_pool(vector: object) -> None:
    decision = made_classes(threshold=0.0).choose("auto", TEXT, vector)  # type: ignore[arg-type]
    assert decision is not None
    assert (decision.pool, decision.reason, decision.probability) == ("large", "no_vector", 0.0)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["", "s1", "s2"]),
            st.one_of(st.none(), st.integers(0, 30)),
            st.sampled_from([None, "both", "small", "large", "neither"]),
        ),
        max_size=25,
    )
)
def test_sessions_go_up_only_and_no_foreign_model_is_named(
    steps: list[tuple[str, str, int | None, str | None]],
) -> None:
    classes = made_classes()
    last: dict[tuple[str, str], str] = {}
    for tenant, session, seed, serving in steps:
        served = {None: None, "both": set(MODELS.values()), "neither": {"x"}}.get(serving, {MODELS.get(serving or "")})
        vector = None if seed is None else unit(seed)
        decision = classes.choose("auto", TEXT, vector, session, tenant, served)  # type: ignore[arg-type]
        assert decision is not None
        assert decision.model == MODELS[decision.pool]
        assert 0.0 <= decision.probability <= 1.0
        if serving in MODELS:
            assert decision.pool == serving
        elif session:
            assert not (last.get((tenant, session)) == "large" and decision.pool == "small")
        if session and not (serving == "small" and decision.reason == "not_served"):
            last[tenant, session] = decision.pool


def test_a_session_of_one_tenant_says_nothing_about_anothers() -> None:
    classes = made_classes()
    large, small = vector_of(classes, TEXT, False), vector_of(classes, TEXT, True)
    for tenant, vector, pool in (("a", large, "large"), ("a", small, "large"), ("b", small, "small")):
        decision = classes.choose("auto", TEXT, vector, "s", tenant)
        assert decision is not None
        assert decision.pool == pool


def test_a_late_vector_does_not_lift_a_session() -> None:
    classes = made_classes()
    small = vector_of(classes, TEXT, True)
    for vector in (small, None, small):
        decision = classes.choose("auto", TEXT, vector, "s", "a")
        assert decision is not None
        assert decision.pool == "small"


def test_sessions_are_bounded_and_end() -> None:
    now = 0.0
    sessions = Sessions(10.0, limit=3, clock=lambda: now)
    for name in "abcd":
        sessions.keep(("t", name, "auto"), large=name == "d")
    assert len(sessions) == 3
    assert sessions.is_large(("t", "a", "auto")) is None
    assert sessions.is_large(("t", "b", "auto")) is False
    now = 9.0
    sessions.keep(("t", "d", "auto"), large=False)
    assert sessions.is_large(("t", "d", "auto")) is True
    now = 10.0
    assert sessions.is_large(("t", "b", "auto")) is None
    assert sessions.is_large(("t", "d", "auto")) is True
    now = 19.0
    assert sessions.is_large(("t", "d", "auto")) is None


@pytest.mark.parametrize(
    "entry", ["auto", "auto=", "auto=a", "auto=a|", "auto=|b", "auto=a|a", "auto=a|b|c", "=a|b", "a=a|b"]
)
def test_pools_that_are_none(entry: str) -> None:
    with pytest.raises(ValidationError, match="small model"):
        _settings(classes=[entry])


def test_an_alias_has_classes_once() -> None:
    with pytest.raises(ValidationError, match="twice"):
        _settings(classes="auto=a|b,auto=c|d")
    pools = _settings(classes="auto = a | b,fast=c|d").class_pools
    assert pools == {"auto": ("a", "b"), "fast": ("c", "d")}


def test_from_settings(tmp_path: Path) -> None:
    proven, unproven = tmp_path / "proven.npz", tmp_path / "unproven.npz"
    proven.write_bytes(model.dump(made_weights(dim=384)))
    unproven.write_bytes(model.dump(made_weights(dim=384, passed=False)))
    classes = Classes.from_settings(_settings(classes="auto=a|b", class_weights=proven))
    assert classes.threshold == pytest.approx(0.5)
    assert classes.aliases == {"auto": "b"}
    quality = Classes.from_settings(_settings(classes="auto=a|b", class_weights=proven, class_quality=0.999))
    assert quality.threshold > 1.0
    decision = quality.choose("auto", TEXT, unit(1, 384))
    assert decision is not None
    assert decision.pool == "large"
    told = Classes.from_settings(_settings(classes="auto=a|b", class_weights=proven, class_threshold=0.7))
    assert told.threshold == 0.7
    with pytest.raises(FailedPrecondition, match="class_unproven"):
        Classes.from_settings(_settings(classes="auto=a|b", class_weights=unproven))
    Classes.from_settings(_settings(classes="auto=a|b", class_weights=unproven, class_unproven=True))
    with pytest.raises(FailedPrecondition, match="embedder"):
        Classes.from_settings(_settings(classes="auto=a|b", class_weights=proven, embedder="none"))
    with pytest.raises(FailedPrecondition, match="semantic"):
        Classes.from_settings(_settings(classes="auto=a|b", class_weights=proven, cache="exact"))
    with pytest.raises(FailedPrecondition, match="'minilm'"):
        Classes.from_settings(_settings(classes="auto=a|b", class_weights=proven, embedder="minilm"))


def test_the_packages_weights_load() -> None:
    weights = model.load(model.FILE, embedder="minilm", dim=384)
    assert model.FILE.stat().st_size < 64 << 10
    classes = Classes({"auto": Pools("s", "l")}, weights, 0.5)
    decision = classes.choose("auto", TEXT, unit(1, 384))
    assert decision is not None
    assert 0.0 < decision.probability < 1.0
