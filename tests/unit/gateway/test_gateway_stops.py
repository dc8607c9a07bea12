from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stops import StopMatcher

ALPHABET = "ab¤🎉"
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=0, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character over the whole text: the first end at which any stop is complete, the longest of them."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def chunks(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(st.text(ALPHABET, max_size=30), stop_lists, st.lists(st.integers(0, 1000), max_size=12))
def test_equals_the_reference_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    expected, expected_stop = reference(text, stops)
    shown = ""
    for chunk in chunks(text, cuts):
        piece, stop = matcher.push(chunk)
        shown += piece
        # Never more than the final output: nothing of a stop string leaks, not even for a moment.
        assert expected.startswith(shown)
        if stop is not None:
            break
    assert matcher.stopped == expected_stop
    if expected_stop is None:
        # What is held back could still become a stop string, and nothing more than that is held back.
        assert any(stop.startswith(matcher.held) for stop in stops) or matcher.held == ""
        shown += matcher.flush()
    assert shown == expected


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["</s>"], ["a</", "s", ">b"], ["a", "", ""]),
        (["aab"], ["aa", "a", "b"], ["", "a", ""]),
        (["\n\n"], ["x\n", "y"], ["x", "\ny"]),
    ],
)
def test_holds_back_exactly_what_may_become_a_stop(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece).text for piece in pieces] == shown
