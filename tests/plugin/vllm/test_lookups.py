"""What a tier over a network has, asked without holding up the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from kvtide.errors import TierRetry
from kvtide.plugin.vllm.lookups import Lookups
from kvtide.plugin.vllm.timely import TimelyThreads
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier import Tier

A, B = b"a", b"b"


class AskedTier(Tier):
    """A tier that has `names`, and answers when `goes_on` is set."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.questions: list[list[str]] = []
        self.has_begun, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self.failure: Exception | None = None

    def contains(self, key: str) -> bool:
        """See Tier."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """See Tier."""
        self.questions.append(list(keys))
        self.has_begun.set()
        self.goes_on.wait(60)
        if self.failure is not None:
            raise self.failure
        return [key in self.names for key in keys]

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """Takes nothing."""

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """Has nothing."""
        raise TierRetry("only asked")

    def remove(self, key: str) -> None:
        """Has nothing."""


@pytest.fixture
def now() -> list[float]:
    """The time, which a test sets."""
    return [0.0]


@pytest.fixture
def tier() -> AskedTier:
    """A tier that has a block named `a`."""
    return AskedTier("a")


@pytest.fixture
def lookups(tier: AskedTier, now: list[float]) -> Iterator[Lookups]:
    """The lookups of a scheduler."""
    with closing(Lookups(tier, TimelyThreads(1, 60, lambda: now[0]))) as lookups:
        yield lookups


def asked(lookups: Lookups, *keys: bytes, req_id: str = "r") -> list[bool | None]:
    """What is answered at this moment."""
    return [lookups.ask(req_id, key, key.decode()) for key in keys]


class TestLookups:
    def test_answer_in_a_later_step_and_ask_once(self, lookups: Lookups, tier: AskedTier) -> None:
        assert [None, None] == asked(lookups, A, B)
        lookups.flush()
        lookups.wait(60)
        for _ in range(3):
            assert [True, False] == asked(lookups, A, B)
            lookups.flush()
        assert [["a", "b"]] == tier.questions

    def test_answer_as_soon_as_the_tier_does(self, lookups: Lookups) -> None:
        """The step after the question has the answer, if it has come."""
        asked(lookups, A)
        lookups.flush()
        assert lookups._threads.wait([question.job for question in lookups._questions], 60)
        assert [True] == asked(lookups, A)

    def test_ask_again_for_a_new_request(self, lookups: Lookups, tier: AskedTier) -> None:
        """Another machine may have written the block since."""
        asked(lookups, B)
        lookups.flush()
        lookups.wait(60)
        assert [False] == asked(lookups, B)
        lookups.forget("r")
        tier.names = ("b",)
        assert [None] == asked(lookups, B)
        lookups.flush()
        lookups.wait(60)
        assert [True] == asked(lookups, B)

    def test_take_what_the_tier_did_not_give_for_missing(self, lookups: Lookups) -> None:
        """Otherwise a request would ask for it for ever."""
        asked(lookups, A)
        lookups.flush()
        lookups.mark_missing([A])
        lookups.wait(60)
        assert [False] == asked(lookups, A)

    def test_keep_nothing_of_a_request_that_has_ended(self, lookups: Lookups) -> None:
        """Nobody asks for its answer any more, which comes all the same."""
        asked(lookups, A)
        lookups.flush()
        lookups.forget("r")
        lookups.wait(60)
        lookups.flush()
        assert ([], {}) == (lookups._questions, lookups._answers)

    def test_of_a_tier_that_hangs_find_nothing_until_it_answers(
        self, lookups: Lookups, tier: AskedTier, now: list[float]
    ) -> None:
        tier.goes_on.clear()
        asked(lookups, A)
        lookups.flush()
        tier.has_begun.wait(60)
        lookups.flush()
        assert [None] == asked(lookups, A)
        now[0] = 61
        lookups.flush()
        assert [False] == asked(lookups, A)
        assert [None] == asked(lookups, A, req_id="s")
        lookups.flush()
        assert [False] == asked(lookups, A, req_id="s")
        assert 1 == len(tier.questions)
        tier.goes_on.set()

    @pytest.mark.parametrize("failure", [TierRetry("away"), RuntimeError("broken")])
    def test_of_a_tier_that_fails_find_nothing(
        self, failure: Exception, lookups: Lookups, tier: AskedTier
    ) -> None:
        tier.failure = failure
        asked(lookups, A)
        lookups.flush()
        lookups.wait(60)
        assert [False] == asked(lookups, A)
