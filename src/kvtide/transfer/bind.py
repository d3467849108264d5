"""Stage 2: what a plan is bound to: the memory of blocks, and buffers that are read as units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtide.device import Block
from kvtide.transfer.plan import BufferPlan

# numpy moves a unit several times as fast as one item than as a row of bytes. But with fewer than
# 500 items it holds the interpreter's lock meanwhile. So fewer units are items only where all of
# them are so small that nobody waits for long.
_MANY_UNITS = 500
_SMALL_BYTES = 16 << 10


def numpy_element(plan: BufferPlan) -> str:
    """The dtype by which numpy moves a plan's units: whole items (`V16`), or bytes (`uint8`)."""
    count = min(plan.units.shape[1], plan.most_units)
    are_items = count >= _MANY_UNITS or count * plan.unit_bytes <= _SMALL_BYTES
    return f"V{plan.unit_bytes}" if are_items else "uint8"


def torch_element(
    plan: BufferPlan, bits: int, blocks: Sequence[Block], elements: Sequence[torch.dtype]
) -> torch.dtype:
    """The dtype by which torch moves a plan's units: the widest of `elements` that fits everywhere.

    `bits` are the addresses and sizes of the plan's buffers, or-ed: see `bits_of`.
    """
    # A power of two divides the OR of some numbers only if it divides each of them.
    bits |= plan.block_offset | plan.skip_bytes | plan.unit_bytes
    for slab in {id(block.slab): block.slab for block in blocks}.values():
        bits |= bits_of(slab)
    for block in blocks:
        bits |= block.offset
    return next(dtype for dtype in elements if bits % dtype.itemsize == 0)


def memories_of(blocks: Sequence[Block]) -> list[memoryview]:
    """Each block's bytes, and those behind them in its slab: the slab's own memory."""
    slabs = {id(block.slab): block.slab for block in blocks}
    arrays = {number: slab.numpy().data for number, slab in slabs.items()}
    return [arrays[id(block.slab)][block.offset :] for block in blocks]


def view_of(
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


def suits_numpy(buffer: torch.Tensor) -> bool:
    """Whether numpy can move it. With gaps numpy would copy it whole to take units of it."""
    return buffer.is_cpu and buffer.is_contiguous()


def bits_of(tensor: torch.Tensor) -> int:
    """Its address, its offset and its size in bytes, or-ed; and how far apart its rows are where
    they have gaps."""
    step = tensor.stride(0) if tensor.dim() == 2 else 0
    return tensor.data_ptr() | int(tensor.storage_offset()) | tensor.numel() | step
