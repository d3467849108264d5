"""The planes of the NPU pools: tensors in pages, and how tokens are written to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, final

import torch

from kvtide.errors import LayoutError, SlotError
from kvtide.integers import checked_integer, shown
from kvtide.npu.copy import TILE_COLUMNS

logger = logging.getLogger(__name__)

# SGLang stores these dtypes as bytes, on the device and in lists on the host.
KEPT_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)

BufferInfos = tuple[list[int], list[int], list[int]]
"""Each buffer's address, its length and the length of its pages, in bytes."""


class Layer(Protocol):
    """The part of an attention layer that these pools use."""

    @property
    def layer_id(self) -> int:
        """The layer's number in the whole model."""
        ...


@final
@dataclass(frozen=True, slots=True)
class PlaneBuffer:
    """A plane of these pools: [layer, page, token, *row], in the stored dtype.

    `layers` has the layers' numbers in the model. In Ascend's NZ order a page's bytes are
    [tile, token, 16], and `tiles` is the number of tiles; otherwise it is 0.
    """

    name: str
    tensor: torch.Tensor
    layers: Sequence[int]
    tiles: int = 0

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a token's row, in elements."""
        return tuple(self.tensor.shape[3:])

    @property
    def is_empty(self) -> bool:
        """Whether its rows have no bytes, as in the second plane of packed records."""
        return not self.tensor.numel()

    def rows(self, dtype: str) -> list[torch.Tensor]:
        """The layers in the form that `Pool.adopt` takes."""
        typed = self.tensor.view(getattr(torch, dtype))
        if self.tiles:
            layers, pages, tokens = typed.shape[:3]
            typed = typed.view(layers, pages, self.tiles, tokens, TILE_COLUMNS)
        return list(typed)

    def write(self, layer: int, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Writes tokens, in the stored dtype, to the slots `loc` (int64 [token])."""
        rows = self._rows(layer)
        rows.index_copy_(0, self._index(loc), _bytes(values).view(-1, rows.shape[1]))

    def move(self, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies tokens from slots to slots. Reads all tokens before it writes one."""
        rows = self._rows(layer)
        rows.index_copy_(0, self._index(target), rows.index_select(0, self._index(source)))

    def _rows(self, layer: int) -> torch.Tensor:
        """A layer as uint8 [row, row_bytes]. A row is a token, or a token's part of a tile."""
        width = TILE_COLUMNS if self.tiles else prod(self.row_shape)
        return _bytes(self.tensor[layer]).view(-1, width * self.tensor.itemsize)

    def _index(self, loc: torch.Tensor) -> torch.Tensor:
        """The rows of the slots, in the order of the tokens."""
        if not self.tiles:
            return loc
        size = self.tensor.shape[2]
        tiles = torch.arange(self.tiles, device=loc.device)
        page, token = loc.div(size, rounding_mode="floor"), loc.remainder(size)
        rows: torch.Tensor = (page[:, None] * self.tiles + tiles) * size + token[:, None]
        return rows.reshape(-1)


def infos_of(planes: Sequence[PlaneBuffer]) -> BufferInfos:
    """The planes' buffers, one a layer."""
    buffers = [layer for plane in planes for layer in plane.tensor]
    return (
        [buffer.data_ptr() for buffer in buffers],
        [buffer.nbytes for buffer in buffers],
        [buffer[0].nbytes for buffer in buffers],
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def slots_on(device: torch.device, loc: Any) -> torch.Tensor:
    """Slots, a tensor of integers, as int64 [token] on the device. Raises SlotError for anything
    else that a cast would turn into slots. Whether the slots exist, only the device knows."""
    dtype = loc.dtype if isinstance(loc, torch.Tensor) else torch.bool
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise SlotError(f"slots to write must be a tensor of integers [token], not {shown(loc)}")
    found: torch.Tensor = loc.reshape(-1).to(device=device, dtype=torch.int64)
    return found


def tell_unused(said: set[str], **rows: object) -> None:
    """Logs once for each argument that is ignored here: SGLang gives `rows` to every pool."""
    for name, given in rows.items():
        if given is not None and name not in said:
            said.add(name)
            logger.warning(
                "NPU pool: %s is ignored: the pool has no rows of requests, so its CPU copies hold "
                "only tokens", name,
            )  # fmt: skip


def size_of(name: str, value: object, least: int = 1) -> int:
    """A size that a pool is made with; LayoutError for an invalid size."""
    return checked_integer(value, f"NPU pool: {name}", least=least, error=LayoutError)


def refuse(name: str, value: object, only: object, reason: str) -> None:
    """Raises LayoutError unless `value` is the only value that these pools take."""
    if value is not only:
        raise LayoutError(f"NPU pool: {name}={value!r} isn't supported: {reason}; leave it {only}")
