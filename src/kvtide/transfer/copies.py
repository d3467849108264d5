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
    """What moves between buffers that lie alike and the blocks of one run, for each of its chunks.

    In a block they lie without gaps, one buffer after another.
    """

    @property
    def unit_bytes(self) -> int:
        """Of one unit."""
        ...

    def gather(self, number: int, move: Move, staging: torch.Tensor | None) -> None:
        """Units to the block of that number, or to `staging`, which is laid out like a block."""
        ...

    def scatter(self, number: int, move: Move, staging: torch.Tensor | None) -> None:
        """The same units back."""
        ...


@final
class Move:
    """Of some copies those that are made in one go: of `buffers` all units, or those of `span`.

    `stop` is where they end in a block, in bytes.
    """

    __slots__ = ("buffers", "copies", "span", "stop")

    def __init__(self, copies: Copies, buffers: range, span: slice | None, stop: int) -> None:
        self.copies = copies
        self.buffers = buffers
        self.span = span
        self.stop = stop

    def gather(self, number: int, staging: torch.Tensor | None) -> None:
        """See Copies."""
        self.copies.gather(number, self, staging)

    def scatter(self, number: int, staging: torch.Tensor | None) -> None:
        """See Copies."""
        self.copies.scatter(number, self, staging)


@final
class HostCopies:
    """Of buffers in host memory, by numpy.

    A call of it takes a microsecond, where one of torch's takes eight, and while one lane is in
    the interpreter the others can't begin a move. And it moves a unit as a whole both ways, where
    index_copy_ goes element by element.
    """

    def __init__(
        self,
        units: Units,
        index: NDArray[np.int64],
        run: Run,
        block_offset: int,
        most_units: int,
    ) -> None:
        """`index` has for each chunk its units, int64 [chunk, unit]; `most_units` move at once."""
        unit_count, unit_bytes = min(index.shape[1], most_units), units.unit_bytes
        self._block_offset = block_offset
        self.unit_bytes = unit_bytes
        are_items = unit_count >= _MANY_UNITS or unit_count * unit_bytes <= _SMALL_BYTES
        self._units = units.items if are_items else units.in_memory
        self._index = index
        shape = (len(self._units), *index.shape[1:], *self._units[0].shape[1:])
        self._parts = run.memory_parts(block_offset, shape, self._units[0].dtype)

    def gather(self, number: int, move: Move, staging: torch.Tensor | None) -> None:
        """See Copies."""
        index, parts = self._ends(number, move, staging)
        units = self._units
        for at in move.buffers:
            # Rows were checked. To "raise" for others, numpy would go by way of a buffer.
            units[at].take(index, 0, parts[at], "clip")

    def scatter(self, number: int, move: Move, staging: torch.Tensor | None) -> None:
        """See Copies."""
        index, parts = self._ends(number, move, staging)
        units = self._units
        for at in move.buffers:
            units[at][index] = parts[at]

    def _ends(
        self, number: int, move: Move, staging: torch.Tensor | None
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Which units, and of each buffer their place in the block or in `staging`."""
        index = self._index[number]
        parts = self._parts[number] if staging is None else self._staged(staging)
        return (index, parts) if move.span is None else (index[move.span], parts[:, move.span])

    def _staged(self, staging: torch.Tensor) -> NDArray[Any]:
        shape, dtype = self._parts.shape[1:], self._parts.dtype
        return np.ndarray(shape, dtype, staging.numpy(), self._block_offset)


@final
class DeviceCopies:
    """Of buffers anywhere, by torch; of those in host memory, the padded ones.

    In inference mode, since an engine's tensors may have been made in it, and such tensors can't
    be written outside.
    """

    def __init__(
        self,
        units: Units,
        index: torch.Tensor,
        run: Run,
        block_offset: int,
        elements: Sequence[torch.dtype],
    ) -> None:
        """`index` has for each chunk its units, int64 [chunk, unit], where kernels read it. Bytes
        move as the widest of `elements` that sizes and places allow."""
        self._block_offset = block_offset
        self.unit_bytes = units.unit_bytes
        dtype = widest(elements, units.bits | run.bits | block_offset)
        self._units = units.as_type(dtype)
        self._index = index.unbind()
        shape = (len(self._units), index.shape[1], units.unit_bytes // dtype.itemsize)
        self._parts = run.parts(block_offset, dtype, shape)

    @torch.inference_mode()
    def gather(self, number: int, move: Move, staging: torch.Tensor | None) -> None:
        """See Copies."""
        for at in move.buffers:
            index, part = self._ends(number, at, move.span, staging)
            torch.index_select(self._units[at], 0, index, out=part)

    @torch.inference_mode()
    def scatter(self, number: int, move: Move, staging: torch.Tensor | None) -> None:
        """See Copies."""
        for at in move.buffers:
            index, part = self._ends(number, at, move.span, staging)
            self._units[at].index_copy_(0, index, part)

    def _ends(
        self, number: int, at: int, span: slice | None, staging: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which units of a buffer, and their place in the block or in `staging`."""
        index, part = self._index[number], self._parts[number][at]
        if staging is not None:
            first = self._block_offset + at * part.nbytes
            part = staging[first : first + part.nbytes].view(part.dtype).view(part.shape)
        return (index, part) if span is None else (index[span], part[span])


def _suits_numpy(buffer: torch.Tensor) -> bool:
    """Whether HostCopies can move it. With gaps numpy would copy it whole to take units of it."""
    return buffer.is_cpu and buffer.is_contiguous()


@final
class Units:
    """Buffers that lie alike less their first bytes, read as units: rows that adjoin, together."""

    def __init__(self, buffers: Sequence[torch.Tensor], skip_bytes: int, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        units = [_as_units(buffer, skip_bytes, unit_bytes) for buffer in buffers]
        self._typed = {torch.uint8: units}
        self.bits = unit_bytes
        """See _bits_of."""
        for one in units:
            self.bits |= one.stride(0) | _bits_of(one)
        suit_numpy = all(_suits_numpy(one) for one in units)
        self.in_memory: list[NDArray[Any]] = [one.numpy() for one in units] if suit_numpy else []
        """The same as uint8 [unit, byte], where HostCopies can move them; none elsewhere."""
        self.items = [one.view(f"V{unit_bytes}")[:, 0] for one in self.in_memory]
        """The same again, a unit as an item: [unit]."""

    def __len__(self) -> int:
        return len(self._typed[torch.uint8])

    def as_type(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The units of each buffer as [unit, element]."""
        if dtype not in self._typed:
            self._typed[dtype] = [one.view(dtype) for one in self._typed[torch.uint8]]
        return self._typed[dtype]


def _as_units(buffer: torch.Tensor, skip_bytes: int, unit_bytes: int) -> torch.Tensor:
    if buffer.dim() > 1:  # rows with gaps
        return buffer
    buffer = buffer[skip_bytes:]
    return buffer[: buffer.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)


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

    def memory_parts(
        self, block_offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """What lies at `block_offset` bytes of each block, without gaps: [block, *shape]."""
        strides = [dtype.itemsize]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        offset, strides = self.first + block_offset, [self.step, *strides]
        return np.ndarray((self.count, *shape), dtype, self.memory, offset, strides)

    def parts(
        self, block_offset: int, dtype: torch.dtype, shape: tuple[int, int, int]
    ) -> list[Sequence[torch.Tensor]]:
        """The same as `dtype`: for each block `shape[0]` tensors [*shape[1:]]."""
        size = dtype.itemsize
        strides = (self.step // size, shape[1] * shape[2], shape[2], 1)
        start = (self.first + block_offset) // size
        wide = self.slab.view(dtype)
        parts = wide.as_strided((self.count, *shape), strides, wide.storage_offset() + start)
        return [part.unbind() for part in parts.unbind()]


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
