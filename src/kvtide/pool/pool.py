"""Pool: a geometry's buffers on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import final

import numpy as np
import torch

from kvtide.device import Device
from kvtide.errors import LayoutError
from kvtide.layout import BufferRows, Geometry, PlaneGeometry


@final
class Pool:
    """The planes of `geometry` for `page_count` pages, in `create`d or `adopt`ed tensors.

    Who holds which page isn't the pool's affair: kvtide's own engine asks a PageAllocator,
    an adopted pool belongs to an engine that keeps its own books.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: Device,
        slot_count: int,
        planes: Mapping[str, Sequence[torch.Tensor]],
        buffers: Sequence[torch.Tensor],
        buffer_rows: Sequence[BufferRows],
    ) -> None:
        """For `create` and `adopt`, which see to it that the arguments fit together."""
        self.geometry = geometry
        self.device = device
        self.slot_count = slot_count
        self.buffers = tuple(buffers)
        self.buffer_rows = tuple(buffer_rows)
        self._planes = {name: tuple(layers) for name, layers in planes.items()}

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.geometry.page_size

    @property
    def page_count(self) -> int:
        """Whole pages in the pool."""
        return self.slot_count // self.page_size

    @property
    def size_bytes(self) -> int:
        """Bytes of all planes."""
        return self.slot_count * self.geometry.token_bytes

    def plane(self, name: str, layer: int) -> torch.Tensor:
        """The slots of one layer, counted from the stage's first: [slot_count, *row_shape].

        A view, not a copy: writing to it writes to the pool. Raises LayoutError for a plane
        or a layer that isn't there; a negative one isn't.
        """
        layers = self._planes.get(name, ())
        if not 0 <= layer < len(layers):
            counts = {plane: len(them) for plane, them in self._planes.items()}
            raise LayoutError(f"pool has no plane {name!r}, layer {layer}; its layers are {counts}")
        return layers[layer]

    @classmethod
    def create(cls, geometry: Geometry, device: Device, *, page_count: int) -> Pool:
        """A pool of its own, zeroed, one buffer a plane. Raises LayoutError below one page."""
        if page_count < 1:
            raise LayoutError(f"pool {geometry.layout.name!r}: {page_count} pages; at least 1")
        slot_count = page_count * geometry.page_size
        planes: dict[str, list[torch.Tensor]] = {}
        buffers: list[torch.Tensor] = []
        rows: list[BufferRows] = []
        for plane in geometry.planes:
            buffer = device.allocate(plane.layer_count * slot_count * plane.row_bytes)
            typed = buffer.view(getattr(torch, plane.dtype))
            layers = typed.view(plane.layer_count, slot_count, *plane.row_shape)
            planes[plane.name] = list(layers)
            buffers.append(buffer)
            starts = np.arange(plane.layer_count, dtype=np.int64) * slot_count
            rows.append(BufferRows(plane.row_bytes, starts))
        return cls(geometry, device, slot_count, planes, buffers, rows)

    @classmethod
    def adopt(
        cls, geometry: Geometry, device: Device, planes: Mapping[str, Sequence[torch.Tensor]]
    ) -> Pool:
        """A pool over an engine's tensors, which stay the engine's: nothing is copied.

        `planes` gives each plane one tensor a layer, [slot, *row] or [page, token, *row], the
        slots of all tensors numbered alike. Raises LayoutError, naming the tensor, for
        missing or extra planes, a wrong layer count, shape, dtype or device, gaps between
        rows, no slots, or two tensors that share memory.
        """
        expected = {plane.name: plane for plane in geometry.planes}
        if set(planes) != set(expected):
            raise LayoutError(
                f"pool {geometry.layout.name!r}: planes {sorted(planes)} given, "
                f"{sorted(expected)} declared"
            )
        typed: dict[str, list[torch.Tensor]] = {}
        counts: dict[str, int] = {}
        for name, plane in expected.items():
            if len(planes[name]) != plane.layer_count:
                raise LayoutError(
                    f"plane {name!r}: {len(planes[name])} tensors for {plane.layer_count} layers"
                )
            typed[name] = []
            for layer, tensor in enumerate(planes[name]):
                where = f"plane {name!r}, layer {layer}"
                typed[name].append(_as_rows(tensor, plane, geometry.page_size, device, where))
                counts[where] = typed[name][-1].shape[0]
        if len(set(counts.values())) > 1:
            raise LayoutError(f"pool {geometry.layout.name!r}: slot counts differ: {counts}")
        slot_count = next(iter(counts.values()))
        if not slot_count:
            raise LayoutError(f"pool {geometry.layout.name!r}: its tensors have no slots")
        layers = [(plane, tensor) for name, plane in expected.items() for tensor in typed[name]]
        _refuse_shared_memory([tensor for _, tensor in layers], geometry.layout.name)
        start = np.zeros(1, np.int64)
        return cls(
            geometry,
            device,
            slot_count,
            typed,
            [tensor.view(-1).view(torch.uint8) for _, tensor in layers],
            [BufferRows(plane.row_bytes, start) for plane, _ in layers],
        )


def _as_rows(
    tensor: torch.Tensor, plane: PlaneGeometry, page_size: int, device: Device, where: str
) -> torch.Tensor:
    """`tensor` as [slot, *row_shape], a view; LayoutError where it can't be that."""
    dtype = getattr(torch, plane.dtype)
    if tensor.dtype != dtype:
        raise LayoutError(f"{where}: dtype {tensor.dtype}, declared {dtype}")
    if tensor.device.type != device.torch_device.type:
        raise LayoutError(f"{where}: on {tensor.device}, the pool's device is {device.name!r}")
    if not tensor.is_contiguous():
        raise LayoutError(f"{where}: strides {tensor.stride()} leave gaps between rows")
    shape, row = tuple(tensor.shape), plane.row_shape
    if len(shape) == len(row) + 1 and shape[1:] == row:
        return tensor
    if len(shape) == len(row) + 2 and shape[1:] == (page_size, *row):
        return tensor.view(-1, *row)
    raise LayoutError(
        f"{where}: shape {list(shape)} is neither [slot, {row}] nor [page, {page_size}, {row}]"
    )


def _refuse_shared_memory(tensors: Sequence[torch.Tensor], name: str) -> None:
    """LayoutError if two tensors overlap: a restore of one would write to the other."""
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    for (first, size_bytes), (second, _) in pairwise(spans):
        if first + size_bytes > second:
            raise LayoutError(f"pool {name!r}: two of its tensors share memory at {second:#x}")
