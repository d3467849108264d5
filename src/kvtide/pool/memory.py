"""PlaneMemory: where a plane's bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from kvtide.device import Device
from kvtide.layout import BufferRows, PlaneGeometry


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlaneMemory:
    """A plane's layers as tensors, and the buffers of bytes that they view.

    `layers` are [row, *row_shape] each, of the plane's dtype. `buffers` are uint8, one or several
    of them; `buffer_rows` says of each how it divides into layers and rows.
    """

    layers: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]
    buffer_rows: tuple[BufferRows, ...]

    @property
    def row_count(self) -> int:
        """Rows of each layer."""
        return self.layers[0].shape[0]


def allocated(plane: PlaneGeometry, number: int, row_count: int, device: Device) -> PlaneMemory:
    """Zeroed memory for the geometry's plane of that number: one buffer, layer after layer."""
    buffer = device.allocate(plane.layer_count * row_count * plane.row_bytes)
    typed = buffer.view(getattr(torch, plane.dtype))
    layers = typed.view(plane.layer_count, row_count, *plane.row_shape)
    starts = np.arange(plane.layer_count, dtype=np.int64) * row_count
    rows = BufferRows(plane.row_bytes, starts, number)
    return PlaneMemory(tuple(layers), (buffer,), (rows,))
