"""Who waits for a tier, and for how long; the clock is the test's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import cast

import pytest

from kvtide.serve import seeker as seeker_module
from kvtide.serve.request import Request
from kvtide.serve.seeker import Seeker, Sought
from kvtide.tier import Spill


class FakeSearch:
    """A search for `names`, which finds them all, and ends when the test says so."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.is_over = False

    def has_ended(self) -> bool:
        return self.is_over


class FakeSpill:
    """Notes what is searched for."""

    def __init__(self) -> None:
        self.searches: list[FakeSearch] = []

    def seek(self, names: list[str], ends_at: Callable[[int], Iterable[str]]) -> FakeSearch:
        self.searches.append(FakeSearch(names))
        return self.searches[-1]

    def take(self, search: FakeSearch) -> list[str]:
        return search.names


class Bench:
    """A seeker over a fake spill; `now` is the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spill = FakeSpill()
        self.slept: list[float] = []
        self.seeker = Seeker(
            cast(Spill, self.spill), clock=lambda: self.now, sleep=self.slept.append
        )

    def found(self) -> list[object]:
        """What was found since the last call, all in one list."""
        return [name for _, names in self.seeker.found() for name in names]

    def seeks(self, request: Request, names: list[str]) -> bool:
        """Searches for a request unless that was done, and says whether it goes on."""
        if not self.seeker.has_sought(request):
            self.seeker.seek(Sought(request, 0, names, lambda _: ()))
        return self.seeker.is_seeking(request)

    def end(self, number: int) -> None:
        """Lets a search end."""
        self.spill.searches[number].is_over = True


@pytest.fixture
def bench() -> Bench:
    """A seeker that nobody has asked yet."""
    return Bench()


def test_requests_are_searched_for_one_after_another(bench: Bench) -> None:
    """Each once, and what is found is given once."""
    first, second = Request("a", [1]), Request("b", [2])
    assert bench.seeks(first, ["x", "y"])
    assert bench.seeks(second, ["z"])
    assert bench.seeks(first, ["other"])
    assert [["x", "y"]] == [search.names for search in bench.spill.searches]
    assert [] == bench.found()
    bench.end(0)
    assert ["x", "y"] == bench.found()
    assert [] == bench.found()
    assert not bench.seeks(first, ["x"])
    assert bench.seeks(second, ["z"])
    bench.end(1)
    assert not bench.seeks(second, ["z"])
    assert ["z"] == bench.found()


def test_a_request_that_has_ended_is_not_searched_for(bench: Bench) -> None:
    """The end of its search does no harm either."""
    first, second, third = (Request(name, [1]) for name in "abc")
    for request in (first, second, third):
        bench.seeks(request, [request.id])
    for request in (first, second):
        bench.seeker.forget(request)
    bench.end(0)
    assert bench.seeks(third, [])
    assert [["a"], ["c"]] == [search.names for search in bench.spill.searches]
    assert bench.seeks(first, ["again"])


def test_a_request_that_has_ended_is_kept_by_nobody(bench: Bench) -> None:
    """However long the search before it takes: its prompt and its answer are large."""
    bench.seeks(Request("hung", [1]), ["x"])
    ended = []
    for number in range(3):
        request = Request(str(number), [1])
        bench.seeks(request, ["y"])
        bench.seeker.forget(request)
        ended.append(weakref.ref(request))
    del request
    assert [None, None, None] == [reference() for reference in ended]


def test_a_request_waits_for_each_block_a_while(bench: Bench) -> None:
    """Each block that comes in time gives it as long for the next."""
    request = Request("a", [1])
    for _ in range(3):
        assert bench.seeker.may_wait(request, "x")
        bench.now += seeker_module._PATIENCE_S
        assert bench.seeker.may_wait(request, "x")
        bench.seeker.note_progress(request)
    assert bench.seeker.may_wait(request, "x")
    bench.now += seeker_module._PATIENCE_S + 0.1
    assert not bench.seeker.may_wait(request, "x")


def test_a_wait_that_has_ended_is_not_counted_to_the_next(bench: Bench) -> None:
    """A search found nothing, or a block was computed after all: the next block gets its time."""
    request = Request("a", [1])
    for awaited in (None, "x", "y"):
        assert bench.seeker.may_wait(request, awaited)
        bench.now += 5 * seeker_module._PATIENCE_S
    assert bench.seeker.may_wait(Request("b", [1]), "z")


def test_after_a_slow_block_nobody_waits_for_some_time(bench: Bench) -> None:
    """So a slow tier costs one request its patience, not each of them."""
    first, second = Request("a", [1]), Request("b", [1])
    bench.seeker.may_wait(first, "x")
    bench.now += seeker_module._PATIENCE_S + 0.1
    assert not bench.seeker.may_wait(first, "x")
    assert not bench.seeker.may_wait(second, "y")
    bench.now += seeker_module._REST_S
    assert bench.seeker.may_wait(second, "y")


def test_a_new_search_is_glanced_at_once(bench: Bench) -> None:
    """Most tiers answer at once; those in line behind it aren't waited for."""
    bench.seeks(Request("a", [1]), ["x"])
    bench.seeks(Request("b", [1]), ["x"])
    assert 1 == len(bench.slept)
