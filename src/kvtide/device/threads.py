"""The only threads of the library: a queue of jobs, and lanes that work side by side.

    JobQueue   does jobs in order, in its thread or in the thread of a blocking caller
    Threads    some threads with one queue of work; the lanes are such threads
    QueuedJob  work that one thread does and other threads wait for

A signal's handler (Ctrl-C) may interrupt Python code between any two instructions, and a fork
copies a lock as it is. Either could leave a lock locked for ever. So no lock guards shared state
here: each change of it is one C call on a deque or a dict, which nothing interrupts.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
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

    This is not an executor: an interrupt in `submit` would leave an executor's lock locked for
    ever. A SimpleQueue holds no lock while Python code runs.
    """

    def __init__(self, count: int, name: str, *, patience_s: float | None = None) -> None:
        """Starts them. Whoever ends them waits for their work, at most `patience_s` unless None."""
        self._count = count
        self._name = name
        self._patience_s = [patience_s]  # `_end_threads` reads what `close` writes
        self._start()

    def _start(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.grow_to(self._count)
        self._process = os.getpid()
        # The threads also end when this object is forgotten, and when the process ends. atexit
        # calls its newest function first: the threads end before the objects that are older.
        self._end = weakref.finalize(
            self, _end_threads, self._work, self._threads, self._patience_s
        )
        self._end.atexit = False
        atexit.register(self._end)

    def grow_to(self, count: int) -> None:
        """Starts more threads until there are `count`."""
        while len(self._threads) < count:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_do_work, args=(self._work,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def is_open(self) -> bool:
        """Whether the threads take work."""
        return self._end.alive

    def put(self, work: _Work) -> None:
        """Queues work that doesn't raise. Raises RuntimeError after `close`.

        A fork leaves the threads behind. The forked process starts new ones here.
        """
        if not self.is_open:
            raise RuntimeError("this device is closed: it takes no more jobs")
        if self._process != os.getpid():
            atexit.unregister(self._end)
            self._end.detach()
            self._start()
        self._work.put(work)

    def start(self, item: Callable[[], T]) -> QueuedJob[T]:
        """Queues an item and returns at once."""
        job = QueuedJob(item)
        self.put(job.run)
        return job

    def run(self, items: Sequence[Callable[[], T]]) -> list[T]:
        """Runs items in these threads and in the calling thread; gives their results in order.

        After an error the items that have not begun are dropped. When this returns or raises, no
        item is running. Ctrl-C may come at any instruction and must not prevent that:

            1 begin   start helpers, run items in this thread       done once only
            2 drop    remove the items that nobody has begun        after an error, at step 1
            3 join    cancel the helpers that have not begun,       or 2 or 3: keep the error and
                      wait for the others                           go (back) to step 2
            4 end     raise the kept error, or return the results
        """
        left = deque(enumerate(items))  # its popleft is one C call, so the threads need no lock
        results: dict[int, T] = {}
        helpers: list[QueuedJob[None]] = []
        failure: BaseException | None = None
        has_begun = has_ended = False
        while not has_ended:
            try:
                if not has_begun:
                    has_begun = True
                    for _ in range(min(self._count, len(items) - 1)):
                        helpers.append(QueuedJob(lambda: run_items(left, results)))
                        self.put(helpers[-1].run)
                    run_items(left, results)
                left.clear()
                working = (helper for helper in helpers if not helper.cancel())
                failure = first_error(working) or failure
                has_ended = True
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return [results[number] for number in range(len(items))]

    def close(self, patience_s: float | None = None) -> None:
        """Waits for the queued work, and ends the threads. Repeatable.

        With `patience_s`, here or at the start, it doesn't wait for ever: what hangs then goes on
        until the process ends.
        """
        if patience_s is not None:
            self._patience_s[0] = patience_s
        self._end()
        atexit.unregister(self._end)


def _do_work(work: SimpleQueue[_Work | None]) -> None:
    """Does work until None comes: the body of each thread."""
    while (item := work.get()) is not None:
        item()
        del item  # frees the memory that the work holds before the next wait


def _end_threads(
    work: SimpleQueue[_Work | None],
    threads: Sequence[threading.Thread],
    patience_s: Sequence[float | None],
) -> None:
    for _ in threads:
        work.put(None)
    most_s = patience_s[0]
    until = None if most_s is None else time.monotonic() + most_s
    for thread in threads:
        # A device may be forgotten in its own thread, which can't wait for itself.
        if thread is not threading.current_thread():
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def run_items(items: deque[tuple[int, Callable[[], T]]], results: dict[int, T]) -> None:
    """Runs numbered items until none is left. When an item raises, it drops the others first."""
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


@final
class JobQueue:
    """Does jobs one at a time, in the order submitted.

    A job runs in the queue's thread, or in the thread of a caller that blocks. Ctrl-C interrupts
    the main thread only, so it never ends a job that runs in the queue's thread.
    """

    def __init__(self) -> None:
        self._thread = Threads(1, "kvtide-queue")
        self._jobs: deque[QueuedJob[Any]] = deque()
        """The jobs that have not ended, in order. A job gets its place when it is appended."""
        _queues.add(self)

    def submit(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Queues `work` and returns at once. When this raises, `work` won't run."""
        job = QueuedJob(work)
        try:
            self._jobs.append(job)
            self._thread.put(self._run_all)
            return job
        except BaseException:
            self._withdraw(job)
            raise

    def submit_at_once(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Does `work` in the calling thread if no earlier job is left, otherwise queues it.

        Handing work to another thread and back costs as much as copying a megabyte. When this
        raises, as it does after Ctrl-C in the middle of the work, `work` no longer runs.
        """
        job = QueuedJob(work)
        try:
            self._jobs.append(job)
            if self._thread.is_open and self._is_next(job):
                job.run()
                take_out(self._jobs, job)
                job.raise_interrupt()
            else:
                self._thread.put(self._run_all)
            return job
        except BaseException:
            self._withdraw(job)
            raise

    def close(self) -> None:
        """Waits for all jobs, including a job that another thread does at once. Repeatable."""
        self._thread.close()
        for job in tuple(self._jobs):
            job.settle()

    def abandon(self) -> None:
        """Ends all jobs with ProcessForked: their threads exist in the parent process only."""
        while self._jobs:
            error = ProcessForked(
                "this move was under way when the process forked: it goes on in the old process, "
                "and in this one it never ends; wait for a device's moves before you fork"
            )
            self._jobs.popleft().end(error)

    def _is_next(self, job: QueuedJob[Any]) -> bool:
        """Whether all jobs before this one have ended."""
        for other in tuple(self._jobs):
            if other is job or not other.done():
                return other is job
        return False

    def _run_all(self) -> None:
        """Runs all jobs in order. It only waits for a job that another thread does at once."""
        while (job := self._oldest()) is not None:
            job.run()
            job.settle()
            take_out(self._jobs, job)

    def _oldest(self) -> QueuedJob[Any] | None:
        try:
            return self._jobs[0]
        except IndexError:  # another thread just removed its own job
            return None

    def _withdraw(self, job: QueuedJob[Any]) -> None:
        """Removes a job that nobody will ask for, once it can no longer run."""
        job.give_up()
        take_out(self._jobs, job)


_queues: weakref.WeakSet[JobQueue] = weakref.WeakSet()


def _after_fork() -> None:
    """Runs in the forked process."""
    for queue in tuple(_queues):
        queue.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

_NOBODY = 0  # no thread has this identifier


@final
class QueuedJob(Generic[T]):
    """Work that one thread does and other threads wait for; see device.base.Job.

    The first thread that calls `run` or `cancel` owns the job: `_owner.setdefault` is one C call.

    This is not a Future. An interrupt inside a Future's condition can come out as another error,
    which would look like the job's error. Here each thread that waits has its own lock.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._done = False
        self._owner: dict[str, int] = {}
        self._waiting: list[threading.Lock] = []

    @property
    def begun(self) -> bool:
        """Whether a thread has begun with it, or it was cancelled."""
        return bool(self._owner)

    def done(self) -> bool:
        """See Job."""
        return self._done

    def settle(self, timeout_s: float = -1) -> bool:
        """Blocks until the job has ended; whether it has. Doesn't raise the job's error.

        By default it waits as long as it takes.
        """
        if self._done:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        if not self._done:  # `end` sets `_done` first and releases the locks then
            lock.acquire(timeout=timeout_s)
        return self._done

    def wait(self) -> T:
        """See Job."""
        self.settle()
        if self._error is not None:
            raise to_raise(self._error)
        return self._results[0]

    def run(self) -> None:
        """Does the work in the calling thread, if no other thread owns the job.

        Doesn't raise: any error of the work, even an interrupt, becomes the job's error.
        """
        thread = threading.get_ident()
        try:
            if self._owner.setdefault("thread", thread) != thread or self._work is None:
                return
            self._results.append(self._work())
            self.end()
        except BaseException as error:
            if self._owner.get("thread") != thread:
                raise
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Wakes the threads that wait and frees what the work holds. Repeatable."""
        if error is not None:
            self._error = to_keep(error)
        self._work = None
        self._done = True
        while self._waiting:
            self._waiting.pop().release()

    def cancel(self) -> bool:
        """Ends a job that no thread has begun, without a result. False if one has. Repeatable."""
        if self._owner.setdefault("thread", _NOBODY) != _NOBODY:
            return False
        self.end()
        return True

    def give_up(self) -> None:
        """Cancels the job, or blocks until it has ended. Repeatable."""
        if self.cancel():
            return
        if self._owner["thread"] == threading.get_ident():
            # This thread did the work and left it: an interrupt came while `run` noted the error.
            self.end()
        self.settle()

    def error(self) -> BaseException | None:
        """Blocks until the job has ended; gives its error, or None."""
        self.settle()
        return self._error

    def raise_interrupt(self) -> None:
        """Raises the error that ended the job if it is no Exception, such as KeyboardInterrupt."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise to_raise(self._error)


def first_error(jobs: Iterable[QueuedJob[Any]]) -> BaseException | None:
    """Blocks until all jobs have ended; gives the error of the first job that has one."""
    errors = [job.error() for job in jobs]
    return next((error for error in errors if error is not None), None)
