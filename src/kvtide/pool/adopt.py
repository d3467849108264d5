"""An engine's tensors as a pool's memory: views, never copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvtide.device import Device
from kvtide.errors import LayoutError
from kvtide.integers import shown
from kvtide.layout import BufferRows, Geometry, PlaneGeometry
from kvtide.pool.memory import PlaneMemory


def adopted(
    plane: PlaneGeometry,
    number: int,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    page_size: int,
    device: Device,
) -> PlaneMemory:
    """The tensors, one a layer, as memory of the geometry's plane of that number.

    Raises LayoutError, naming the layer, for tensors that don't fit the plane or the device.
    """
    where = f"plane {plane.name!r}"
    try:
        given = list(tensors)
    except TypeError as error:
        raise LayoutError(f"{where}: {shown(tensors)} isn't a tensor for each layer") from error
    if len(given) != plane.layer_count:
        raise LayoutError(f"{where}: {len(given)} tensors for {plane.layer_count} layers")
    places = [f"{where}, layer {layer}" for layer in range(len(given))]
    layers = [
        _row_tensor(tensor, plane, page_size, device, place)
        for tensor, place in zip(given, places, strict=True)
    ]
    buffers = [
        _byte_buffer(layer, plane.row_bytes, place)
        for layer, place in zip(layers, places, strict=True)
    ]
    start = np.zeros(1, np.int64)
    rows = [BufferRows(plane.row_bytes, start, number, buffer.dim() == 2) for buffer in buffers]
    return PlaneMemory(tuple(layers), tuple(buffers), tuple(rows))


def agreed_slot_count(
    geometry: Geometry, memory: Mapping[str, PlaneMemory], given: int | None
) -> int:
    """The number of slots on which all planes and the caller agree; LayoutError if they don't."""
    name, found = geometry.layout.name, dict[str, int]()
    for plane in geometry.planes:
        counts = {layer.shape[0] for layer in memory[plane.name].layers}
        if len(counts) > 1 or not min(counts):
            raise LayoutError(f"pool {name!r}: plane {plane.name!r} has rows {sorted(counts)}")
        if plane.is_dense:
            found[plane.name] = min(counts) * plane.tokens_per_row
    slots = {*found.values(), *([] if given is None else [given])}
    if len(slots) != 1:
        raise LayoutError(
            f"pool {name!r}: slot counts differ: {found}, slot_count given as {given}"
        )
    return slots.pop()


def _row_tensor(
    tensor: torch.Tensor, plane: PlaneGeometry, page_size: int, device: Device, where: str
) -> torch.Tensor:
    """Views `tensor` as [row, *row_shape]. Raises LayoutError if its shape or strides don't fit."""
    dtype = getattr(torch, plane.dtype)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{where}: {shown(tensor)} isn't a tensor")
    if tensor.dtype != dtype:
        raise LayoutError(f"{where}: dtype {tensor.dtype}, declared {dtype}")
    if tensor.device.type != device.torch_device.type:
        raise LayoutError(f"{where}: on {tensor.device}, the pool's device is {device.name!r}")
    shape, row = tuple(tensor.shape), plane.row_shape
    if len(shape) == len(row) + 1 and shape[1:] == row:
        return tensor
    if plane.tokens_per_row != 1 or not _are_pages(shape, row, page_size):
        raise LayoutError(
            f"{where}: shape {list(shape)} is neither [row, {row}] nor [page, {page_size}, {row}]"
        )
    try:
        return tensor.view(-1, *row)
    except RuntimeError as error:
        raise LayoutError(
            f"{where}: strides {tensor.stride()} leave other gaps between pages than between "
            "tokens; give [slot, row] instead"
        ) from error


def _are_pages(shape: tuple[int, ...], row: tuple[int, ...], page_size: int) -> bool:
    """Whether a shape is that of pages in which each token has its bytes in one place.

    The token's axis comes after the page's, or after axes of the row that have one element: heads
    first, of which there is one, is the same as tokens first. So is any order where a page has
    one token.
    """
    outer = 0
    while outer < len(row) and (page_size == 1 or row[outer] == 1):
        outer += 1
    return shape[1:] in [(*row[:axis], page_size, *row[axis:]) for axis in range(outer + 1)]


def _byte_buffer(rows: torch.Tensor, row_bytes: int, where: str) -> torch.Tensor:
    """[row, *row_shape] as bytes, a view: uint8 [all bytes], or with gaps [row, row_bytes].

    Raises LayoutError for gaps within a row and for rows that overlap.
    """
    if not rows[:1].is_contiguous():
        raise LayoutError(f"{where}: strides {rows.stride()} leave gaps within a row")
    flat = rows.unsqueeze(-1).view(torch.uint8)
    if flat.is_contiguous():
        return flat.view(-1)
    stride = flat.stride(0)
    if stride < row_bytes:
        raise LayoutError(
            f"{where}: rows of {row_bytes} bytes are {stride} bytes apart: they overlap"
        )
    return flat.as_strided((rows.shape[0], row_bytes), (stride, 1))


def refuse_shared_memory(buffers: Sequence[torch.Tensor], name: str) -> None:
    """Raises LayoutError if two buffers overlap: a restore of one would write to the other.

    The rows of a buffer may lie in the gaps of another, if both have the same stride.
    """
    spans = sorted(
        (buffer.data_ptr(), buffer.data_ptr() + _span_bytes(buffer), number)
        for number, buffer in enumerate(buffers)
    )
    open_spans: list[tuple[int, int, int]] = []
    for start, stop, number in spans:
        open_spans = [span for span in open_spans if span[1] > start]
        for _, _, earlier in open_spans:
            if not _interleaved(buffers[earlier], buffers[number]):
                raise LayoutError(f"pool {name!r}: two of its tensors share memory at {start:#x}")
        open_spans.append((start, stop, number))


def _span_bytes(buffer: torch.Tensor) -> int:
    if buffer.dim() == 1:
        return buffer.numel()
    return (buffer.shape[0] - 1) * buffer.stride(0) + buffer.shape[1]


def _interleaved(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the rows of `second`, which begins later, are in the gaps of `first`."""
    if first.dim() != 2 or second.dim() != 2 or first.stride(0) != second.stride(0):
        return False
    stride = first.stride(0)
    offset = (second.data_ptr() - first.data_ptr()) % stride
    return offset >= first.shape[1] and offset + second.shape[1] <= stride
