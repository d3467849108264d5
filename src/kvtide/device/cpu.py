"""The CPU as a device: both ends are host memory, and copies run on threads of their own.

These are the only threads in the library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, final

import torch

T = TypeVar("T")


@final
class _FutureJob(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> T:
        return self._future.result()


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

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def submit(self, *phases: Sequence[Callable[[], T]]) -> _FutureJob[list[T]]:
        """See Device."""
        return _FutureJob(self._queue.submit(self._run, phases))

    def close(self) -> None:
        """See Device."""
        self._queue.shutdown()
        self._helpers.shutdown()

    def _run(self, phases: Sequence[Sequence[Callable[[], T]]]) -> list[T]:
        results: list[T] = []
        for phase in phases:
            results = self._run_phase(phase)
        return results

    def _run_phase(self, phase: Sequence[Callable[[], T]]) -> list[T]:
        # A deque, because its popleft is atomic: no lock for the lanes to meet at.
        items = deque(enumerate(phase))
        results: dict[int, T] = {}
        helper_count = min(self.lanes, len(phase)) - 1
        helpers = [self._helpers.submit(_drain, items, results) for _ in range(helper_count)]
        try:
            _drain(items, results)
        finally:
            # Also after an error: nothing may still be copying when the job has ended.
            errors = [helper.exception() for helper in helpers]
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
