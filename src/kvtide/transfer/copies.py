"""How the units of a buffer reach the blocks of a run, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.device import Block

# numpy lets go of the interpreter's lock for rows of items, and for single items only from 500 on;
# but items are several times as fast. So few units are items only if they are moved in no time.
_MANY_UNITS = 500
_SMALL_BYTES = 16 << 10


class Copies(Protocol):
    """What moves between one buffer and the blocks of one run, for each of its chunks."""

    @property
    def stop(self) -> int:
        """In bytes, where these units end in each block."""
        ...

    def gather(self, number: int, staging: torch.Tensor | None) -> None:
        """Units to the block of that number, or to `staging`, which is laid out like a block."""
        ...

    def scatter(self, number: int, staging: torch.Tensor | None) -> None:
        """The same units back."""
        ...


@final
class HostCopies:
    """Of a buffer in host memory, by numpy.

    A call of it takes a microsecond, where one of torch's takes eight, and while one lane is in
    the interpreter the others can't begin a move. And it moves a unit as a whole both ways, where
    index_copy_ goes element by element.
    """

    def __init__(
        self, units: NDArray[Any], index: NDArray[np.int64], run: Run, block_offset: int
    ) -> None:
        """`units` is uint8 [unit, byte], and `index` has for each chunk its units."""
        unit_count, unit_bytes = index.shape[1], units.shape[1]
        size_bytes = unit_count * unit_bytes
        if unit_count >= _MANY_UNITS or size_bytes <= _SMALL_BYTES:
            units = units.view(f"V{unit_bytes}")[:, 0]
        self._units = units
        self._index = index
        self._block_offset = block_offset
        self._parts = run.memory_parts(block_offset, unit_count, units)
        self.stop = block_offset + size_bytes

    def gather(self, number: int, staging: torch.Tensor | None) -> None:
        """See Copies."""
        part = self._parts[number] if staging is None else self._staged(staging)
        # Rows were checked. To "raise" for others, numpy would go by way of a buffer.
        self._units.take(self._index[number], 0, part, "clip")

    def scatter(self, number: int, staging: torch.Tensor | None) -> None:
        """See Copies."""
        part = self._parts[number] if staging is None else self._staged(staging)
        self._units[self._index[number]] = part

    def _staged(self, staging: torch.Tensor) -> NDArray[Any]:
        shape, dtype = self._parts.shape[1:], self._parts.dtype
        return np.ndarray(shape, dtype, staging.numpy(), self._block_offset)


@final
class DeviceCopies:
    """Of a buffer anywhere, by torch; of those in host memory, the padded ones."""

    def __init__(
        self,
        units: torch.Tensor,
        index: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        block_offset: int,
    ) -> None:
        """`units` is the buffer as [unit, element], `index` has for each chunk its units, int64
        [unit], and `parts` their place in its block, [unit, element]."""
        self._units = units
        self._index = index
        self._parts = parts
        self._block_offset = block_offset
        self.stop = block_offset + parts[0].nbytes

    def gather(self, number: int, staging: torch.Tensor | None) -> None:
        """See Copies."""
        part = self._parts[number] if staging is None else self._staged(staging)
        torch.index_select(self._units, 0, self._index[number], out=part)

    def scatter(self, number: int, staging: torch.Tensor | None) -> None:
        """See Copies."""
        part = self._parts[number] if staging is None else self._staged(staging)
        self._units.index_copy_(0, self._index[number], part)

    def _staged(self, staging: torch.Tensor) -> torch.Tensor:
        part = staging[self._block_offset : self.stop]
        return part.view(self._parts[0].dtype).view(self._parts[0].shape)


def _suits_numpy(buffer: torch.Tensor) -> bool:
    """Whether HostCopies can move it. With gaps numpy would copy it whole to take units of it."""
    return buffer.is_cpu and buffer.is_contiguous()


@final
class Units:
    """A buffer less its first bytes, read as units: rows that adjoin, taken together."""

    def __init__(self, buffer: torch.Tensor, skip_bytes: int, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        if buffer.dim() == 1:
            buffer = buffer[skip_bytes:]
            buffer = buffer[: buffer.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)
        self._typed = {torch.uint8: buffer}
        self.bits = unit_bytes | buffer.stride(0) | _bits_of(buffer)
        """See _bits_of."""
        self.in_memory: NDArray[Any] | None = buffer.numpy() if _suits_numpy(buffer) else None
        """The same as uint8 [unit, byte], where HostCopies can move it."""

    def as_type(self, dtype: torch.dtype) -> torch.Tensor:
        """The units as [unit, element]."""
        if dtype not in self._typed:
            self._typed[dtype] = self._typed[torch.uint8].view(dtype)
        return self._typed[dtype]


@final
class Run:
    """Some blocks of one slab at equal distances: `count` of them, `step` bytes apart.

    Most leases lie like that, and a run is cut up in one call where blocks would take one each.
    """

    def __init__(self, block: Block) -> None:
        self.slab = block.slab
        self.memory = block.slab.numpy()
        """The slab's bytes."""
        self.first = block.offset
        self.step = 0
        self.count = 1

    @property
    def bits(self) -> int:
        """See _bits_of."""
        return _bits_of(self.slab) | self.first | self.step

    def join(self, block: Block) -> bool:
        """Takes the block into the run, if it is the next one."""
        step = block.offset - self.first if self.count == 1 else self.step
        if block.slab is not self.slab or step <= 0:
            return False
        if block.offset != self.first + self.count * step:
            return False
        self.step = step
        self.count += 1
        return True

    def span(self, number: int, first: int, stop: int) -> slice:
        """These bytes of one block, in the slab."""
        start = self.first + number * self.step
        return slice(start + first, start + stop)

    def memory_parts(self, block_offset: int, unit_count: int, units: NDArray[Any]) -> NDArray[Any]:
        """What lies at `block_offset` bytes of each block: [block, *unit], so many like `units`."""
        shape = (self.count, unit_count, *units.shape[1:])
        strides = (self.step, *units.strides)
        return np.ndarray(shape, units.dtype, self.memory, self.first + block_offset, strides)

    def parts(
        self, block_offset: int, dtype: torch.dtype, shape: tuple[int, int]
    ) -> Sequence[torch.Tensor]:
        """What lies at `block_offset` bytes of each block, as `dtype` [*shape]."""
        size = dtype.itemsize
        strides = (self.step // size, shape[1], 1)
        start = (self.first + block_offset) // size
        wide = self.slab.view(dtype)
        parts = wide.as_strided((self.count, *shape), strides, wide.storage_offset() + start)
        return parts.unbind()


def runs_of(blocks: Sequence[Block]) -> list[Run]:
    """The blocks in order, those that make a run as one."""
    runs: list[Run] = []
    for block in blocks:
        if not runs or not runs[-1].join(block):
            runs.append(Run(block))
    return runs


def widest(dtypes: Sequence[torch.dtype], bits: int) -> torch.dtype:
    """The first of `dtypes` that fits sizes and places of these bits."""
    return next(dtype for dtype in dtypes if bits % dtype.itemsize == 0)


def _bits_of(tensor: torch.Tensor) -> int:
    """Its place and size in bytes, or-ed: what divides them all divides this, if a power of two."""
    return tensor.data_ptr() | int(tensor.storage_offset()) | tensor.numel()
