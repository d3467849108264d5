"""The CPU as a device: both ends are host memory, and copies run on threads of their own.

These are the only threads in the library.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, final

import torch

T = TypeVar("T")


@final
class CPUDevice:
    """Copies in `lanes` threads (default: torch's thread count), jobs in the order submitted.

    Lanes, and not torch's own parallel loops, because a lane hashes a chunk while its core
    still has it in cache; a hash over memory costs twice as much. The calling thread only
    waits: an interrupt (Ctrl-C) reaches it alone, so it ends a wait and never a move.
    """

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self, *, lanes: int | None = None) -> None:
        self.lanes = lanes or torch.get_num_threads()
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="kvtide-queue")
        self._lanes = ThreadPoolExecutor(max(1, self.lanes - 1), thread_name_prefix="kvtide-lane")

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def submit(self, *phases: Sequence[Callable[[], T]]) -> _Job[list[T]]:
        """See Device."""
        job = _Job(lambda: self._run(phases))
        self._queue.submit(job.run)
        return job

    def close(self) -> None:
        """See Device."""
        self._queue.shutdown()
        self._lanes.shutdown()

    def _run(self, phases: Sequence[Sequence[Callable[[], T]]]) -> list[T]:
        results: list[T] = []
        for phase in phases:
            results = self._run_phase(phase)
        return results

    def _run_phase(self, phase: Sequence[Callable[[], T]]) -> list[T]:
        """Runs the items in this thread and the other lanes; none is running when it returns."""
        # A deque, because its popleft is atomic: no lock for the lanes to meet at.
        items = deque(enumerate(phase))
        results: dict[int, T] = {}
        others: list[Future[None]] = []
        try:
            for _ in range(min(self.lanes, len(phase)) - 1):
                others.append(self._lanes.submit(_drain, items, results))
            _drain(items, results)
        except BaseException:
            # Also when the system has no thread to give: what was submitted finds nothing.
            items.clear()
            raise
        finally:
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error
        return [results[number] for number in range(len(phase))]


@final
class _Job(Generic[T]):
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
        return self._done

    def wait(self) -> T:
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


def _drain(items: deque[tuple[int, Callable[[], T]]], results: dict[int, T]) -> None:
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
