"""The library's threads, all of them: a queue of jobs, and lanes for work side by side.

There are no locks that a signal's handler (Ctrl-C) could leave locked, or a fork: what must happen
at once is one call of C, on a deque or a dict.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, final

from kvtide.atomic import take_out
from kvtide.errors import ProcessForked, to_keep, to_raise

T = TypeVar("T")
_Work = Callable[[], None]


@final
class Threads:
    """`count` threads that take work from one queue, in order.

    Not an executor: an interrupt (Ctrl-C) may come while the main thread hands out work, and would
    leave an executor's lock locked for ever. A SimpleQueue has none that Python code holds.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._start()

    def _start(self) -> None:
        work: SimpleQueue[_Work | None] = SimpleQueue()
        threads = [
            threading.Thread(target=_take, args=(work,), name=f"{self._name}_{number}", daemon=True)
            for number in range(self._count)
        ]
        for thread in threads:
            thread.start()
        self._work = work
        self._process = os.getpid()
        # Also when it is forgotten, and at the process's end: before what was there before it.
        self._end = weakref.finalize(self, _end, work, threads)
        self._end.atexit = False
        atexit.register(self._end)

    @property
    def is_open(self) -> bool:
        """Whether it takes work."""
        return self._end.alive

    def put(self, work: _Work) -> None:
        """Queues work that doesn't raise; RuntimeError after `close`.

        In a process that was forked the threads, which the fork left behind, are made anew.
        """
        if not self.is_open:
            raise RuntimeError("this device is closed: it takes no more jobs")
        if self._process != os.getpid():
            atexit.unregister(self._end)
            self._end.detach()
            self._start()
        self._work.put(work)

    def close(self) -> None:
        """Waits for what was queued; further calls are harmless."""
        self._end()
        atexit.unregister(self._end)


def _take(work: SimpleQueue[_Work | None]) -> None:
    while (item := work.get()) is not None:
        item()
        del item  # and with it the memory that it holds, before the next wait


def _end(work: SimpleQueue[_Work | None], threads: Sequence[threading.Thread]) -> None:
    for _ in threads:
        work.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # which may be the last to forget a device
            thread.join()


@final
class JobQueue:
    """Jobs in the order submitted, one at a time: in a thread of its own, or in the caller's.

    An interrupt (Ctrl-C) reaches the main thread alone. A thread of its own it never ends in the
    middle of a job.
    """

    def __init__(self) -> None:
        self._thread = Threads(1, "kvtide-queue")
        self._jobs: deque[QueuedJob[Any]] = deque()
        """Those that haven't ended, in order: whoever appends a job has its place."""
        _queues.add(self)

    def submit(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Queues `work` and returns at once. When it raises, the work isn't under way."""
        job = QueuedJob(work)
        try:
            self._jobs.append(job)
            self._thread.put(self._run_all)
            return job
        except BaseException:
            self._withdraw(job)
            raise

    def submit_at_once(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Does `work` in the calling thread, if nothing is queued before it.

        Two changes of threads cost as much as it takes to copy a megabyte. What breaks the work
        off, such as an interrupt, is raised; the work isn't under way then.
        """
        job = QueuedJob(work)
        try:
            self._jobs.append(job)
            if self._thread.is_open and self._is_next(job):
                job.run()
                take_out(self._jobs, job)
                job.raise_if_broken_off()
            else:
                self._thread.put(self._run_all)
            return job
        except BaseException:
            self._withdraw(job)
            raise

    def close(self) -> None:
        """Waits for what was submitted, and for another thread's job at once; repeatable."""
        self._thread.close()
        for job in tuple(self._jobs):
            job.settle()

    def abandon(self) -> None:
        """Ends all jobs with an error: those who would do them are threads of another process."""
        while self._jobs:
            error = ProcessForked(
                "this move was under way when the process forked: it goes on in the old process, "
                "and in this one it never ends; wait for a device's moves before you fork"
            )
            self._jobs.popleft().end(error)

    def _is_next(self, job: QueuedJob[Any]) -> bool:
        """Whether all that was submitted before it has ended."""
        for other in tuple(self._jobs):
            if other is job or not other.done():
                return other is job
        return False

    def _run_all(self) -> None:
        """All jobs up to now, in order; those of other threads it only waits for."""
        while (job := self._oldest()) is not None:
            job.run()
            job.settle()
            take_out(self._jobs, job)

    def _oldest(self) -> QueuedJob[Any] | None:
        try:
            return self._jobs[0]
        except IndexError:  # another thread took out its own
            return None

    def _withdraw(self, job: QueuedJob[Any]) -> None:
        """Sees to it that a job isn't under way, and won't be: nobody will ask for it."""
        job.give_up()
        take_out(self._jobs, job)


_queues: weakref.WeakSet[JobQueue] = weakref.WeakSet()


def _after_fork() -> None:
    """In the new process."""
    for queue in tuple(_queues):
        queue.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@final
class QueuedJob(Generic[T]):
    """See device.base.Job. One thread waits, another one runs it.

    Not a Future: an interrupt within its condition's lock can come out as another error, which
    would be taken for the job's own. Here each who waits has a lock of his own.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._done = False
        self._owner: dict[str, int] = {}
        self._waiting: list[threading.Lock] = []

    def done(self) -> bool:
        """See Job."""
        return self._done

    def settle(self) -> None:
        """Blocks until it has ended, and raises nothing of it."""
        if self._done:
            return
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        if not self._done:  # whoever ends it does that first, and then looks who waits
            lock.acquire()

    def wait(self) -> T:
        """See Job."""
        self.settle()
        if self._error is not None:
            raise to_raise(self._error)
        return self._results[0]

    def run(self) -> None:
        """Does the work in the thread that calls, unless another one has it, or it was cancelled.

        Raises nothing of the work's: an interrupt, too, ends it with an error.
        """
        thread = threading.get_ident()
        try:
            # Atomic, and the same when it is asked again after an interrupt.
            if self._owner.setdefault("thread", thread) != thread or self._work is None:
                return
            self._results.append(self._work())
            self.end()
        except BaseException as error:
            if self._owner.get("thread") != thread:
                raise
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Lets go whoever waits, and the memory that the work holds. Repeatable."""
        if error is not None:
            self._error = to_keep(error)
        self._work = None
        self._done = True
        while self._waiting:
            self._waiting.pop().release()

    def cancel(self) -> bool:
        """Whether it won't run: it hadn't begun. Repeatable; it has no result then."""
        if self._owner.setdefault("thread", _NOBODY) != _NOBODY:
            return False
        self.end()
        return True

    def give_up(self) -> None:
        """Blocks until it isn't under way and won't be, for whoever queued it. Repeatable."""
        if self.cancel():
            return
        if self._owner["thread"] == threading.get_ident():
            # This thread had it, and isn't at it any more: an interrupt came while it was noting
            # how the work had failed.
            self.end()
        self.settle()

    def error(self) -> BaseException | None:
        """Blocks until it has ended; gives its error, if it has one."""
        self.settle()
        return self._error

    def raise_if_broken_off(self) -> None:
        """Raises what isn't the work's own error, such as an interrupt of the thread it ran in."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise to_raise(self._error)


_NOBODY = 0


def first_error(jobs: Iterable[QueuedJob[Any]]) -> BaseException | None:
    """Blocks until all have ended; the first error that one of them has."""
    errors = [job.error() for job in jobs]
    return next((error for error in errors if error is not None), None)


@final
class Lanes:
    """`count` threads that work side by side; the one that calls `run` is one of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._others = Threads(max(1, count - 1), "kvtide-lane")

    def run(self, items: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all items, in order. After an error the rest are dropped, and none
        is running any more when it is raised."""
        # A deque, because its popleft is atomic: no lock for the lanes to meet at.
        left = deque(enumerate(items))
        results: dict[int, T] = {}
        others: list[QueuedJob[None]] = []
        failure: BaseException | None = None
        is_first = is_running = True
        # An interrupt may come anywhere: it must not keep this from waiting for the others.
        while is_running:
            try:
                if is_first:
                    is_first = False
                    for _ in range(min(self.count, len(items)) - 1):
                        others.append(QueuedJob(lambda: drain(left, results)))
                        self._others.put(others[-1].run)
                    drain(left, results)
                left.clear()
                # Those that have not begun have nothing left to do.
                if others:
                    failure = first_error(job for job in others if not job.cancel()) or failure
                is_running = False
            except BaseException as interrupt:
                failure = failure or interrupt
        if failure is not None:
            raise failure
        return [results[number] for number in range(len(items))]

    def start(self, item: Callable[[], T]) -> QueuedJob[T]:
        """Runs one item in a lane, and returns at once."""
        job = QueuedJob(item)
        self._others.put(job.run)
        return job

    def close(self) -> None:
        """Waits for what was started; further calls are harmless."""
        self._others.close()


def drain(items: deque[tuple[int, Callable[[], T]]], results: dict[int, T]) -> None:
    """Runs items until none is left, or one raises: then the rest are dropped."""
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
