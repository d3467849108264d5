"""Which known tokens follow a beginning, beside a search through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from kvtide.serve.branches import Branches, common_count

TOKENS = some.lists(some.integers(0, 2), max_size=6).map(tuple)


@given(some.sets(TOKENS), some.data())
def test_closest_has_most_of_the_tokens(runs: set[tuple[int, ...]], data: some.DataObject) -> None:
    """After any additions and removals; of those that have as many the shortest."""
    branches = Branches()
    for run in runs:
        branches.add("here", run, f"{run}")
        branches.add("there", (7, *run), "another")
    for run in data.draw(some.sets(some.sampled_from([*runs])) if runs else some.just(set())):
        branches.remove("here", run, f"{run}")
        runs = runs - {run}
    tokens = data.draw(TOKENS)
    most = max((common_count(run, tokens) for run in runs), default=0)
    key, count = branches.closest("here", tokens)
    assert most == count
    assert (key is None) == (count == 0)
    assert key is None or most == common_count(next(r for r in runs if f"{r}" == key), tokens)


def test_a_run_that_fits_whole_is_preferred() -> None:
    """Another begins as well with the same tokens, but goes on in another way."""
    branches = Branches()
    branches.add("", (1, 2), "whole")
    branches.add("", (1, 2, 5), "longer")
    assert ("whole", 2) == branches.closest("", (1, 2, 3))


def test_nothing_is_left_of_what_is_removed() -> None:
    """A cache that runs for months forgets as much as it learns."""
    branches = Branches()
    branches.add("a", (1,), "x")
    branches.remove("a", (1,), "x")
    assert not branches._after
