"""Pool: a geometry's buffers on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from kvtide.device import Device
from kvtide.errors import LayoutError, SlotError
from kvtide.integers import checked_integer, integer_of, integers_of, shown
from kvtide.layout import (
    Counts,
    Geometry,
    Ids,
    RequestRows,
    Rows,
    Rule,
    apply_rules,
    request_kinds,
)
from kvtide.pool.adopt import adopted, agreed_slot_count, refuse_shared_memory
from kvtide.pool.maps import EngineMap, Map, request_maps
from kvtide.pool.memory import PlaneMemory, allocated
from kvtide.pool.slots import checked_slots


@final
class Pool:
    """The planes of `geometry` in memory: `create` allocates it, `adopt` takes an engine's tensors.

    A pool doesn't know who holds which page: kvtide's engine asks a PageAllocator, and another
    engine keeps its own books. The maps belong to the engine, too; a call that needs a map reads
    it.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: Device,
        memory: Mapping[str, PlaneMemory],
        slot_count: int,
        maps: Mapping[str, Any] | None = None,
        padding_slots: int = 0,
    ) -> None:
        """Called by `create` and `adopt`, which check that `memory`, by plane, fits."""
        self.geometry = geometry
        self.device = device
        self.slot_count = slot_count
        self.padding_slots = padding_slots
        """How many slots at the beginning belong to no request; to move one is an error."""
        self._memory = {plane.name: memory[plane.name] for plane in geometry.planes}
        self.buffers = tuple(buffer for plane in self._memory.values() for buffer in plane.buffers)
        """All buffers of bytes, plane after plane."""
        self.buffer_rows = tuple(
            rows for plane in self._memory.values() for rows in plane.buffer_rows
        )
        """How each buffer divides into rows."""
        self.request_kinds = request_kinds(rule for p in geometry.planes for rule in p.rules)
        """The kinds of rows that a request has here; `rows_of` needs one row of each kind."""
        self._maps = {name: EngineMap(name, held) for name, held in (maps or {}).items()}
        shared = sorted(self.request_kinds & self._maps.keys())
        if shared:
            raise LayoutError(
                f"pool {geometry.layout.name!r}: {shared} are maps and requests' rows"
            )
        self._groups = self._rules_and_rows()

    def _rules_and_rows(self) -> list[tuple[tuple[Rule, ...], int]]:
        """The rules of each group of planes, and how many rows all planes of the group have."""
        counts: dict[tuple[Rule, ...], int] = {}
        for plane in self.geometry.planes:
            row_count = self._memory[plane.name].row_count
            counts[plane.rules] = min(row_count, counts.get(plane.rules, row_count))
        return list(counts.items())

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
            plane.row_bytes * layer.shape[0]
            for plane in self.geometry.planes
            for layer in self._memory[plane.name].layers
        )

    def plane(self, name: str, layer: int) -> torch.Tensor:
        """The rows of a layer, whose number counts from the stage's first: [row, *row_shape].

        A view, not a copy: writing to it writes to the pool. Raises LayoutError for a plane
        or a layer that isn't there; a negative layer isn't there.
        """
        layers = self._memory[name].layers if name in self._memory else ()
        number = integer_of(layer)
        if number is None or not 0 <= number < len(layers):
            counts = {plane.name: plane.layer_count for plane in self.geometry.planes}
            raise LayoutError(
                f"pool has no plane {name!r}, layer {shown(layer)}; its layers are {counts}"
            )
        return layers[number]

    def checked(self, slots: Any) -> Ids:
        """A checked copy of `slots`, int64 [token]. Raises SlotError, which names the first bad id.

        Takes integers in a sequence, an array or a tensor; blocks for a tensor on a device.
        """
        return checked_slots(slots, self.slot_count, self.padding_slots)

    def slots_of(self, pages: Sequence[int]) -> Ids:
        """The slots of `pages` in order, int64 [len(pages) * page_size].

        Raises SlotError for a page outside the pool.
        """
        size, ids = self.page_size, integers_of(pages, "page", "page")
        outside = (ids < 0) | (ids >= self.page_count)
        if outside.any():
            bad, last = int(outside.argmax()), self.page_count - 1
            raise SlotError(f"page {ids[bad]} at position {bad} isn't in 0 … {last}")
        return (ids[:, None] * size + np.arange(size)).reshape(-1)

    def rows_of(self, slots: Ids, request: RequestRows = None) -> list[Rows]:
        """The rows of a request with these slots (checked, int64 [token]), by group of planes.

        The groups are numbered as in `Geometry.groups`. `request` is the number of the request's
        own row, or one for each of `request_kinds` where there are several. Raises SlotError for
        an invalid slot or row. Blocks where a map lies on a device.
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
        """A pool in new memory, zeroed, one buffer a plane. Raises LayoutError below one page.

        `request_count` is how many requests have rows in planes of requests. `maps` are the
        maps that the layout's rules need, and `mapped_rows` says how many ids each leads to.
        """
        what = f"pool {geometry.layout.name!r}"
        page_count = _count(page_count, f"{what}: page_count", 1)
        known = Counts(
            _count(request_count, f"{what}: request_count", 0),
            {
                name: _count(rows, f"{what}: mapped_rows of {name!r}", 0)
                for name, rows in (mapped_rows or {}).items()
            },
        )
        slot_count = page_count * geometry.page_size
        memory = {
            plane.name: allocated(plane, number, plane.row_count(slot_count, known), device)
            for number, plane in enumerate(geometry.planes)
        }
        return cls(geometry, device, memory, slot_count, maps)

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
        """Makes a pool over an engine's tensors, which stay the engine's. Nothing is copied.

        `planes` gives each plane a tensor a layer, or one tensor of all layers. A layer is
        [row, *row_shape], or [page, token, *row_shape] where a token is a row; nobody touches gaps
        between rows. `maps` are the maps that the layout's rules need, read at each call: one id a
        slot, or a function from ids to ids (int64). `slot_count` is needed where no plane has a
        row for each slot. The first `padding_slots` slots belong to no request, and moving one is
        a SlotError. `shares_memory` says that planes may lie in the same bytes, of which the engine
        gives each byte to one plane at a time.

        Raises LayoutError, naming the tensor, for missing or extra planes, a wrong layer count,
        shape, dtype or device, gaps within a row, no rows, or memory that two tensors share
        without that promise.
        """
        name, expected = geometry.layout.name, {plane.name for plane in geometry.planes}
        if set(planes) != expected:
            raise LayoutError(
                f"pool {name!r}: planes {sorted(planes)} given, {sorted(expected)} declared"
            )
        memory = {
            plane.name: adopted(plane, number, planes[plane.name], geometry.page_size, device)
            for number, plane in enumerate(geometry.planes)
        }
        if not shares_memory:
            buffers = [buffer for plane in memory.values() for buffer in plane.buffers]
            refuse_shared_memory(buffers, name)
        if slot_count is not None:
            slot_count = _count(slot_count, f"pool {name!r}: slot_count", 1)
        slots = agreed_slot_count(geometry, memory, slot_count)
        padding_slots = _count(padding_slots, f"pool {name!r}: padding_slots", 0)
        return cls(geometry, device, memory, slots, maps, padding_slots)


def _count(value: object, what: str, least: int) -> int:
    return checked_integer(value, what, least=least, error=LayoutError)
