"""The visible part of a text that grows, with stop strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtide.server.answers import visible_length

TEXTS = st.text("ab", max_size=12)


@given(st.lists(TEXTS, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_step_looks_at_what_is_new_alone(parts: list[str], stops: list[str]) -> None:
    """It finds the same as a look at the whole text."""
    text, seen = "", 0
    for part in parts:
        text += part
        seen = visible_length(text, stops, seen)
        assert visible_length(text, stops) == seen


def test_what_was_visible_is_looked_at_no_more() -> None:
    """However long the stop strings are, a step's work is that of its new text."""
    assert 3 == visible_length("abab", ["babab"], 3)
