"""PoolUnderTest: a pool, and functions that read and write its bytes without kvtide.

`KINDS` has a function for each form of pool that engines have. It makes such a pool from a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.conformance.reference import Bytes, Image, ids_together, is_of_request, map_holes
from kvtide.conformance.samples import Sample
from kvtide.device import Device
from kvtide.layout import Counts, Geometry
from kvtide.layout.dtypes import DTYPE_BYTES
from kvtide.pool import Pool

Ids = NDArray[np.int64]
# Two places of a request fit without overlap, each with more than a chunk of 4 rows.
_ROWS = 12
# Elements between a row and the next, in pools that have gaps.
_GAP = 3


@final
@dataclass
class PoolUnderTest:
    """A pool, and three functions that read and write its bytes and maps.

    `read(plane, layer)` gives a copy of the layer's bytes, uint8 [row, byte]: first the row's
    bytes, then the gap before the next row. `write(plane, layer, bytes)` sets all of these.
    `write_map(name, ids)` sets one of the engine's maps, int64 [slot], if the layout needs maps.
    """

    pool: Pool
    read: Callable[[str, int], Bytes]
    write: Callable[[str, int, Bytes], None]
    write_map: Callable[[str, Ids], None] | None = None
    maps: dict[str, Ids] = field(default_factory=dict)
    """The maps as they were written last."""

    @property
    def geometry(self) -> Geometry:
        """The geometry of the pool."""
        return self.pool.geometry

    @cached_property
    def parts(self) -> list[tuple[str, int]]:
        """All pairs of a plane's name and a layer."""
        return [(p.name, layer) for p in self.geometry.planes for layer in range(p.layer_count)]

    @cached_property
    def row_counts(self) -> dict[str, int]:
        """The number of rows of each plane, by name."""
        return {plane.name: len(self.read(plane.name, 0)) for plane in self.geometry.planes}

    @cached_property
    def request_count(self) -> int:
        """How many requests have rows; 0 if no plane has rows of requests."""
        counts = [self.row_counts[p.name] for p in self.geometry.planes if is_of_request(p)]
        return min(counts, default=0)

    def image(self) -> Image:
        """A copy of every byte."""
        return {part: self.read(*part) for part in self.parts}

    def fill(self, seed: int) -> Image:
        """Fills all rows and gaps with random bytes, NaNs among them; returns them."""
        random = np.random.default_rng(seed)
        image = {}
        for part in self.parts:
            shape = self._shapes[part]
            image[part] = random.integers(0, 256, shape, np.uint8)
            self.write(*part, image[part])
        return image

    @cached_property
    def _shapes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {part: self.read(*part).shape for part in self.parts}

    def set_maps(self, maps: Mapping[str, Ids]) -> None:
        """Writes new contents to the engine's maps, in place."""
        for name, ids in maps.items():
            if self.write_map is None:
                raise NotImplementedError(
                    f"layout {self.geometry.layout.name!r} goes through the map {name!r}: "
                    "the kit needs write_map to set it"
                )
            self.write_map(name, ids)
            self.maps[name] = ids


Make = Callable[[Sample, Device], PoolUnderTest]


@final
class _Storage:
    """An engine's memory and maps for the planes of a sample."""

    def __init__(self, sample: Sample, device: Device) -> None:
        self.sample = sample
        self.device = device
        self.geometry = sample.geometry
        self.slot_count = _slot_count(sample)
        self.layers: dict[tuple[str, int], torch.Tensor] = {}
        """The bytes of each plane's layer, uint8 [row, byte] with the gaps."""
        self.maps = {
            name: torch.zeros(self.slot_count, dtype=torch.int64, device=device.torch_device)
            for name in map_holes(self.geometry)
        }

    def rows(self, name: str) -> int:
        """How many rows the plane has."""
        plane = next(plane for plane in self.geometry.planes if plane.name == name)
        known = Counts(self.sample.request_count, self.sample.mapped_rows)
        return plane.row_count(self.slot_count, known)

    def zeros(self, *shape: int) -> torch.Tensor:
        """A tensor of zeroed bytes on the device."""
        return torch.zeros(shape, dtype=torch.uint8, device=self.device.torch_device)

    def subject(self, pool: Pool) -> PoolUnderTest:
        """The pool, with functions that read and write this storage."""

        def read(name: str, layer: int) -> Bytes:
            found: Bytes = self.layers[name, layer].cpu().numpy().copy()
            return found

        def write(name: str, layer: int, data: Bytes) -> None:
            self.layers[name, layer].copy_(torch.from_numpy(data))

        def write_map(name: str, ids: Ids) -> None:
            self.maps[name].copy_(torch.from_numpy(ids))

        return PoolUnderTest(pool, read, write, write_map)

    def adopt(self, tensors: Mapping[str, Any]) -> PoolUnderTest:
        """A pool that adopts these tensors, which are views of the layers."""
        pool = Pool.adopt(
            self.geometry, self.device, tensors, maps=self.maps, slot_count=self.slot_count
        )
        return self.subject(pool)


def created(sample: Sample, device: Device) -> PoolUnderTest:
    """A pool that kvtide creates; each of its buffers holds a plane, layer by layer."""
    storage = _Storage(sample, device)
    pool = Pool.create(
        storage.geometry,
        device,
        page_count=storage.slot_count // sample.page_size,
        request_count=sample.request_count,
        maps=storage.maps,
        mapped_rows=sample.mapped_rows,
    )
    for (name, shape), buffer in zip(sample.planes.items(), pool.buffers, strict=True):
        layers = buffer.view(shape[1], storage.rows(name), _row_bytes(sample, name))
        storage.layers.update({(name, layer): layers[layer] for layer in range(shape[1])})
    return storage.subject(pool)


def one_tensor_a_layer(sample: Sample, device: Device) -> PoolUnderTest:
    """A pool of tensors [row, *row], or [page, token, *row] if a token is a row: the usual form."""
    storage = _Storage(sample, device)
    planes = {}
    for name, (dtype, layer_count, row) in sample.planes.items():
        layers = [_typed(storage, name, layer, dtype, row) for layer in range(layer_count)]
        planes[name] = layers
    return storage.adopt(planes)


def one_tensor_for_all_layers(sample: Sample, device: Device) -> PoolUnderTest:
    """A pool of tensors [layer, row, *row], or [layer, page, token, *row]."""
    storage = _Storage(sample, device)
    planes = {}
    for name, (dtype, layer_count, row) in sample.planes.items():
        count, row_bytes = storage.rows(name), _row_bytes(sample, name)
        memory = storage.zeros(layer_count, count, row_bytes)
        for layer in range(layer_count):
            storage.layers[name, layer] = memory[layer]
        lead = _lead(sample, storage, name)
        planes[name] = memory.view(-1).view(getattr(torch, dtype)).view(layer_count, *lead, *row)
    return storage.adopt(planes)


def gaps_between_rows(sample: Sample, device: Device) -> PoolUnderTest:
    """A pool whose rows have gaps between them; the gaps don't belong to the pool."""
    storage = _Storage(sample, device)
    planes: dict[str, list[torch.Tensor]] = {}
    for name, (dtype, layer_count, row) in sample.planes.items():
        count, size = storage.rows(name), DTYPE_BYTES[dtype]
        elements = _row_bytes(sample, name) // size
        planes[name] = []
        for layer in range(layer_count):
            memory = storage.zeros(count, (elements + _GAP) * size)
            storage.layers[name, layer] = memory
            typed = memory.view(-1).view(getattr(torch, dtype)).view(count, elements + _GAP)
            strides = typed[:, :elements].reshape(count, *row)[:1].stride()
            planes[name].append(typed.as_strided((count, *row), (elements + _GAP, *strides[1:])))
    return storage.adopt(planes)


KINDS: dict[str, Make] = {
    "created": created,
    "one tensor a layer": one_tensor_a_layer,
    "one tensor for all layers": one_tensor_for_all_layers,
    "gaps between rows": gaps_between_rows,
}


def _typed(
    storage: _Storage, name: str, layer: int, dtype: str, row: tuple[int, ...]
) -> torch.Tensor:
    memory = storage.zeros(storage.rows(name), _row_bytes(storage.sample, name))
    storage.layers[name, layer] = memory
    lead = _lead(storage.sample, storage, name)
    return memory.view(-1).view(getattr(torch, dtype)).view(*lead, *row)


def _lead(sample: Sample, storage: _Storage, name: str) -> tuple[int, ...]:
    """The axes before a row: [page, token] if tokens are rows and fill whole pages, else [row]."""
    plane = next(plane for plane in storage.geometry.planes if plane.name == name)
    count = storage.rows(name)
    if plane.tokens_per_row == 1 and count % sample.page_size == 0:
        return (count // sample.page_size, sample.page_size)
    return (count,)


def _row_bytes(sample: Sample, name: str) -> int:
    dtype, _, row = sample.planes[name]
    size = DTYPE_BYTES[dtype]
    for axis in row:
        size *= axis
    return size


def _slot_count(sample: Sample) -> int:
    """The slots for a dozen rows of the plane whose rows stand for the most tokens."""
    most = max(prod(map(ids_together, plane.rules)) for plane in sample.geometry.planes)
    slots = _ROWS * max(most, sample.page_size, 2)
    return -(-slots // sample.page_size) * sample.page_size
