"""Any accelerator that torch knows, through torch's device-neutral API alone.

This module names no vendor: `torch.accelerator`, `torch.Stream` and `torch.Event` serve CUDA,
Ascend NPUs, XPUs and every other device that registers itself with torch. Time runs to the right:

    caller's stream   ... writes slots ...  ready --.
                                                    v
    copy stream 0     wait for ready | gather, copy | event |     gather, copy | event | ...
    copy stream 1     wait for ready |     gather, copy | event |     gather, copy | event
    a lane                                        hash chunk 0    hash chunk 1 ...

A copy stream has its own staging memory. Chunks alternate between the two copy streams: one chunk
is gathered while the other is copied, and at most two are in flight. A stream keeps its work in
order, so it uses its staging again without a wait. The host hashes a chunk after its event.
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
from kvtide.device.threads import JobQueue, QueuedJob, Threads, first_error
from kvtide.errors import ProcessForked, UsageError

T = TypeVar("T")

_STREAM_COUNT = 2


@final
class AcceleratorDevice:
    """An accelerator by its name, such as `npu` or `cuda:1`; it copies on two streams.

    Staging takes `2 * staging_bytes` of device memory, by the largest job so far. Host memory is
    pinned. If the system can't lock that much, the memory is pageable, and a warning says which
    limit to raise. A job waits for the calling thread's current stream and for no other stream.
    """

    # Large enough that the copy over the link hides what a chunk costs the host.
    chunk_bytes = 8 << 20
    move_bytes = chunk_bytes
    # Bytes move as integers, which the AI cores of Ascend's A2 and A3 have kernels for
    # (aclnnIndexCopy: 32 and 64 bits). Complex numbers, though wider, take a slow path there.
    elements = (torch.int64, torch.int32, torch.uint8)

    def __init__(self, name: str) -> None:
        """Raises UsageError if torch has no such device here."""
        self.torch_device = find_accelerator(name)
        self.name = name
        self._process = os.getpid()
        self._lane = Threads(1, "kvtide-lane")
        self._queue = JobQueue()  # made last, so it ends first: its jobs need the lane
        self._streams = [CopyStream(self.torch_device) for _ in range(_STREAM_COUNT)]

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
        """See Device. Blocks the thread that does the job, and no other."""
        return index.to(self.torch_device)

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> QueuedJob[list[T]]:
        """See Device. `at_once` changes nothing: the queue's thread does every job.

        Only that thread may make this device torch's current device. Raises ProcessForked in a
        process that was forked after the device was opened.
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
        self._lane.close()
        self._streams.clear()

    # ---- in the queue's thread --------------------------------------------------------

    @torch.inference_mode()
    def _run(self, phases: Phases[T], ready: torch.Event, staging_bytes: int) -> list[T]:
        results: list[T] = []
        torch.accelerator.set_device_index(self.torch_device.index)
        with self._settled():
            for copy_stream in self._streams:
                copy_stream.stream.wait_event(ready)
                copy_stream.prepare(staging_bytes)
            with self._streams[0].stream:  # the phases upload on it
                for phase in phases():
                    results += self._run_phase(phase)
        return results

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Waits for both streams at the end, after an error too; raises the device's errors."""
        with ExitStack() as stack:
            for copy_stream in self._streams:
                stack.callback(copy_stream.stream.synchronize)
            yield

    def _run_phase(self, phase: Sequence[Step[T]]) -> list[T]:
        if all(step.issue is None for step in phase):
            return self._lane.run([step.finish for step in phase])
        in_flight: deque[tuple[torch.Event, Step[T]]] = deque()
        finishing: list[QueuedJob[T]] = []

        def finish_oldest() -> None:
            event, step = in_flight.popleft()
            event.synchronize()
            finishing.append(self._lane.start(step.finish))

        try:
            for number, step in enumerate(phase):
                if len(in_flight) == _STREAM_COUNT:
                    finish_oldest()
                copy_stream = self._streams[number % _STREAM_COUNT]
                in_flight.append((copy_stream.issue(step), step))
            while in_flight:
                finish_oldest()
        finally:
            error = first_error(finishing)
        if error is not None:
            raise error
        return [job.wait() for job in finishing]


@final
class CopyStream:
    """A stream and its staging memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device=device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)

    def prepare(self, staging_bytes: int) -> None:
        """Enlarges the staging to at least `staging_bytes`. Only called when the stream is idle."""
        if self._staging.numel() < staging_bytes:
            with self.stream:
                self._staging = self._staging.new_empty(staging_bytes)

    def issue(self, step: Step[T]) -> torch.Event:
        """Queues the device's part of a step; gives an event that ends when it has happened."""
        with self.stream:
            if step.issue is not None:
                step.issue(self._staging)
            return self.stream.record_event()


def find_accelerator(name: str) -> torch.device:
    """The torch device of that name, with its index. Raises UsageError if it isn't here."""
    # torch may be built for an accelerator that this machine doesn't have.
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
