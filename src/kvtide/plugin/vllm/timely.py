"""TimelyThreads: threads that call a tier, and nobody waits for a call longer than a deadline.

A tier may hang, and a call that is under way can't be ended. So a call that takes too long has
failed, and keeps its thread; until it ends none begins, and those that wait for a thread have
failed, too: a disk that is away costs each request at most one deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from kvtide.device.threads import QueuedJob
from kvtide.tier.workers import ThreadWorkers

logger = logging.getLogger(__name__)

T = TypeVar("T")


@final
@dataclass(slots=True, eq=False)
class TimelyJob(Generic[T]):
    """A call that waits for a thread, is under way, or has ended; a Job of the device's kind."""

    job: QueuedJob[T]
    began: list[float]
    """When a thread began with it; empty before that."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.job.done()

    def wait(self) -> T:
        """Its result, once it has ended. Raises what it raised."""
        return self.job.wait()

    def result_or(self, otherwise: T) -> T:
        """Its result if it has ended; never waits. Raises what it raised."""
        return self.job.wait() if self.began and self.job.done() else otherwise


@final
class TimelyThreads:
    """`count` threads, each call in which may take `deadline_s` from when a thread begins with it.

    Not thread-safe: one thread starts calls and asks for their ends.
    """

    def __init__(
        self, count: int, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.deadline_s = deadline_s
        self._workers = ThreadWorkers(count, deadline_s)
        self._clock = clock
        self._late: list[TimelyJob[Any]] = []
        self._dropped: list[TimelyJob[Any]] = []
        """Calls that go on although nobody waits for them: they may be late, too."""

    def start(self, work: Callable[[], T]) -> TimelyJob[T] | None:
        """Begins a call, or lets it wait for a thread; None if the tier hangs."""
        self._look_at_dropped()
        self._late = [job for job in self._late if not job.done()]
        if self._late:
            return None
        began: list[float] = []

        def timed() -> T:
            began.append(self._clock())
            return work()

        return TimelyJob(self._workers.start(timed), began)

    def has_failed(self, job: TimelyJob[T]) -> bool:
        """Whether a call that hasn't ended is late, or waits for a thread while another is late."""
        self._look_at_dropped()
        return self._is_late(job) or bool(self._late and job.job.cancel())

    def drop(self, job: TimelyJob[T]) -> bool:
        """Nobody waits for the call any more; whether it won't begin."""
        if job.job.cancel():
            return True
        self._dropped.append(job)
        return False

    def wait(self, jobs: Iterable[TimelyJob[T]], at_most_s: float) -> bool:
        """Blocks until all calls have ended, or for so long; whether they have ended."""
        until = time.monotonic() + at_most_s
        return all(job.job.settle(max(0.0, until - time.monotonic())) for job in jobs)

    def close(self) -> None:
        """Ends the threads; waits for calls under way, together at most `deadline_s`."""
        self._workers.close(self.deadline_s)

    def _look_at_dropped(self) -> None:
        """Forgets dropped calls that have ended or are late."""
        going_on = [job for job in self._dropped if not job.done()]
        self._dropped = [job for job in going_on if not self._is_late(job)]

    def _is_late(self, job: TimelyJob[T]) -> bool:
        if not job.began or self._clock() - job.began[0] <= self.deadline_s:
            return False
        if job not in self._late:
            logger.warning("kvtide: a tier gave no answer in %.1f s", self.deadline_s)
            self._late.append(job)
        return True
