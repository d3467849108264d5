"""The CPU as a device: both ends are host memory, and copies run on threads of their own.

These are the only threads in the library.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, final

import torch

T = TypeVar("T")

_Phases = Sequence[Sequence[Callable[[], T]]]


@final
class CPUDevice:
    """Copies in `lanes` threads (default: torch's thread count), jobs in the order submitted.

    Lanes, and not torch's own parallel loops, because a lane hashes a chunk while its core
    still has it in cache; a hash over memory costs twice as much.
    """

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self, *, lanes: int | None = None) -> None:
        self.lanes = lanes or torch.get_num_threads()
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="kvtide-queue")
        self._helpers = ThreadPoolExecutor(max(1, self.lanes - 1), thread_name_prefix="kvtide-lane")
        self._waiting: deque[_Job[Any]] = deque()
        self._turn = threading.Lock()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def submit(self, *phases: Sequence[Callable[[], T]]) -> _Job[T]:
        """See Device."""
        job: _Job[T] = _Job(self, phases)
        self._waiting.append(job)
        try:
            self._queue.submit(self._advance)
        except RuntimeError:
            self._waiting.remove(job)  # the device is closed
            raise
        return job

    def close(self) -> None:
        """See Device."""
        self._queue.shutdown()
        self._helpers.shutdown()

    def _advance(self, *, caller_waits: bool = False) -> None:
        """Runs the oldest job, in this thread and the helpers; one job at a time.

        Whoever waits for a job calls this as well, so that it works instead of sleeping until
        another thread is awake. An interrupt then ends the wait, not the move: the queue's
        thread begins the job again, which is safe because items write the same each time.
        """
        with self._turn:
            if not self._waiting:
                return
            job = self._waiting.popleft()
            try:
                job.run(self._helpers, self.lanes)
            except BaseException as interrupt:
                if not caller_waits:
                    job.end(interrupt)
                    return
                self._waiting.appendleft(job)
                self._queue.submit(self._advance)
                raise


@final
class _Job(Generic[T]):
    """See device.base.Job."""

    def __init__(self, device: CPUDevice, phases: _Phases[T]) -> None:
        self._device = device
        self._phases = phases
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._ended = False

    def done(self) -> bool:
        return self._ended

    def wait(self) -> list[T]:
        while not self._ended:
            self._device._advance(caller_waits=True)
        if self._error is not None:
            raise self._error
        return self._results

    def run(self, helpers: ThreadPoolExecutor, lanes: int) -> None:
        """Runs all phases to their end or an error; raises only what isn't an Exception."""
        results: list[T] = []
        try:
            for phase in self._phases:
                results = _run_phase(phase, helpers, lanes)
        except Exception as error:
            self.end(error)
        else:
            self._results = results
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """The outcome is known: an error, or the results."""
        self._phases = ()
        self._error = error
        self._ended = True


def _run_phase(
    phase: Sequence[Callable[[], T]], helpers: ThreadPoolExecutor, lanes: int
) -> list[T]:
    # A deque, because its popleft is atomic: no lock for the lanes to meet at.
    items = deque(enumerate(phase))
    results: dict[int, T] = {}
    helper_count = min(lanes, len(phase)) - 1
    helping = [helpers.submit(_drain, items, results) for _ in range(helper_count)]
    try:
        _drain(items, results)
    finally:
        # Also after an error: nothing may still be copying when the job has ended.
        errors = [helper.exception() for helper in helping]
    for error in errors:
        if error is not None:
            raise error
    return [results[number] for number in range(len(phase))]


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
