"""Stage 2: binds a plan to memory: views of blocks, and views of buffers as units."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtide.device import Block
from kvtide.transfer.plan import BufferPlan

# numpy releases the interpreter's lock for rows of bytes, and for single items only if they are at
# least 500. But items are several times as fast, so a few units are items, too, if they are short.
_MANY_UNITS = 500
_SMALL_BYTES = 16 << 10


def numpy_element(plan: BufferPlan) -> str:
    """How numpy moves the units of a plan: as whole items (`V16`) or as rows of bytes (`uint8`)."""
    count = min(plan.units.shape[1], plan.most_units)
    are_items = count >= _MANY_UNITS or count * plan.unit_bytes <= _SMALL_BYTES
    return f"V{plan.unit_bytes}" if are_items else "uint8"


def torch_element(
    plan: BufferPlan, bits: int, blocks: Sequence[Block], elements: Sequence[torch.dtype]
) -> torch.dtype:
    """The dtype in which torch moves the units of a plan: the widest of `elements` that fits.

    `bits` is the OR of the addresses and sizes of the plan's buffers: see `bits_of`.
    """
    # A power of two divides the OR of some numbers only if it divides each of them.
    bits |= plan.block_offset | plan.skip_bytes | plan.unit_bytes
    for slab in _slabs_of(blocks).values():
        bits |= bits_of(slab)
    for block in blocks:
        bits |= block.offset
    return next(dtype for dtype in elements if bits % dtype.itemsize == 0)


def memories_of(blocks: Sequence[Block]) -> list[memoryview]:
    """For each block a view of its slab's memory that begins with the block."""
    arrays = {number: slab.numpy().data for number, slab in _slabs_of(blocks).items()}
    return [arrays[id(block.slab)][block.offset :] for block in blocks]


def _slabs_of(blocks: Sequence[Block]) -> dict[int, torch.Tensor]:
    """The slabs of blocks, each once, by their `id`: tensors that are equal aren't the same."""
    return {id(block.slab): block.slab for block in blocks}


def step_of(blocks: Sequence[Block]) -> int | None:
    """The distance of blocks that follow each other evenly in one slab; otherwise None.

    Most leases have such blocks.
    """
    if len(blocks) < 2:
        return None
    slab, first = blocks[0].slab, blocks[0].offset
    step = blocks[1].offset - first
    is_even = step > 0 and all(
        block.slab is slab and block.offset == first + number * step
        for number, block in enumerate(blocks)
    )
    return step if is_even else None


def view_of(
    buffer: torch.Tensor, skip_bytes: int, unit_bytes: int, element: str | torch.dtype
) -> Any:
    """A view of a buffer, without its first bytes, as units: [unit, element] or [unit] of items."""
    units = buffer
    if buffer.dim() == 1:  # without gaps
        units = buffer[skip_bytes:]
        units = units[: units.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)
    if isinstance(element, torch.dtype):
        return units.view(element)
    array = units.numpy()
    return array if element == "uint8" else array.view(element)[:, 0]


def joined(views: list[NDArray[Any]]) -> Sequence[NDArray[Any]] | NDArray[Any]:
    """One view [buffer, unit, …] of views that follow each other evenly in memory, else the list.

    An engine often makes all layers in a single allocation.
    """
    first = views[0]
    addresses = [view.__array_interface__["data"][0] for view in views]
    steps = {after - before for before, after in pairwise(addresses)}
    forms = {(view.shape, view.strides) for view in views}
    if len(steps) != 1 or len(forms) != 1:
        return views
    return as_strided(first, (len(views), *first.shape), (steps.pop(), *first.strides))


def suits_numpy(buffer: torch.Tensor) -> bool:
    """Whether numpy can move units of it. With gaps numpy would first copy the whole buffer."""
    return buffer.is_cpu and buffer.is_contiguous()


def bits_of(tensor: torch.Tensor) -> int:
    """The OR of a tensor's address, offset, size in bytes, and the step between rows with gaps."""
    step = tensor.stride(0) if tensor.dim() == 2 else 0
    return tensor.data_ptr() | int(tensor.storage_offset()) | tensor.numel() | step
