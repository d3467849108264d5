from __future__ import annotations

from kvtide.errors import shortened


def test_long_texts_are_cut_to_the_length_given() -> None:
    """A file's or a person's text may be of any length; an error is one line."""
    assert "a" * 40 == shortened("a" * 40)
    assert "a" * 37 + "..." == shortened("a" * 41)
    assert "a" * 77 + "..." == shortened("a" * 100, 80)
