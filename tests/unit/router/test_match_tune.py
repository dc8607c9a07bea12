"""Tuning τ on a labelled file, and the files of words and weights that the judge reads."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from kvmesh.errors import FailedPrecondition, InvalidArgument
from services.router.match import Rules, lexicon, verifier
from services.router.match.tune import Point, main, plot, read_file, read_labels, recommend, sweep, table
from services.router.match.wilson import wilson
from services.router.near.embedder import HashEmbedder

GOOD = [
    {"asked": "How do I reset my password?", "remembered": "how to reset my password", "same": True},
    {"asked": "How do I lock the door?", "remembered": "How do I unlock the door?", "same": False},
]


def lines(*rows: object) -> list[str]:
    return [row if isinstance(row, str) else json.dumps(row) for row in rows]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 3: no JSON"),
        ("[" * 100_000, "line 3: no JSON"),
        ([1], "line 3: not an object"),
        ({"asked": "a", "remembered": "b"}, "line 3: same must be"),
        ({"asked": "a", "remembered": "b", "same": 1}, "line 3: same must be"),
        ({"asked": "", "remembered": "b", "same": True}, "line 3: asked must be"),
        ({"asked": "a", "remembered": 5, "same": True}, "line 3: remembered must be"),
        ({"asked": "a", "remembered": "b" * 5000, "same": True}, "line 3: remembered has 5000"),
        ({"asked": "a", "remembered": "\ud800", "same": True}, "line 3: remembered is not valid"),
        ({"asked": "a", "remembered": "b", "same": True, "tau": 1}, "line 3: unknown field 'tau'"),
    ],
)
def test_a_bad_row_is_named(row: object, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        read_labels(lines(*GOOD, row, *GOOD))


def test_a_file_of_one_kind_or_none_is_refused(tmp_path: Path) -> None:
    for rows in ([], GOOD[:1], GOOD[1:]):
        with pytest.raises(InvalidArgument, match="needs pairs"):
            read_labels(lines(*rows))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_file(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_file(tmp_path / "bytes.jsonl")


def test_the_sweep_counts_what_would_be_served() -> None:
    points = sweep(read_labels(lines(*GOOD)), HashEmbedder(), Rules(frozenset(), 0.0), (0.99, 0.5))
    assert points == [Point(0.5, 1, 1, 1, 1), Point(0.99, 0, 1, 0, 1)]
    guarded = sweep(read_labels(lines(*GOOD)), HashEmbedder(), Rules(threshold=0.0), (0.5,))
    assert guarded == [Point(0.5, 1, 1, 0, 1)]
    with pytest.raises(InvalidArgument):
        sweep(read_labels(lines(*GOOD)), HashEmbedder(), taus=(1.5,))


def test_the_recommended_point_is_safe_there_and_above() -> None:
    points = [Point(0.6, 90, 100, 0, 100), Point(0.7, 80, 100, 5, 100), Point(0.8, 70, 100, 1, 100)]
    points.append(Point(0.9, 40, 100, 0, 100))
    assert recommend(points, 0.01) == points[2]
    assert recommend(points, 0.0) == points[3]
    assert recommend(points, 0.05) == points[0]
    assert recommend([Point(0.9, 1, 1, 1, 1)], 0.01) is None


def test_the_plot_is_a_drawing_whatever_the_title() -> None:
    points = [Point(0.6, 90, 100, 5, 100), Point(0.9, 40, 100, 0, 100)]
    root = ET.fromstring(plot(points, "<acme> & co\x00"))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert "90/100" in table(points)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, drawing = tmp_path / "labels.jsonl", tmp_path / "curve.svg"
    file.write_text("\n".join(lines(*GOOD)))
    options = [str(file), "--embedder", "hash", "--threshold", "0", "--tenant", "acme", "--plot", str(drawing)]
    assert main(options) == 0
    assert "recommended for tenant acme: τ = " in capsys.readouterr().out
    assert drawing.read_text().startswith("<svg")
    assert main([*options[:3], "--threshold", "0", "--no-guards", "--target", "0", "--plot", str(tmp_path)]) == 2
    assert main([str(file), "--embedder", "hash", "--target", "7"]) == 2
    drawing.unlink()
    file.write_text("\n".join(lines(*GOOD, "nonsense")))
    assert main(options) == 2
    assert "line 3" in capsys.readouterr().err
    assert not drawing.exists()


def test_wilson_intervals() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert [round(bound, 3) for bound in wilson(6, 300)] == [0.009, 0.043]
    assert wilson(0, 100)[0] == 0.0
    assert wilson(100, 100)[1] == 1.0


# --- files ------------------------------------------------------------------------------------------------------


def stored(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def test_weights_that_cannot_be_used_are_told_apart(tmp_path: Path) -> None:
    good, path = stored(verifier.FILE), tmp_path / "verifier.npz"

    def refused(says: str, **changes: np.ndarray) -> None:
        np.savez(path, **(good | changes))
        with pytest.raises(FailedPrecondition, match=says):
            verifier.Verifier(path)

    refused("not of version", version=np.array(99, dtype=np.int32))
    refused("other features", names=good["names"][::-1])
    refused("weights has shape", weights=good["weights"][:-1])
    refused("not finite", weights=np.full_like(good["weights"], np.nan))
    refused("not positive", scale=np.zeros_like(good["scale"]))
    refused("is float32", weights=good["weights"].astype(np.float32))
    refused("cannot be read", mean=np.array([{"a": 1}], dtype=object))
    np.savez(path, **good)
    verifier.Verifier(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        verifier.Verifier(path)
    path.write_bytes(bytes(verifier.MAX_BYTES + 1))
    with pytest.raises(FailedPrecondition, match="at most"):
        verifier.Verifier(path)
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        verifier.Verifier(tmp_path / "none.npz")
    np.savez_compressed(path, **(good | {"more": np.zeros(1 << 20)}))
    with pytest.raises(FailedPrecondition, match="unpacks to"):
        verifier.Verifier(path)


def test_a_lexicon_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    good, path = stored(lexicon.FILE), tmp_path / "lexicon.npz"
    for says, changes in (
        ("not of version", {"version": np.array(99, dtype=np.int32)}),
        ("not sorted", {"words": good["words"][::-1]}),
        ("do not fit", {"sense_starts": good["sense_starts"][:-1]}),
        ("not pairs", {"antonyms": good["antonyms"].reshape(-1)}),
    ):
        np.savez_compressed(path, **(good | changes))
        with pytest.raises(FailedPrecondition, match=says):
            lexicon.Lexicon(path)


def test_rules_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="unknown guards: numerals"):
        Rules(guards=frozenset({"numerals"}))
    for threshold in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidArgument, match="threshold"):
            Rules(threshold=threshold)
