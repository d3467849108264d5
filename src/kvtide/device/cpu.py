"""The CPU as a device: both ends of a copy are host memory, and the device's threads copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeVar, final

import torch

from kvtide.device.base import Phases, Step
from kvtide.device.pages import LargePages
from kvtide.device.threads import JobQueue, QueuedJob, Threads

T = TypeVar("T")


@final
class CPUDevice:
    """Copies in `lanes` threads (default: torch's thread count), job after job.

    A lane hashes a chunk while the chunk is still in its core's cache; hashing from memory costs
    twice as much. torch's own parallel loops would spread a chunk over the caches of all cores.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    # Small enough for a core's cache, and large enough to hide the cost of a call.
    chunk_bytes = 1 << 20
    # torch runs an operation of up to 32,768 elements (at::internal::GRAIN_SIZE) in the calling
    # thread alone, so a move of that many 16-byte elements stays in its lane.
    move_bytes = 32_768 * 16
    elements = (torch.complex128, torch.int64, torch.uint8)

    def __init__(self, *, lanes: int | None = None, large_pages: bool = False) -> None:
        """With `large_pages` host memory has pages of 2 MiB, where the system has them."""
        self.lanes = lanes or torch.get_num_threads()
        """How many threads copy: the thread that does the job, and its helpers."""
        self._large_pages = LargePages() if large_pages else None
        self._helpers = Threads(self.lanes - 1, "kvtide-lane")
        self._queue = JobQueue()  # made last, so it ends first: its jobs need the helpers

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        # It begins at a page, as direct I/O needs; torch's memory begins 64 bytes behind one.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if self._large_pages is not None:
            self._large_pages.give_to(pages, memory)
        return memory

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        """See Device."""
        return index

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> QueuedJob[list[T]]:
        """See Device. The steps copy directly, without staging."""
        del staging_bytes
        submit = self._queue.submit_at_once if at_once else self._queue.submit
        return submit(lambda: self._run(phases))

    def close(self) -> None:
        """See Device."""
        self._queue.close()
        self._helpers.close()
        if self._large_pages is not None:
            self._large_pages.close()

    def _run(self, phases: Phases[T]) -> list[T]:
        results: list[T] = []
        for phase in phases():
            results += self._helpers.run([_whole(step) for step in phase])
        return results


def _whole(step: Step[T]) -> Callable[[], T]:
    """Both parts of a step in one call: on this device `issue` has copied when it returns."""
    issue, finish = step.issue, step.finish
    if issue is None:
        return finish

    def run() -> T:
        issue(None)
        return finish()

    return run
