from __future__ import annotations

from kvtide.errors import shortened


def test_long_texts_are_cut_to_the_length_given() -> None:
    """Texts of files and of people may have any length, but an error must stay one line."""
    assert "a" * 40 == shortened("a" * 40)
    assert "a" * 37 + "..." == shortened("a" * 41)
    assert "a" * 77 + "..." == shortened("a" * 100, 80)
