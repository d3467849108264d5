"""How many leading pages of a prefix can be restored, by the pages that each pool has. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def leading(found: Sequence[bool]) -> int:
    """How many are true before the first that isn't."""
    return next((place for place, is_there in enumerate(found) if not is_there), len(found))


def with_all(found: Sequence[bool]) -> list[int]:
    """The prefixes, in pages, whose pages are all there."""
    return list(range(1, leading(found) + 1))


def with_last(found: Sequence[bool], page_count: int) -> list[int]:
    """The prefixes, in pages, whose last `page_count` pages are there, or as many as they have."""
    prefixes, run = [], 0
    for place, is_there in enumerate(found):
        run = run + 1 if is_there else 0
        if run >= min(page_count, place + 1):
            prefixes.append(place + 1)
    return prefixes
