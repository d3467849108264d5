"""Any accelerator that torch knows, through torch's device-neutral API alone.

Nothing here names a vendor: `torch.accelerator`, `torch.Stream` and `torch.Event` serve CUDA,
Ascend NPUs, XPUs and whatever registers itself with torch. What is used of them:

    caller's stream   ... writes slots ...  ready --.
                                                    v
    way 0             wait for ready | gather, copy | event |     gather, copy | event | ...
    way 1             wait for ready |     gather, copy | event |     gather, copy | event
    a lane                                        hash chunk 0    hash chunk 1 ...

A *way* is a stream with staging of its own. Chunks take the two ways in turn, so that the
gather of one runs beside the copy of the other, and at most two are in flight. A way's staging is
used again in the order of its stream; the host's part of a chunk begins after its event.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar, final

import torch

from kvtide.device.base import Phases, Step
from kvtide.device.threads import JobQueue, Lanes, QueuedJob, first_error
from kvtide.errors import ProcessForked, UsageError

T = TypeVar("T")

_WAY_COUNT = 2


@final
class AcceleratorDevice:
    """The accelerator of that name, such as `npu` or `cuda:1`: copies on streams of their own.

    Device staging is `2 * staging_bytes` of the largest job so far. Host memory is pinned; where
    the system won't lock that much it is pageable, with a warning that says what to raise. A job
    waits for the calling thread's current stream, and for no other one.
    """

    # Large enough that what a chunk costs the host is hidden behind its copy over the link.
    chunk_bytes = 8 << 20
    move_bytes = chunk_bytes
    # What is moved are bytes. On Ascend's A2 and A3 the AI core's own kernels know these integers
    # (aclnnIndexCopy: of 32 and 64 bits), and complex numbers go another, slow way.
    elements = (torch.int64, torch.int32, torch.uint8)

    def __init__(self, name: str) -> None:
        """Raises UsageError if torch has no such device here."""
        self.torch_device = find_accelerator(name)
        self.name = name
        self._process = os.getpid()
        self._lanes = Lanes(_WAY_COUNT)
        self._queue = JobQueue()  # made last, so that it ends first: its jobs need lanes
        self._ways = [_Way(self.torch_device) for _ in range(_WAY_COUNT)]

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """See Device."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            warnings.warn(
                f"device {self.name!r}: {size_bytes} bytes of host memory can't be pinned "
                f"({_first_line(error)}), so copies are slower; raise the limit of locked memory "
                "(ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, "
                "docker run --ulimit memlock=-1)",
                RuntimeWarning,
                stacklevel=2,
            )
        return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        """See Device. Blocks, which in a job holds up nobody else."""
        return index.to(self.torch_device)

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> QueuedJob[list[T]]:
        """See Device. Always in its own thread, which may make this device its current one.

        Raises ProcessForked in a process that was forked from the one that opened the device.
        """
        del at_once
        if self._process != os.getpid():
            raise ProcessForked(
                f"device {self.name!r} was opened by process {self._process}, which this one was "
                "forked from; accelerators don't outlive a fork: open it here, or spawn processes"
            )
        ready = torch.Event(device=self.torch_device)
        ready.record(torch.accelerator.current_stream(self.torch_device))
        return self._queue.submit(lambda: self._run(phases, ready, staging_bytes))

    def close(self) -> None:
        """See Device."""
        self._queue.close()
        self._lanes.close()
        self._ways.clear()

    # ---- in the queue's thread --------------------------------------------------------

    @torch.inference_mode()
    def _run(self, phases: Phases[T], ready: torch.Event, staging_bytes: int) -> list[T]:
        results: list[T] = []
        torch.accelerator.set_device_index(self.torch_device.index)
        with self._settled():
            for way in self._ways:
                way.stream.wait_event(ready)
                way.prepare(staging_bytes)
            with self._ways[0].stream:  # for what the phases upload
                for phase in phases():
                    results += self._run_phase(phase)
        return results

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """However this ends, nothing is moving any more; raises the device's own errors."""
        with ExitStack() as stack:
            for way in self._ways:
                stack.callback(way.stream.synchronize)
            yield

    def _run_phase(self, phase: Sequence[Step[T]]) -> list[T]:
        if all(step.issue is None for step in phase):
            return self._lanes.run([step.finish for step in phase])
        in_flight: deque[tuple[torch.Event, Step[T]]] = deque()
        finishing: list[QueuedJob[T]] = []

        def finish_oldest() -> None:
            event, step = in_flight.popleft()
            event.synchronize()
            finishing.append(self._lanes.start(step.finish))

        try:
            for number, step in enumerate(phase):
                if len(in_flight) == _WAY_COUNT:
                    finish_oldest()
                in_flight.append((self._ways[number % _WAY_COUNT].issue(step), step))
            while in_flight:
                finish_oldest()
        finally:
            error = first_error(finishing)
        if error is not None:
            raise error
        return [one.wait() for one in finishing]


@final
class _Way:
    """A stream and its staging."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device=device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def prepare(self, staging_bytes: int) -> None:
        """Makes the staging that large, if it is smaller. Nothing is under way then."""
        if self._staging.numel() < staging_bytes:
            with self.stream:
                self._staging = self._staging.new_empty(staging_bytes)

    def issue(self, step: Step[T]) -> torch.Event:
        """Asks for the device's part of a step; the event tells when it has happened."""
        with self.stream:
            if step.issue is not None:
                step.issue(self._staging)
            return self.stream.record_event()


def find_accelerator(name: str) -> torch.device:
    """The torch device of that name, with its index; raises UsageError if it isn't here."""
    # What torch was built for may still not be here.
    here = torch.accelerator.current_accelerator(check_available=True)
    kinds = "cpu" if here is None else f"cpu, {here.type}"
    kind, _, index = name.partition(":")
    if here is None or kind != here.type:
        raise UsageError(f"device {name!r} isn't known here; known are: {kinds}")
    count = torch.accelerator.device_count()
    if index and not (index.isdecimal() and int(index) < count):
        raise UsageError(f"device {name!r} isn't here; of {kind} there are 0 to {count - 1}")
    number = int(index) if index else torch.accelerator.current_device_index()
    return torch.device(kind, number)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
