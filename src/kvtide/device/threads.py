"""The library's threads, all of them: a queue of jobs, and lanes for work side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, final

import torch

T = TypeVar("T")


@final
class JobQueue:
    """One thread that runs jobs in the order submitted.

    The thread that submits only waits: an interrupt (Ctrl-C) reaches it alone, so it ends a
    wait and never a move.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` is called once in the thread, before its first job."""
        self._thread = ThreadPoolExecutor(1, "kvtide-queue", initializer=prepare)

    def submit(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Queues `work` and returns at once."""
        job = QueuedJob(work)
        self._thread.submit(job.run)
        return job

    def close(self) -> None:
        """Waits for what was submitted; further calls are harmless."""
        self._thread.shutdown()


@final
class QueuedJob(Generic[T]):
    """See device.base.Job. One thread waits, another one runs it.

    Not a Future: an interrupt within its condition's lock can come out as another error, which
    would be taken for the job's own. A bare lock is acquired or it isn't.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._done = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def done(self) -> bool:
        """See Job."""
        return self._done

    def wait(self) -> T:
        """See Job."""
        if not self._done:
            self._gate.acquire()
            self._gate.release()  # for the next one who waits
        if self._error is not None:
            raise self._error
        return self._results[0]

    def run(self) -> None:
        """Does the work in the thread that calls, and lets go whoever waits."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        del self._work  # and with it the memory that it holds
        self._done = True
        self._gate.release()


@final
class Lanes:
    """`count` threads that work side by side; the one that calls `run` is one of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._others = ThreadPoolExecutor(max(1, count - 1), thread_name_prefix="kvtide-lane")

    def run(self, items: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all items, in order. After an error the rest are dropped, and none
        is running any more when it is raised."""
        # A deque, because its popleft is atomic: no lock for the lanes to meet at.
        left = deque(enumerate(items))
        results: dict[int, T] = {}
        others: list[Future[None]] = []
        try:
            for _ in range(min(self.count, len(items)) - 1):
                others.append(self._others.submit(drain, left, results))
            drain(left, results)
        except BaseException:
            # Also when the system has no thread to give: what was submitted finds nothing.
            left.clear()
            raise
        finally:
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error
        return [results[number] for number in range(len(items))]

    def start(self, item: Callable[[], T]) -> Future[T]:
        """Runs one item in a lane, and returns at once."""
        return self._others.submit(item)

    def close(self) -> None:
        """Waits for what was started; further calls are harmless."""
        self._others.shutdown()


def drain(items: deque[tuple[int, Callable[[], T]]], results: dict[int, T]) -> None:
    """Runs items until none is left, or one raises: then the rest are dropped.

    In inference mode, since an engine's tensors may have been made in it, and such tensors
    can't be written outside.
    """
    with torch.inference_mode():
        while True:
            try:
                number, item = items.popleft()
            except IndexError:
                return
            try:
                results[number] = item()
            except BaseException:
                items.clear()
                raise
