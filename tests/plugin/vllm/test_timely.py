"""Calls of a tier that may hang: what is late, and what waits behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvtide.plugin.vllm.timely import TimelyJob, TimelyThreads


class Call:
    """A call that ends when it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        self.goes_on.wait(60)
        return "answer"


@pytest.fixture
def now() -> list[float]:
    """The time, which a test sets."""
    return [0.0]


@pytest.fixture
def threads(now: list[float]) -> Iterator[TimelyThreads]:
    """A single thread."""
    with closing(TimelyThreads(1, 60, lambda: now[0])) as threads:
        yield threads


def started(threads: TimelyThreads, call: Call) -> TimelyJob[str]:
    """The call as a job, which isn't refused."""
    job = threads.start(call)
    assert job is not None
    return job


class TestTimelyThreads:
    def test_fail_what_takes_too_long_and_what_waits_behind_it(
        self, threads: TimelyThreads, now: list[float]
    ) -> None:
        calls = Call(), Call()
        jobs = [started(threads, call) for call in calls]
        calls[0].has_begun.wait(60)
        assert [False, False] == [threads.has_failed(job) for job in jobs]
        now[0] = 61
        assert [True, True] == [threads.has_failed(job) for job in jobs]
        calls[0].goes_on.set()

    def test_count_the_time_from_when_a_thread_begins(
        self, threads: TimelyThreads, now: list[float]
    ) -> None:
        calls = Call(), Call()
        jobs = [started(threads, call) for call in calls]
        calls[0].has_begun.wait(60)
        now[0] = 40
        calls[0].goes_on.set()
        calls[1].has_begun.wait(60)
        now[0] = 80
        assert not threads.has_failed(jobs[1])
        calls[1].goes_on.set()
        assert ["answer", "answer"] == [job.wait() for job in jobs]

    @pytest.mark.parametrize("is_dropped", [False, True])
    def test_begin_nothing_until_the_late_call_ends(
        self, is_dropped: bool, threads: TimelyThreads, now: list[float]
    ) -> None:
        """A call that nobody waits for any more keeps a thread as well."""
        call, other = Call(), Call()
        job = started(threads, call)
        call.has_begun.wait(60)
        if is_dropped:
            assert not threads.drop(job)
        now[0] = 61
        if not is_dropped:
            assert threads.has_failed(job)
        assert threads.start(other) is None
        call.goes_on.set()
        assert "answer" == job.wait()
        other.goes_on.set()
        assert "answer" == started(threads, other).wait()

    def test_drop_what_waits_for_a_thread_so_that_it_never_begins(
        self, threads: TimelyThreads
    ) -> None:
        call, other = Call(), Call()
        started(threads, call)
        call.has_begun.wait(60)
        assert threads.drop(started(threads, other))
        call.goes_on.set()
        threads.close()
        assert not other.has_begun.is_set()

    def test_wait_for_all_or_for_so_long(self, threads: TimelyThreads) -> None:
        call = Call()
        job = started(threads, call)
        assert not threads.wait([job], 0.01)
        call.goes_on.set()
        assert threads.wait([job], 60)
