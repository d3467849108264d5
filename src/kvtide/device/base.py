"""The contract of a device: memory at both ends, and one queue of copies between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Device(Protocol):
    """What the mover and the arena need of a device.

    The queue keeps order: a job begins after all earlier jobs of this device have ended, and
    after everything that the calling thread gave the device to compute before `submit`. That
    is the fence which makes an offload wait for the slots' writer, and a restore for their
    earlier readers.
    """

    @property
    def name(self) -> str:
        """The name by which people ask for it, such as `cpu`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where pools on this device keep their tensors."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Device memory, uint8 [size_bytes], zeroed; raises what torch raises when it is out."""
        ...

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [size_bytes], pinned where copies gain by it; contents undefined."""
        ...

    def submit(self, *phases: Sequence[Callable[[], T]]) -> Job[list[T]]:
        """Queues work and returns at once; the job's result is that of the last phase, in order.

        Items of a phase may run side by side, so they must not depend on each other. A phase
        begins when the one before it has ended, and not at all if that one raised. After an
        error the items that have not begun are dropped, and none is running any more when
        the job has ended.
        """
        ...

    def close(self) -> None:
        """Waits for the queue and frees what the device holds; further calls are harmless."""
        ...
