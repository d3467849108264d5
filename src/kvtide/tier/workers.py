"""Workers: threads that call tiers, since each call of a tier blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

from kvtide.device import Job
from kvtide.device.threads import QueuedJob, Threads


class Workers(Protocol):
    """Does calls of tiers outside of the caller's thread. Tests choose the order of these calls."""

    def start(self, work: Callable[[], Any]) -> Job[Any]:
        """Gives work to another thread and returns at once."""
        ...

    def settle(self, job: Job[Any], timeout_s: float) -> bool:
        """Blocks until a job of `start` has ended, at most `timeout_s`; whether it has ended."""
        ...

    def close(self, patience_s: float) -> None:
        """Waits for all work, at most `patience_s`. Repeatable."""
        ...


@final
class ThreadWorkers:
    """Workers that are `count` threads, so at most `count` moves are under way at once.

    A thread that hangs in a tier's call is replaced, so that other tiers' moves go on. The end of
    the process waits for threads at most `patience_s` together.
    """

    def __init__(self, count: int, patience_s: float) -> None:
        self._count = count
        self._threads = Threads(count, "kvtide-tier", patience_s=patience_s)
        self._hung: list[QueuedJob[Any]] = []

    def start(self, work: Callable[[], Any]) -> QueuedJob[Any]:
        """See Workers."""
        return self._threads.start(work)

    def settle(self, job: Job[Any], timeout_s: float) -> bool:
        """See Workers."""
        assert isinstance(job, QueuedJob), "a job of `start`"
        if job.settle(timeout_s):
            return True
        self._hung = [other for other in {*self._hung, job} if other.begun and not other.done()]
        self._threads.grow_to(self._count + len(self._hung))
        return job.done()

    def close(self, patience_s: float) -> None:
        """See Workers."""
        self._threads.close(patience_s)
