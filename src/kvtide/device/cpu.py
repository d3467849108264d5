"""The CPU as a device: both ends are host memory, and copies run on threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final

import torch

from kvtide.device.base import Phases, Step
from kvtide.device.threads import JobQueue, Lanes, QueuedJob

T = TypeVar("T")


@final
class CPUDevice:
    """Copies in `lanes` threads (default: torch's thread count), jobs in the order submitted.

    Lanes, and not torch's own parallel loops, because a lane hashes a chunk while its core
    still has it in cache; a hash over memory costs twice as much.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    # Small enough for a core's cache, and large enough to hide what a call costs.
    chunk_bytes = 1 << 20
    # torch runs an operation of up to 32,768 elements (at::internal::GRAIN_SIZE) on the calling
    # thread alone. Moves of that many 16-byte elements stay within their lane.
    move_bytes = 32_768 * 16
    elements = (torch.complex128, torch.int64, torch.uint8)

    def __init__(self, *, lanes: int | None = None) -> None:
        self._lanes = Lanes(lanes or torch.get_num_threads())
        self._queue = JobQueue()  # made last, so that it ends first: its jobs need lanes

    @property
    def lanes(self) -> int:
        """How many threads copy."""
        return self._lanes.count

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        """See Device."""
        return index

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> QueuedJob[list[T]]:
        """See Device. Copies go straight there: no staging."""
        del staging_bytes
        submit = self._queue.submit_at_once if at_once else self._queue.submit
        return submit(lambda: self._run(phases))

    def close(self) -> None:
        """See Device."""
        self._queue.close()
        self._lanes.close()

    def _run(self, phases: Phases[T]) -> list[T]:
        results: list[T] = []
        for phase in phases():
            results += self._lanes.run([_whole(step) for step in phase])
        return results


def _whole(step: Step[T]) -> Callable[[], T]:
    """Both parts of a step as one: on this device what is issued has happened."""
    issue, finish = step.issue, step.finish
    if issue is None:
        return finish

    def run() -> T:
        issue(None)
        return finish()

    return run
