"""The form of a snapshot: how a geometry's planes become sections, chunks and spans. Pure.

    geometry   planes, each with layers of rows
    section    some layers of planes whose rows move together
    chunk      `chunk_rows` rows of a section, the last one shorter; it fills a block of host memory
    span       some whole layers of a chunk; one checksum covers it

A chunk holds, for each plane and for each layer, the rows in the order of the request's tokens.
Everything here follows from the geometry and the chunk size alone: not from a device, not from
where a pool's tensors lie, not from the slots. So any source fits any target. The constants are
part of the form, and none of them is for tuning: to change one is to count up FORM_VERSION
(kvtide.layout).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from kvtide.layout import Geometry, Ids

FULL_RUN_ROWS = 64
"""A chunk of narrow rows has a multiple of this number of rows, or a power of two below it. So a
chunk of whole pages moves by pages."""
WIDE_ROW_BYTES = 8 << 10
"""Rows of this width or more move one by one about as fast as together, so a chunk of such rows has
as many as fit."""
SPAN_BYTES = 1 << 20
"""A span ends with the first layer with which it has this number of bytes, or with its chunk."""


@final
@dataclass(frozen=True, eq=False)
class Section:
    """Layers of planes whose rows move together, because the planes have equal rules.

    `planes` are numbers of the geometry's planes, ascending. `layers` says which layers of each
    plane are in this section, and `widths` how many bytes one row of one layer has in it. A row
    that is larger than a chunk is split into `row_parts` equal parts, each of which is a row here.
    `group` is the number of the planes' group: see `Geometry.groups`.
    """

    group: int
    planes: tuple[int, ...]
    layers: tuple[range, ...]
    widths: tuple[int, ...]
    row_parts: int
    chunk_rows: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row in all planes and layers."""
        return sum(
            width * len(layers) for width, layers in zip(self.widths, self.layers, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk."""
        return self.chunk_rows * self.row_bytes

    def chunk_count(self, row_count: int) -> int:
        """How many chunks `row_count` rows of a request make."""
        return -(-row_count * self.row_parts // self.chunk_rows)

    def largest_chunk_bytes(self, row_count: int) -> int:
        """Bytes of the largest chunk of `row_count` rows of a request."""
        return min(self.chunk_rows, row_count * self.row_parts) * self.row_bytes

    def ids(self, rows: Ids) -> Ids:
        """The rows of this section for a request's `rows`, int64 [row * row_parts]."""
        if self.row_parts == 1:
            return rows
        return (rows[:, None] * self.row_parts + np.arange(self.row_parts)).reshape(-1)

    def span_stops(self, rows: int) -> tuple[int, ...]:
        """Where the spans of a chunk of `rows` rows end, in bytes from the chunk's beginning."""
        stops: list[int] = []
        first = stop = 0
        for width, layers in zip(self.widths, self.layers, strict=True):
            for _ in layers:
                stop += rows * width
                if stop - first >= SPAN_BYTES:
                    stops.append(stop)
                    first = stop
        return (*stops, stop) if stop > first else tuple(stops)


def sections_of(geometry: Geometry, chunk_bytes: int) -> list[Section]:
    """The sections of a geometry, in the order in which a snapshot has their chunks.

    Each group of planes is one section, or several where one row of all its planes and layers is
    larger than a chunk.
    """
    groups = geometry.groups
    sections: list[Section] = []
    for group in sorted(set(groups)):
        layers = [
            (number, layer)
            for number, plane in enumerate(geometry.planes)
            if groups[number] == group
            for layer in range(plane.layer_count)
        ]
        while layers:
            section = _first_section(geometry, group, layers, chunk_bytes)
            sections.append(section)
            del layers[: sum(map(len, section.layers))]
    return sections


def _first_section(
    geometry: Geometry, group: int, layers: Sequence[tuple[int, int]], chunk_bytes: int
) -> Section:
    """A section of the first of `layers` (plane, layer): as many as fit into a chunk, a row each.

    It has at least one layer. If one row of that layer alone doesn't fit, the row is split.
    """
    count, size = 0, 0
    for plane, _ in layers:
        size += geometry.planes[plane].row_bytes
        if size > chunk_bytes:
            break
        count += 1
    taken = layers[: max(1, count)]
    row_parts = 1 if count else _part_count(geometry.planes[taken[0][0]].row_bytes, chunk_bytes)
    planes = tuple(dict.fromkeys(plane for plane, _ in taken))
    found = [[layer for number, layer in taken if number == plane] for plane in planes]
    widths = tuple(geometry.planes[plane].row_bytes // row_parts for plane in planes)
    row_bytes = sum(width * len(some) for width, some in zip(widths, found, strict=True))
    rows = chunk_bytes // row_bytes
    return Section(
        group,
        planes,
        tuple(range(some[0], some[-1] + 1) for some in found),
        widths,
        row_parts,
        _even_rows(rows) if max(widths) < WIDE_ROW_BYTES else rows,
    )


def _part_count(row_bytes: int, chunk_bytes: int) -> int:
    """The fewest equal parts of a row that fit into a chunk each."""
    fewest = -(-row_bytes // chunk_bytes)
    return next(count for count in range(fewest, row_bytes + 1) if row_bytes % count == 0)


def _even_rows(rows: int) -> int:
    """The most rows up to `rows`, and at least 1, that FULL_RUN_ROWS allows."""
    if rows >= FULL_RUN_ROWS:
        return rows - rows % FULL_RUN_ROWS
    return 1 << (max(1, rows).bit_length() - 1)


def chunk_tokens_for(geometry: Geometry, chunk_bytes: int) -> int:
    """The most tokens that `chunk_bytes` hold, as FULL_RUN_ROWS allows; at least 1."""
    return _even_rows(chunk_bytes // max(1, geometry.token_bytes))


def chunk_sizes(sections: Sequence[Section], row_counts: Sequence[int]) -> Iterator[int]:
    """How many bytes of each chunk are used by a request with `row_counts` rows in the groups."""
    for section in sections:
        rows = row_counts[section.group] * section.row_parts
        for first in range(0, rows, section.chunk_rows):
            yield min(section.chunk_rows, rows - first) * section.row_bytes
