"""Stage 2: a plan meets the buffers of a pool and the blocks of an arena, and becomes tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from kvtide.device import Block, Device
from kvtide.transfer.plan import BufferPlan, ChunkPlan
from kvtide.transfer.run import Copier, DeviceCopier, HostCopier, Task

# So many views of buffers are kept from one request to the next; each is some hundred bytes.
_MOST_VIEWS = 4096
# numpy lets go of the interpreter's lock for rows of items, and for single items only from 500 on;
# but items are several times as fast. So few units are items only if they are moved in no time.
_MANY_UNITS = 500
_SMALL_BYTES = 16 << 10


@final
class Binder:
    """Binds plans to the buffers of one pool, and keeps the views of the buffers that it made."""

    def __init__(self, buffers: Sequence[torch.Tensor], device: Device) -> None:
        self._buffers = buffers
        self._device = device
        self._in_memory = [_suits_numpy(buffer) for buffer in buffers]
        self._bits = [_bits_of(buffer) | buffer.stride(0) for buffer in buffers]
        self._views: dict[tuple[object, ...], list[Any]] = {}

    def tasks_of(self, plan: ChunkPlan, blocks: Sequence[Block]) -> list[Task]:
        """The tasks of a plan; `blocks` are those of its chunks. Tasks may run side by side.

        All that can be done once for several chunks is done here: a call from Python in one lane
        is a wait for the interpreter's lock in the other.
        """
        memories = memories_of(blocks)
        copiers = [self._copier_of(buffers, blocks, memories) for buffers in plan.buffers]
        return [
            Task(plan.first_chunk + number, number, block, memories[number], copiers, task)
            for number, block in enumerate(blocks)
            for task in plan.tasks
        ]

    def _copier_of(
        self, plan: BufferPlan, blocks: Sequence[Block], memories: Sequence[memoryview]
    ) -> Copier:
        if all(self._in_memory[number] for number in plan.group.buffers):
            count = min(plan.units.shape[1], plan.most_units)
            are_items = count >= _MANY_UNITS or count * plan.unit_bytes <= _SMALL_BYTES
            views = self._views_of(plan, f"V{plan.unit_bytes}" if are_items else "uint8")
            return HostCopier(views, plan.units, memories, plan.block_offset)
        units = self._device.upload(torch.from_numpy(plan.units))
        views = self._views_of(plan, self._element_of(plan, blocks))
        return DeviceCopier(views, units, blocks, plan.block_offset)

    def _element_of(self, plan: BufferPlan, blocks: Sequence[Block]) -> torch.dtype:
        """The widest of the device's elements that sizes and addresses allow."""
        # A power of two divides the OR of some numbers only if it divides each of them.
        bits = plan.block_offset | plan.skip_bytes | plan.unit_bytes
        for number in plan.group.buffers:
            bits |= self._bits[number]
        for slab in {id(block.slab): block.slab for block in blocks}.values():
            bits |= _bits_of(slab)
        for block in blocks:
            bits |= block.offset
        return next(dtype for dtype in self._device.elements if bits % dtype.itemsize == 0)

    def _views_of(self, plan: BufferPlan, element: str | torch.dtype) -> list[Any]:
        """The buffers of a plan as units of such elements; known from the last time, mostly."""
        numbers = plan.group.buffers
        key = (numbers, plan.skip_bytes, plan.unit_bytes, element)
        if key not in self._views:
            if sum(map(len, self._views.values())) + len(numbers) > _MOST_VIEWS:
                self._views.clear()
            self._views[key] = [
                _view_of(self._buffers[number], plan.skip_bytes, plan.unit_bytes, element)
                for number in numbers
            ]
        return self._views[key]


def memories_of(blocks: Sequence[Block]) -> list[memoryview]:
    """Each block's bytes, and those behind them in its slab: the slab's own memory."""
    slabs = {id(block.slab): block.slab for block in blocks}
    arrays = {number: slab.numpy().data for number, slab in slabs.items()}
    return [arrays[id(block.slab)][block.offset :] for block in blocks]


def _view_of(
    buffer: torch.Tensor, skip_bytes: int, unit_bytes: int, element: str | torch.dtype
) -> Any:
    """A buffer less its first bytes, as units: [unit, element], or [unit] of one numpy item."""
    units = buffer
    if buffer.dim() == 1:  # without gaps
        units = buffer[skip_bytes:]
        units = units[: units.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)
    if isinstance(element, torch.dtype):
        return units.view(element)
    array = units.numpy()
    return array if element == "uint8" else array.view(element)[:, 0]


def _suits_numpy(buffer: torch.Tensor) -> bool:
    """Whether numpy can move it. With gaps numpy would copy it whole to take units of it."""
    return buffer.is_cpu and buffer.is_contiguous()


def _bits_of(tensor: torch.Tensor) -> int:
    """Its address, its offset and its size in bytes, or-ed."""
    return tensor.data_ptr() | int(tensor.storage_offset()) | tensor.numel()
