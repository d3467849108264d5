"""LazyDevice: a device that does nothing until somebody waits for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import torch

from kvtide.device import Phases, Step

T = TypeVar("T")


@final
class LazyJob(Generic[T]):
    """A job of a LazyQueue."""

    def __init__(self, queue: LazyQueue, work: Callable[[], T]) -> None:
        self._queue = queue
        self._work = work
        self._ended = False
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the work in this thread, and keeps its outcome."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        del self._work
        self._ended = True

    def done(self) -> bool:
        """Returns whether the job has run; it runs nothing."""
        return self._ended

    def wait(self) -> T:
        """Runs the queue up to this job."""
        while not self._ended:
            self._queue.run_next()
        if self._error is not None:
            raise self._error
        return self._results[0]


@final
class LazyQueue:
    """A JobQueue without a thread: its jobs run, in order, in the thread that waits for one."""

    def __init__(self) -> None:
        self._jobs: list[LazyJob[Any]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, work: Callable[[], T]) -> LazyJob[T]:
        """See JobQueue."""
        job = LazyJob(self, work)
        self._jobs.append(job)
        return job

    def run_next(self) -> None:
        """Runs the oldest job that hasn't run."""
        self._jobs.pop(0).run()

    def close(self) -> None:
        """See JobQueue."""
        while self._jobs:
            self.run_next()


@final
class LazyDevice:
    """The CPU as a device whose queue runs only when somebody waits for it.

    The steps of a phase run in an order drawn from `seed`, since they must not depend on each
    other. Each is given its own staging, which is full of ones. `host_sizes` lists the sizes that
    `allocate_host` was called with.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    chunk_bytes = 1 << 20
    move_bytes = 1 << 19
    elements = (torch.int64, torch.uint8)

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._queue = LazyQueue()
        self.host_sizes: list[int] = []

    @property
    def queued_count(self) -> int:
        """How many jobs haven't run."""
        return len(self._queue)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        self.host_sizes.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        """See Device."""
        return index

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> LazyJob[list[T]]:
        """See Device."""
        del at_once
        return self._queue.submit(lambda: self._run(phases, staging_bytes))

    def run_next(self) -> None:
        """Runs the oldest job that hasn't run."""
        self._queue.run_next()

    def close(self) -> None:
        """See Device."""
        self._queue.close()

    def _run(self, phases: Phases[T], staging_bytes: int) -> list[T]:
        results: list[T] = []
        for phase in phases():
            found: dict[int, T] = {}
            for number in self._random.sample(range(len(phase)), len(phase)):
                found[number] = self._do(phase[number], staging_bytes)
            results += [found[number] for number in range(len(phase))]
        return results

    def _do(self, step: Step[T], staging_bytes: int) -> T:
        if step.issue is not None:
            step.issue(torch.full((staging_bytes,), 255, dtype=torch.uint8))
        return step.finish()
