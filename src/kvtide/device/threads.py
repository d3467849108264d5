"""The library's threads, all of them: a queue of jobs, and lanes for work side by side."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, final

T = TypeVar("T")
_Work = Callable[[], None]


@final
class Threads:
    """`count` threads that take work from one queue, in order.

    Not an executor: an interrupt (Ctrl-C) may come while the main thread hands out work, and would
    leave an executor's lock locked for ever. A SimpleQueue has none that Python code holds.
    """

    def __init__(self, count: int, name: str) -> None:
        work: SimpleQueue[_Work | None] = SimpleQueue()
        self._work = work
        threads = [
            threading.Thread(target=_take, args=(work,), name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        # Also when it is forgotten, and at the process's end: before what was there before it.
        self._end = weakref.finalize(self, _end, work, threads)
        self._end.atexit = False
        atexit.register(self._end)

    @property
    def is_open(self) -> bool:
        """Whether it takes work."""
        return self._end.alive

    def put(self, work: _Work) -> None:
        """Queues work that doesn't raise; RuntimeError after `close`."""
        if not self.is_open:
            raise RuntimeError("this device is closed: it takes no more jobs")
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
        self._turn = threading.Lock()
        self._order = threading.Lock()
        self._last: QueuedJob[Any] | None = None

    def submit(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Queues `work` and returns at once."""
        job = QueuedJob(work)
        with self._order:  # the last one is the last in the queue, whoever submits beside this
            self._last = job
            self._thread.put(lambda: self._run(job))
        return job

    def submit_at_once(self, work: Callable[[], T]) -> QueuedJob[T]:
        """Does `work` in the calling thread, if nothing is queued before it.

        Two changes of threads cost as much as it takes to copy a megabyte. What breaks the work
        off, such as an interrupt, is raised.
        """
        if not self._thread.is_open or not (self._last is None or self._last.done()):
            return self.submit(work)
        job = QueuedJob(work)
        self._run(job)
        job.raise_if_broken_off()
        return job

    def close(self) -> None:
        """Waits for what was submitted, and for another thread's job at once; repeatable."""
        self._thread.close()
        with self._turn:
            pass

    def _run(self, job: QueuedJob[Any]) -> None:
        with self._turn:
            job.run()


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
        self._owner: dict[str, str] = {}
        self._gate = threading.Lock()
        self._gate.acquire()

    def done(self) -> bool:
        """See Job."""
        return self._done

    def settle(self) -> None:
        """Blocks until it has ended, and raises nothing of it."""
        if not self._done:
            self._gate.acquire()
            self._gate.release()  # for the next one who waits

    def wait(self) -> T:
        """See Job."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def run(self) -> None:
        """Does the work in the thread that calls, and lets go whoever waits; nothing after
        `cancel`."""
        if self._owner.setdefault("is", "running") != "running":
            return
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        del self._work  # and with it the memory that it holds
        self._done = True
        self._gate.release()

    def cancel(self) -> bool:
        """Whether it won't run: it hadn't begun. Repeatable; nobody may wait for it then."""
        # Atomic, and the same when it is asked again after an interrupt.
        return self._owner.setdefault("is", "cancelled") == "cancelled"

    def error(self) -> BaseException | None:
        """Blocks until it has ended; gives its error, if it has one."""
        self.settle()
        return self._error

    def raise_if_broken_off(self) -> None:
        """Raises what isn't the work's own error, such as an interrupt of the thread it ran in."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error


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
                for other in others:
                    if not other.cancel():
                        other.settle()
                is_running = False
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        for other in others:
            if not other.cancel():
                other.wait()
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
