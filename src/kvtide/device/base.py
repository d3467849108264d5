"""The contract of a device: memory at both ends of a copy, and a queue of copies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

import torch

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Job(Protocol, Generic[T_co]):
    """Work in a device's queue."""

    def done(self) -> bool:
        """Whether the job has ended, well or badly. Doesn't block."""
        ...

    def wait(self) -> T_co:
        """Blocks until the job has ended; gives its result or raises its error, at each call."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Some host memory: the bytes of a slab (uint8 [bytes]) from `offset` on."""

    slab: torch.Tensor
    offset: int

    def bytes_view(self, size_bytes: int) -> memoryview:
        """The block's first bytes: a writable view of the slab's memory."""
        return self.slab.numpy().data[self.offset : self.offset + size_bytes]

    def tensor(self, first: int, stop: int) -> torch.Tensor:
        """The block's bytes `first` to `stop` - 1, uint8: the slab's own memory."""
        return self.slab[self.offset + first : self.offset + stop]


@final
@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """A step of a job: first the device's part, if it has one, then the host's part."""

    finish: Callable[[], T]
    """The host's part. A thread of the device calls it, and its value is the step's result."""
    issue: Callable[[torch.Tensor | None], None] | None = None
    """The device's part. It only queues work on the device; the device calls `finish` once that
    work has happened. Its argument is staging: device memory that no other step uses until then
    (uint8 [staging_bytes], contents undefined), or None on a device that copies directly."""


Phases = Callable[[], Iterable[Sequence[Step[T]]]]
"""Makes a job's phases. A phase is some steps that may run side by side."""


class Device(Protocol):
    """What the mover and the arena need of a device.

    Guaranteed by the device:

    - A job begins after all earlier jobs of this device have ended.
    - A job begins after all work that the calling thread queued on its current stream before
      `submit`. So an offload sees what was written to its slots, and a restore doesn't overwrite
      slots that are still read.
    - When a job has ended, all its copies have happened, at both ends.
    """

    @property
    def name(self) -> str:
        """The name that people give to open it, such as `cpu`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where pools on this device keep their tensors."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """The best size of a chunk, in bytes."""
        ...

    @property
    def move_bytes(self) -> int:
        """The most bytes that one copy operation within a chunk should move."""
        ...

    @property
    def elements(self) -> tuple[torch.dtype, ...]:
        """The dtypes in which bytes may be moved: the widest first, a byte wide last."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Zeroed device memory, uint8 [size_bytes]. Raises torch's error when it is out."""
        ...

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [size_bytes], contents undefined; pinned if that speeds up copies."""
        ...

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        """`index`, a host tensor, where the device's kernels can read it. Only phases call this."""
        ...

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        """Queues a job and returns at once.

        The job's result lists what its steps' `finish` returned: the steps of all phases, in
        order. The steps of a phase may run side by side, so they must not depend on each other.
        `phases` is called when the job begins, in a thread of the device. The next phase is made
        when all steps of the phase before it have ended. After an error no further step and no
        further phase begins, and the job ends when no step runs any more.

        `at_once` says that the caller would only wait for the job. Then the device may do the
        job in the calling thread before `submit` returns. Ctrl-C ends such a job, and `submit`
        raises the interrupt when no step runs any more.
        """
        ...

    def close(self) -> None:
        """Waits for all jobs and frees what the device holds. Repeatable."""
        ...


def drain(device: Device) -> None:
    """Waits until nothing moves: an empty job ends after all jobs that were queued before it.

    Ctrl-C doesn't end the wait: the caller is about to raise an earlier error anyway.
    """
    last: Job[list[None]] | None = None
    while last is None or not last.done():
        try:
            if last is None:
                last = device.submit(_no_phases)
            last.wait()
        except Exception:
            if last is None:
                return  # the device takes no more jobs
        except BaseException:
            continue


def _no_phases() -> Iterable[Sequence[Step[None]]]:
    return ()
