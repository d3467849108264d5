"""Pool: a geometry's buffers on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from kvtide.device import Device
from kvtide.errors import LayoutError
from kvtide.integers import checked_integer, integer_of, shown
from kvtide.layout import (
    BufferRows,
    Counts,
    Geometry,
    Ids,
    PlaneGeometry,
    RequestRows,
    Rows,
    apply_rules,
    request_kinds,
)
from kvtide.pool.adopt import as_rows, byte_rows, refuse_shared_memory
from kvtide.pool.maps import EngineMap, Map, request_maps


@final
class Pool:
    """The planes of `geometry`, in `create`d or `adopt`ed tensors.

    Who holds which page isn't the pool's affair: kvtide's own engine asks a PageAllocator,
    an adopted pool belongs to an engine that keeps its own books. The same holds for maps: they
    are the engine's, and are read at each call that needs them.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: Device,
        slot_count: int,
        planes: Mapping[str, Sequence[torch.Tensor]],
        buffers: Sequence[torch.Tensor],
        buffer_rows: Sequence[BufferRows],
        maps: Mapping[str, Any],
        padding_slots: int = 0,
    ) -> None:
        """For `create` and `adopt`, which see to it that the arguments fit together."""
        self.geometry = geometry
        self.device = device
        self.slot_count = slot_count
        self.padding_slots = padding_slots
        """The first slots, as many, are nobody's: moving one is an error."""
        self.buffers = tuple(buffers)
        self.buffer_rows = tuple(buffer_rows)
        self._planes = {name: tuple(layers) for name, layers in planes.items()}
        self.request_kinds = request_kinds(rule for one in geometry.planes for rule in one.rules)
        """Which rows of its own a request has here: the kinds that `rows_of` asks for."""
        self._maps = {name: EngineMap(name, held) for name, held in maps.items()}
        shared = sorted(self.request_kinds & self._maps.keys())
        if shared:
            raise LayoutError(
                f"pool {geometry.layout.name!r}: {shared} are maps and requests' rows"
            )
        counts = [self._planes[plane.name][0].shape[0] for plane in geometry.planes]
        groups = geometry.groups
        self._groups = [
            (
                geometry.planes[groups.index(group)].rules,
                min(count for count, number in zip(counts, groups, strict=True) if number == group),
            )
            for group in sorted(set(groups))
        ]

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
        return sum(
            plane.row_bytes * tensor.shape[0]
            for plane in self.geometry.planes
            for tensor in self._planes[plane.name]
        )

    def plane(self, name: str, layer: int) -> torch.Tensor:
        """The rows of one layer, counted from the stage's first: [row, *row_shape].

        A view, not a copy: writing to it writes to the pool. Raises LayoutError for a plane
        or a layer that isn't there; a negative one isn't.
        """
        layers, number = self._planes.get(name, ()), integer_of(layer)
        if number is None or not 0 <= number < len(layers):
            counts = {plane: len(them) for plane, them in self._planes.items()}
            raise LayoutError(
                f"pool has no plane {name!r}, layer {shown(layer)}; its layers are {counts}"
            )
        return layers[number]

    def rows_of(self, slots: Ids, request: RequestRows = None) -> list[Rows]:
        """What a request with these slots (checked, int64 [token]) owns, for each group of planes.

        `request` is its own row, where the layout has planes of requests, or its rows by their
        kinds: one integer for each of `request_kinds`. Raises SlotError for what can't be meant.
        Blocks where a map lies on a device.
        """
        maps: dict[str, Map] = {**self._maps, **request_maps(request, self.request_kinds)}
        return [apply_rules(rules, slots, maps, count) for rules, count in self._groups]

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        device: Device,
        *,
        page_count: int,
        request_count: int = 0,
        maps: Mapping[str, Any] | None = None,
        mapped_rows: Mapping[str, int] | None = None,
    ) -> Pool:
        """A pool of its own, zeroed, one buffer a plane. Raises LayoutError below one page.

        `request_count` is how many requests have rows in planes of requests. `maps` are the
        maps of the layout's rules, one id a slot, and `mapped_rows` how many ids each leads to.
        """
        name, sizes = geometry.layout.name, dict(mapped_rows or {})
        page_count = _count(page_count, f"pool {name!r}: page_count", 1)
        request_count = _count(request_count, f"pool {name!r}: request_count", 0)
        sizes = {
            key: _count(size, f"pool {name!r}: mapped_rows of {key!r}", 0)
            for key, size in sizes.items()
        }
        slot_count, known = page_count * geometry.page_size, Counts(request_count, sizes)
        planes: dict[str, list[torch.Tensor]] = {}
        buffers: list[torch.Tensor] = []
        rows: list[BufferRows] = []
        for number, plane in enumerate(geometry.planes):
            count = plane.row_count(slot_count, known)
            buffer = device.allocate(plane.layer_count * count * plane.row_bytes)
            typed = buffer.view(getattr(torch, plane.dtype))
            planes[plane.name] = list(typed.view(plane.layer_count, count, *plane.row_shape))
            buffers.append(buffer)
            starts = np.arange(plane.layer_count, dtype=np.int64) * count
            rows.append(BufferRows(plane.row_bytes, starts, number))
        return cls(geometry, device, slot_count, planes, buffers, rows, maps or {})

    @classmethod
    def adopt(
        cls,
        geometry: Geometry,
        device: Device,
        planes: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        *,
        maps: Mapping[str, Any] | None = None,
        slot_count: int | None = None,
        padding_slots: int = 0,
        shares_memory: bool = False,
    ) -> Pool:
        """A pool over an engine's tensors, which stay the engine's: nothing is copied.

        `planes` gives each plane one tensor a layer, or one of all layers. A tensor is
        [row, *row], or [page, token, *row] where a token is a row; gaps between rows are left
        alone. `maps` are the engine's own, read at each call: one id a slot, or a function from
        ids to ids (int64). `slot_count` is needed where no
        plane has a row for each slot. The first `padding_slots` of them are the engine's own, and
        no token's: moving one is a SlotError. `shares_memory` is an engine's promise that of
        planes which lie in the same bytes it gives each byte to one at a time. Raises LayoutError,
        naming the tensor, for missing or extra planes, a wrong layer count, shape, dtype or
        device, gaps within a row, no rows, or two tensors that share memory without that promise.
        """
        expected = {plane.name: plane for plane in geometry.planes}
        name = geometry.layout.name
        if set(planes) != set(expected):
            raise LayoutError(
                f"pool {name!r}: planes {sorted(planes)} given, {sorted(expected)} declared"
            )
        layers = _Layers(geometry, device)
        for number, plane in enumerate(geometry.planes):
            layers.add(plane, number, planes[plane.name])
        if not shares_memory:
            refuse_shared_memory(layers.buffers, name)
        if slot_count is not None:
            slot_count = _count(slot_count, f"pool {name!r}: slot_count", 1)
        slots = layers.slot_count(slot_count)
        padding_slots = _count(padding_slots, f"pool {name!r}: padding_slots", 0)
        found = layers.typed, layers.buffers, layers.rows
        return cls(geometry, device, slots, *found, maps or {}, padding_slots)


@final
class _Layers:
    """What `adopt` has found so far."""

    def __init__(self, geometry: Geometry, device: Device) -> None:
        self.geometry = geometry
        self.device = device
        self.typed: dict[str, list[torch.Tensor]] = {}
        self.buffers: list[torch.Tensor] = []
        self.rows: list[BufferRows] = []

    def add(
        self, plane: PlaneGeometry, number: int, given: torch.Tensor | Sequence[torch.Tensor]
    ) -> None:
        """Takes a plane's tensors."""
        where = f"plane {plane.name!r}"
        try:
            tensors = list(given)
        except TypeError as error:
            raise LayoutError(f"{where}: {shown(given)} isn't a tensor for each layer") from error
        if len(tensors) != plane.layer_count:
            raise LayoutError(f"{where}: {len(tensors)} tensors for {plane.layer_count} layers")
        self.typed[plane.name] = []
        for layer, tensor in enumerate(tensors):
            place = f"{where}, layer {layer}"
            typed = as_rows(tensor, plane, self.geometry.page_size, self.device, place)
            buffer = byte_rows(typed, plane.row_bytes, place)
            self.typed[plane.name].append(typed)
            self.buffers.append(buffer)
            start = np.zeros(1, np.int64)
            self.rows.append(BufferRows(plane.row_bytes, start, number, buffer.dim() == 2))

    def slot_count(self, given: int | None) -> int:
        """The slots that all planes agree on."""
        name, found = self.geometry.layout.name, dict[str, int]()
        for plane in self.geometry.planes:
            counts = {tensor.shape[0] for tensor in self.typed[plane.name]}
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


def _count(value: object, what: str, least: int) -> int:
    return checked_integer(value, what, least=least, error=LayoutError)
