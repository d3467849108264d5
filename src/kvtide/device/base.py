"""The contract of a device: memory at both ends, and one queue of copies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

import torch

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Job(Protocol, Generic[T_co]):
    """Work handed to a device's queue."""

    def done(self) -> bool:
        """Whether it has ended, well or badly; doesn't block."""
        ...

    def wait(self) -> T_co:
        """Blocks until it has ended; gives its result or raises its error, each time."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Block:
    """A piece of host memory: bytes of a slab (uint8 [bytes]) from `offset` on."""

    slab: torch.Tensor
    offset: int

    def bytes_view(self, size_bytes: int) -> memoryview:
        """The block's first bytes, writable: the slab's own memory."""
        return self.slab.numpy().data[self.offset : self.offset + size_bytes]


@final
@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """A piece of a job: what the device does, and what the host does once that has happened."""

    finish: Callable[[], T]
    """The host's part. It runs in a thread of the device's, and its value is the result."""
    issue: Callable[[torch.Tensor | None], None] | None = None
    """The device's part, if there is one: it is only asked for here, and has happened when
    `finish` is called. It is given staging, device memory that is the step's own until then
    (uint8 [staging_bytes], of any contents), or None where copies need none."""


Phases = Callable[[], Iterable[Sequence[Step[T]]]]
"""Makes a job's phases. A phase is some steps that may run side by side."""


class Device(Protocol):
    """What the mover and the arena need of a device.

    The queue keeps order: a job begins after all earlier jobs of this device have ended, and
    after everything that the calling thread gave the device to compute (on its current stream)
    before `submit`. That is the fence which makes an offload wait for the slots' writer, and a
    restore for their earlier readers. When a job has ended, all that it did has happened.
    """

    @property
    def name(self) -> str:
        """The name by which people ask for it, such as `cpu`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where pools on this device keep their tensors."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """How much is best moved at once."""
        ...

    @property
    def move_bytes(self) -> int:
        """The most that one operation within a chunk should move."""
        ...

    @property
    def elements(self) -> tuple[torch.dtype, ...]:
        """The dtypes to move bytes in, the widest first, the last one a byte wide."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Device memory, uint8 [size_bytes], zeroed; raises what torch raises when it is out."""
        ...

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [size_bytes], pinned where copies gain by it; contents undefined."""
        ...

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        """`index`, a host tensor, where the device's kernels read it; only phases call this."""
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
        raises the interrupt when nothing runs any more.
        """
        ...

    def close(self) -> None:
        """Waits for the queue and frees what the device holds; further calls are harmless."""
        ...
