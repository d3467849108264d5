"""To which row counts a pass is padded, and how they are printed."""

from __future__ import annotations

import pytest

from kvtide.serve.batch import RowCounts


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1,), "1"),
        ((32, 64), "32, 64"),
        (tuple(range(2, 65)), "2 to 64"),
        (tuple(range(4, 65, 4)), "4 to 64 in steps of 4"),
        ((4, 8, *range(12, 65)), "4 to 12 in steps of 4, 13 to 64"),
        ((1, *range(4, 41, 4), 48, 56, 64), "1, 4 to 40 in steps of 4, 48 to 64 in steps of 8"),
    ],
)
def test_counts_are_read_as_runs(counts: tuple[int, ...], expected: str) -> None:
    """Three or more counts at equal distances are printed as a range."""
    assert expected == str(RowCounts(counts))


def test_a_pass_is_padded_to_the_next_count() -> None:
    """A pass without rows isn't padded."""
    rows = RowCounts((4, 8, 24))
    assert [0, 4, 4, 8, 24, 24] == [rows.padded(count) for count in (0, 1, 4, 5, 9, 24)]
    assert 24 == rows.most
