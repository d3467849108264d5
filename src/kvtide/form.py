"""The form of a snapshot: how a geometry's planes become sections, chunks and spans. Pure.

    geometry   planes, each with layers of rows
    section    some layers of planes whose rows move together
    chunk      `chunk_rows` rows of a section, the last one shorter; it fills a block of host memory
    span       some whole layers of a chunk; one checksum covers it

A chunk holds, for each plane and for each layer, the rows in the order of the request's tokens. The
form depends only on the geometry and the chunk size. It doesn't depend on a device, on the memory
layout of a pool's tensors or on the slots. So any source fits any target. The constants are part of
the form, not tuning: whoever changes one must count up FORM_VERSION (kvtide.layout). SPAN_BYTES is
tuning, because a seal states its spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import final

import numpy as np

from kvtide.layout import Geometry, Ids

FULL_RUN_ROWS = 64
"""A chunk of narrow rows has a multiple of this many rows, or a smaller power of two. So a chunk of
whole pages moves by pages."""
WIDE_ROW_BYTES = 8 << 10
"""Rows of at least this width move alone about as fast as together, so a chunk has all that fit."""
SPAN_BYTES = 512 << 10
"""A span ends with the layer with which it reaches this many bytes, or with its chunk. So its bytes
are still in the core's cache when they are hashed after the copy."""


@final
@dataclass(frozen=True, eq=False)
class Section:
    """Layers of planes whose rows move together, because the planes have equal rules.

    `planes` has numbers of the geometry's planes, ascending. For each plane `layers` has the layers
    in this section, and `widths` the bytes of a row of a layer. A row larger than a chunk is split
    into `row_parts` equal parts, each of which is a row of the section. `group` is the number of
    the planes' group: see `Geometry.groups`.
    """

    group: int
    planes: tuple[int, ...]
    layers: tuple[range, ...]
    widths: tuple[int, ...]
    row_parts: int
    chunk_rows: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row in all planes and layers."""
        return sum(
            width * len(layers) for width, layers in zip(self.widths, self.layers, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk."""
        return self.chunk_rows * self.row_bytes

    def chunk_count(self, row_count: int) -> int:
        """How many chunks are needed for `row_count` rows of a request."""
        return -(-row_count * self.row_parts // self.chunk_rows)

    def largest_chunk_bytes(self, row_count: int) -> int:
        """Bytes of the largest chunk of `row_count` rows of a request."""
        return min(self.chunk_rows, row_count * self.row_parts) * self.row_bytes

    def split(self, rows: Ids) -> Ids:
        """A request's `rows` as rows of this section, int64 [row * row_parts]."""
        if self.row_parts == 1:
            return rows
        return (rows[:, None] * self.row_parts + np.arange(self.row_parts)).reshape(-1)

    def span_stops(self, rows: int) -> tuple[int, ...]:
        """The ends of the spans of a chunk of `rows` rows, in bytes from its beginning."""
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
    """The sections of a geometry, in the order of their chunks in a snapshot.

    A group of planes is a single section, or several if a row of all its planes and layers is
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
    """A section of the first `layers` (plane, layer) whose rows together fit into a chunk.

    If even the first layer's row doesn't fit, the section has this layer, and splits its row.
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
    """The least number of equal parts into which a row must be split to fit into a chunk."""
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
        full, rest = divmod(row_counts[section.group] * section.row_parts, section.chunk_rows)
        yield from repeat(section.chunk_bytes, full)
        if rest:
            yield rest * section.row_bytes
