"""Verdicts: counted once, held against the promise, written without texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from classes_kit import made_decision
from kvmesh.config import RouterSettings
from kvmesh.errors import NotFound
from services.router.classes.feedback import MIN_WINDOW, Feedback


def test_a_decision_is_judged_once_by_either_id_and_by_its_tenant_only() -> None:
    feedback = Feedback()
    feedback.remember("a", ("client", "mesh"), made_decision())
    with pytest.raises(NotFound):
        feedback.verdict("b", "client", True)
    assert feedback.verdict("a", "client", True).pool == "small"
    for name in ("client", "mesh", "other"):
        with pytest.raises(NotFound):
            feedback.verdict("a", name, True)
    assert feedback.waiting == 0


def test_open_decisions_are_bounded_and_end() -> None:
    now = 0.0
    feedback = Feedback(limit=2, clock=lambda: now)
    for name in ("1", "2", "3", ""):
        feedback.remember("a", (name, ""), made_decision())
    assert feedback.waiting == 2
    with pytest.raises(NotFound):
        feedback.verdict("a", "1", True)
    now = 1e6
    with pytest.raises(NotFound):
        feedback.verdict("a", "3", True)


def test_the_calibration_gap_is_of_the_small_pools_probabilities() -> None:
    feedback = Feedback()
    for number in range(2 * MIN_WINDOW):
        feedback.remember("a", (f"{number}",), made_decision(0.9))
        feedback.verdict("a", f"{number}", number % 2 == 0)
        feedback.remember("a", (f"large {number}",), made_decision(0.1, "large"))
        feedback.verdict("a", f"large {number}", True)
        feedback.remember("a", (f"kept {number}",), made_decision(0.0, "small", "session"))
        feedback.verdict("a", f"kept {number}", True)
        if number < MIN_WINDOW - 1:
            assert feedback.calibration_gap() is None
    assert feedback.calibration_gap() == pytest.approx(0.4)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_texts_are_written_only_when_asked(tmp_path: Path) -> None:
    for texts in (False, True):
        path = tmp_path / f"{texts}.jsonl"
        feedback = Feedback(path, texts=texts)
        feedback.remember("a", ("1",), made_decision(), "secret\n\u2028 text")
        feedback.verdict("a", "1", False)
        (row,) = _lines(path)
        assert (row["pool"], row["probability"], row["good"], row["alias"]) == ("small", 0.9, False, "auto")
        assert row.get("text") == ("secret\n\u2028 text" if texts else None)
        assert ("secret" in path.read_text()) is texts
        assert path.stat().st_mode & 0o077 == 0
        assert "a" not in row.values()


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    feedback = Feedback(path, max_bytes=600)
    for number in range(40):
        feedback.remember("a", (f"{number}",), made_decision())
        feedback.verdict("a", f"{number}", True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.jsonl", "f.jsonl.1"]
    assert all(p.stat().st_size <= 600 for p in tmp_path.iterdir())
    assert _lines(path)


def test_a_folder_that_is_gone_fails_no_verdict(tmp_path: Path) -> None:
    feedback = Feedback(tmp_path / "gone" / "f.jsonl")
    feedback.remember("a", ("1",), made_decision())
    assert feedback.verdict("a", "1", True).pool == "small"


def test_settings_and_their_defaults(tmp_path: Path) -> None:
    settings = RouterSettings(class_feedback_file=tmp_path / "f", class_feedback_texts=True)
    feedback = Feedback.from_settings(settings)
    feedback.remember("a", ("1",), made_decision(), "text")
    feedback.verdict("a", "1", True)
    assert _lines(tmp_path / "f")[0]["text"] == "text"
    assert RouterSettings().class_feedback_file is None
    assert not RouterSettings().class_feedback_texts
    assert RouterSettings().classes == []
