"""Branches: which tokens are known to follow a beginning."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import final


@final
class Branches:
    """Runs of tokens by the key of what is before them. A run has a key of its own.

    Runs that begin alike stand side by side in their order. So the run that has most of a prompt's
    tokens is one of the two between which the prompt's tokens would stand.
    """

    def __init__(self) -> None:
        self._after: dict[str, list[tuple[tuple[int, ...], str]]] = {}

    def add(self, parent: str, tokens: tuple[int, ...], key: str) -> None:
        """Takes a run that follows what has the key `parent`."""
        insort(self._after.setdefault(parent, []), (tokens, key))

    def remove(self, parent: str, tokens: tuple[int, ...], key: str) -> None:
        """Forgets a run that was added."""
        runs = self._after[parent]
        del runs[bisect_left(runs, (tokens, key))]
        if not runs:
            del self._after[parent]

    def closest(self, parent: str, tokens: tuple[int, ...]) -> tuple[str | None, int]:
        """The key of a run that begins with the most of `tokens`, and with how many.

        None and 0 if no run begins with the first of them.
        """
        runs = self._after.get(parent, [])
        place = bisect_left(runs, (tokens, ""))
        near = runs[max(0, place - 1) : place + 1]
        counts = [(common_count(run, tokens), -len(run), key) for run, key in near]
        count, _, key = max(counts, default=(0, 0, ""))
        return (key, count) if count else (None, 0)


def common_count(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """With how many equal tokens both begin."""
    pairs = zip(first, second, strict=False)
    least = min(len(first), len(second))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), least)
